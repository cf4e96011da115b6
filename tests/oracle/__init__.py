"""The oracle of today's plans: what bpipe plans, in words that no class of bpipe has, to compare a redesigned core with.

`plans.json.xz` has the plans of commit 3349320, before the redesign; what is planned on purpose in another way is made anew, after
`compare` has shown that nothing else is. What was refused and is planned is unequal, too. All of this ends with the redesign.

    python -m tests.oracle make plans.json.xz [--root CHECKOUT]   # asks a checkout for its plans; this one by default
    python -m tests.oracle compare A B [--most 20]                # each a file of plans, or a checkout; says where they differ

`cases.py` has the cases, as tables. A checkout's own `todays_plans.py`, or else this one, turns a case into a plan and a plan into
words: the one file to change with the classes. Each plan has

- "actions", by rank: what it does, the stage, the microbatch, the slice, the part, the stage at the other end, the rank there; all
  from 0 on, but parts from 1; what is None at the end is left out. "storing": the same, for what others evict to it.
- "order", by rank: its computations alone, whole ones. "issued", by rank: pieces of "actions" and, numbered on behind these,
  "storing", in the order in which one thread issues them: the first's number, and how many.
- "channels": the messages from one rank to another: the stage, the stage at the other end, the microbatch, the slice, the part.
- "ranks of stages", "paths" by microbatch, and "side by side": the stage, microbatch and slice of each forward of a pair.
- "budgets" and "peaks" by rank, in activations and in bytes; "bytes": moved, stored and sent.
- "seconds": the simulated makespan at each of the costs in `cases.py`; "simulated peaks" in bytes; "fills", by rank: idle seconds,
  those used by pieces of a fill job, how many pieces, and the least and the most bytes that are free in a gap.

What bpipe refuses is `{"refused": true}`, with the smallest budget that would do, if it names one.
"""
