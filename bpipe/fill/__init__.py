"""Work in the bubbles: what a rank does while it would wait for another one (PipeFill, Arfeen et al., 2024)."""

from bpipe.fill.inference import Inference
from bpipe.fill.iterated import Pieces
from bpipe.fill.job import Job
from bpipe.fill.optimizer_steps import OptimizerSteps

__all__ = ["Inference", "Job", "OptimizerSteps", "Pieces"]
