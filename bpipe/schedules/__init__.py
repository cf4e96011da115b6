"""Plans of what runs when, made, proven and simulated in pure Python, without torch.

Example:
    >>> from bpipe.schedules import build
    >>> plan = build("1f1b", num_stages=2, num_microbatches=2)
    >>> [str(action) for action in plan.compute(0)]
    ['0F0', '0F1', '0B0', '0B1']
"""

from bpipe.schedules.action import Action, Channel, Op, Purpose
from bpipe.schedules.build import build, finish, names, rules
from bpipe.schedules.costs import Costs, Link
from bpipe.schedules.destinations import Destinations
from bpipe.schedules.plan import Plan
from bpipe.schedules.rule import Rule
from bpipe.schedules.simulate import simulate
from bpipe.schedules.sizes import Sizes, StageSizes
from bpipe.schedules.timeline import Holding, Lane, Span, Timeline
from bpipe.schedules.verify import verify

__all__ = [
    "Action",
    "Channel",
    "Costs",
    "Destinations",
    "Holding",
    "Lane",
    "Link",
    "Op",
    "Plan",
    "Purpose",
    "Rule",
    "Sizes",
    "Span",
    "StageSizes",
    "Timeline",
    "build",
    "finish",
    "names",
    "rules",
    "simulate",
    "verify",
]
