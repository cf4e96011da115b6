"""What runs when: plans, made and proven in pure Python, without torch.

Example:
    >>> from bpipe.schedules import build
    >>> plan = build("1f1b", num_stages=2, num_microbatches=2)
    >>> [str(action) for action in plan.compute(0)]
    ['0F0', '0F1', '0B0', '0B1']
"""

from bpipe.schedules.action import Action, Channel, Op, Purpose
from bpipe.schedules.build import build, finish, names
from bpipe.schedules.plan import Plan
from bpipe.schedules.verify import verify

__all__ = ["Action", "Channel", "Op", "Plan", "Purpose", "build", "finish", "names", "verify"]
