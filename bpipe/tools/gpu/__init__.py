"""The checks that `bpipe gpu` runs on a machine's GPUs, each in a process of its own, and the page with their verdicts.

`runner` starts `python -m bpipe.tools.gpu CHECK ...` for each check and ends it at its time limit. Only the command imports this.
"""

__all__: list[str] = []
