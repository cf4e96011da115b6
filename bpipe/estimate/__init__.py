"""Predict what a model would need and gain, from formulas or from measurements of one stage.

Only `profile` and `profile_slices` need torch.

Example:
    >>> from bpipe.estimate import Execution, model_named
    >>> from bpipe.estimate.stages import layer_costs
    >>> rates = {"flops_per_s": 4 * 140e12, "bytes_per_parameter": 18}
    >>> embedding, layer, *_ = layer_costs(model_named("gpt3-96b"), Execution(tensor_parallel=4), 1, **rates)
    >>> round(layer.forward_s, 4), round(layer.saved_bytes / 2**20)
    (0.009, 166)
"""

from bpipe.estimate.advice import Advice, Candidate
from bpipe.estimate.devices import Device, device_named
from bpipe.estimate.execution import Execution
from bpipe.estimate.huang import Estimate
from bpipe.estimate.long_contexts import UnevenHalves, uneven_halves
from bpipe.estimate.measurement import Measurement, Profile
from bpipe.estimate.models import model_named
from bpipe.estimate.slice_profile import SliceMeasurement, SliceProfile, costs_of_slices
from bpipe.estimate.stages import hiding_bytes_per_s
from bpipe.estimate.state_bytes import bytes_per_parameter
from bpipe.estimate.transformer import Transformer
from bpipe.estimate.workload import costs_of

__all__ = [
    "Advice",
    "Candidate",
    "Device",
    "Estimate",
    "Execution",
    "Measurement",
    "Profile",
    "SliceMeasurement",
    "SliceProfile",
    "Transformer",
    "UnevenHalves",
    "bytes_per_parameter",
    "costs_of",
    "costs_of_slices",
    "device_named",
    "hiding_bytes_per_s",
    "model_named",
    "uneven_halves",
]
