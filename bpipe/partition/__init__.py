"""Cut a model into stages, by the names of its modules or by what its layers take, and sequences into slices, by cost.

Choosing stages and slices needs no torch.

Example:
    >>> layers = [LayerCost(names=(f"layers.{i}",), forward_s=1.0, backward_s=2.0, saved_bytes=100) for i in range(8)]
    >>> choose_stages(layers, num_stages=4, num_microbatches=8).rank_bytes
    (800, 600, 400, 200)
"""

from bpipe.estimate.layers import LayerCost
from bpipe.partition.choice import StageChoice
from bpipe.partition.choose import choose_stages
from bpipe.partition.sequence import slice_lengths

__all__ = ["LayerCost", "StageChoice", "choose_stages", "slice_lengths"]
