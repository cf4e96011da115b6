"""What runs on the GPUs of a machine for `bpipe gpu`: checks, each in a process of its own, and the page that tells their verdicts.

`runner` starts `python -m bpipe.tools.gpu CHECK ...` for each check and ends it at its time limit. Only the command imports this.
"""

__all__: list[str] = []
