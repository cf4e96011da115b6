"""All that bpipe uses of torch's private names, in one place; `bpipe.torch_private.names` lists them.

torch may change such a name in any release. So no other room has one: they call the functions of this one. Without a name, bpipe is
imported and trains all the same; what needs the name either does less, as the list says, or raises UnsupportedTorchError when it is
used. `_modules`, `_parameters` and `_buffers` of nn.Module are not among them: modules that people write rely on them, too.
"""

__all__: list[str] = []
