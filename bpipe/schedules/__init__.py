"""Plans of what runs when: made, verified and simulated in pure Python, without torch.

Example:
    >>> from bpipe.schedules import build
    >>> plan = build("1f1b", num_stages=2, num_microbatches=2)
    >>> [str(action) for action in plan.compute(0)]
    ['0F0', '0F1', '0B0', '0B1']
"""

from bpipe.passes.encoder import with_encoder
from bpipe.passes.overlap import overlap
from bpipe.plan.action import Action, Channel, Op, Purpose
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Amount, Sizes, StageSizes
from bpipe.schedules.by_name import build, finish
from bpipe.schedules.formulas import check_rule
from bpipe.schedules.registry import names, register, rules, unregister
from bpipe.schedules.rule import Placement, Rule
from bpipe.schedules.torch_csv import from_csv
from bpipe.simulator.costs import Costs, Link
from bpipe.simulator.gaps import Filling, Gap, fill_gaps, gaps_of
from bpipe.simulator.simulation import simulate
from bpipe.simulator.timeline import Holding, Lane, Span, Timeline
from bpipe.verifier.proof import verify

__all__ = [
    "Action",
    "Amount",
    "Channel",
    "Costs",
    "Destinations",
    "Filling",
    "Gap",
    "Holding",
    "Lane",
    "Link",
    "Op",
    "Placement",
    "Plan",
    "Purpose",
    "Rule",
    "Sizes",
    "Span",
    "StageSizes",
    "Timeline",
    "build",
    "check_rule",
    "fill_gaps",
    "finish",
    "from_csv",
    "gaps_of",
    "names",
    "overlap",
    "register",
    "rules",
    "simulate",
    "unregister",
    "verify",
    "with_encoder",
]
