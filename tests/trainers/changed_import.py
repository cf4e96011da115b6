"""Load a module of an installed package with one change: where it imports torch.distributed.pipelining, it imports bpipe."""

from __future__ import annotations

import re
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

IMPORT = re.compile(r"^(\s*)(from|import) torch\.distributed\.pipelining(\.\w+)*", re.MULTILINE)


def load_changed(name: str) -> ModuleType:
    """Return the module as it would be after the change; the module of that name stays as it is.

    Raises:
        LookupError: nothing is there to be changed.
    """
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    source, num_changes = IMPORT.subn(r"\1\2 bpipe", Path(spec.origin).read_text())
    if not num_changes:
        raise LookupError(f"{name} does not import torch.distributed.pipelining: {spec.origin}")
    module = module_from_spec(spec)
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module
