"""Predict what a model would need and gain, from formulas or from measurements of one stage.

Only `profile` and `profile_slices` need torch.

Example:
    >>> from bpipe.estimate import Execution, model_named
    >>> from bpipe.estimate.stages import stages_of
    >>> model = model_named("gpt3-96b")
    >>> stage = stages_of(model, Execution(tensor_parallel=4), num_stages=8, microbatch_size=1)[0]
    >>> round(stage.num_parameters / 1e9, 1), round(stage.saved_bytes / 2**30, 2)
    (12.5, 1.62)
"""

from bpipe.estimate.advice import Advice, Candidate
from bpipe.estimate.devices import Device, device_named
from bpipe.estimate.execution import Execution
from bpipe.estimate.huang import Estimate
from bpipe.estimate.long_contexts import UnevenHalves, uneven_halves
from bpipe.estimate.measurement import Measurement, Profile, costs_of
from bpipe.estimate.models import model_named
from bpipe.estimate.slice_profile import SliceMeasurement, SliceProfile, costs_of_slices
from bpipe.estimate.stages import hiding_bytes_per_s
from bpipe.estimate.state_bytes import bytes_per_parameter
from bpipe.estimate.transformer import Transformer

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
