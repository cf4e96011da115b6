"""The names of torch.distributed.pipelining, so that a program written for it runs when only the module of its imports changes.

Schedules are bpipe's own classes under torch's names and in torch's order of arguments; what cuts a model is torch's itself.
docs/torch-pipelining.md lists every argument.
"""

__all__: list[str] = []
