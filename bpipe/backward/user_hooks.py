"""Find user hooks that concern a backward as a whole; torch has no list of them.

Hooks that wait for the gradients of several tensors (`register_multi_grad_hook`) are noticed when a forward registers them: torch
makes a handle for each. Hooks on parameters mostly run in `backward_weight`, so the first microbatch of a stage, whose backward
runs as a whole for this purpose, shows whether they queue callbacks for the end of a backward; see callbacks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from threading import Lock, get_ident
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from bpipe.backward.callbacks import Callbacks
from bpipe.model.stage import ModuleSnapshot
from bpipe.torch_private.engine_and_graph import (
    check_splits_backwards,
    common_hook_class,
    engine,
    set_common_hook_class,
    set_engine,
)
from bpipe.torch_private.owners_and_versions import hooks_on

__all__: list[str] = []

Silent = MutableMapping[int, frozenset[int]]  # the hooks on a stage's parameters that are known to queue no callbacks


class UserHooks:
    """The user's hooks on one rank's stages during one step.

    Args:
        silent: the hooks that earlier steps have shown to queue nothing; this step adds to them.
    """

    def __init__(self, divided: Mapping[int, ModuleSnapshot], silent: Silent) -> None:
        self.num_common = 0  # hooks on several tensors that were registered in this step so far
        self._thread = get_ident()
        self.is_divided, self._silent = bool(divided), silent
        if divided:
            check_splits_backwards()
        self.unheard: dict[int, frozenset[int]] = {}
        for index, parts in divided.items():
            found = frozenset(chain.from_iterable(hooks for one in parts.parameters for hooks in hooks_on(one)))  # their ids
            if silent[index] != found if index in silent else found or _are_on_nodes(parts.parameters):
                self.unheard[index] = found
            else:
                silent[index] = found

    @cached_property
    def callbacks(self) -> Callbacks:
        """What takes the place of torch's engine, where backwards are split."""
        return Callbacks()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice, while a step runs, the hooks and callbacks that concern a backward as a whole."""
        self._thread = get_ident()
        _WATCHING.add(self)
        try:
            yield
        finally:
            _WATCHING.remove(self)

    def note(self) -> None:
        """Count a newly registered hook on several tensors, unless it is another pipeline's, whose step runs in another thread."""
        self.num_common += self._thread == get_ident()

    def heard(self, stage: int) -> bool:
        """Return whether the other backwards of a stage must run as a whole, too, after its first one has."""
        found = self.unheard.pop(stage)
        if not self.callbacks.were_any:
            self._silent[stage] = found
        return self.callbacks.were_any


class _Watching:
    """All `UserHooks` that watch now, of all pipelines in all threads; torch is restored when the last one leaves."""

    def __init__(self) -> None:
        self._lock, self._active = Lock(), list[UserHooks]()
        self._torchs: tuple[Any, Any] = ()  # type: ignore[assignment]

    def add(self, hooks: UserHooks) -> None:
        with self._lock:
            if not self._active:
                self._torchs = common_hook_class(), engine()
            self._active.append(hooks)
            self._patch()

    def remove(self, hooks: UserHooks) -> None:
        with self._lock:
            self._active.remove(hooks)
            self._patch()

    def _patch(self) -> None:
        """Let torch call all watching objects in a chain, and its own function last."""
        handle, outermost = self._torchs
        for hooks in self._active:
            if hooks.is_divided:
                hooks.callbacks.behind, outermost = outermost, hooks.callbacks
        set_common_hook_class(partial(self._note, handle) if self._active else handle)
        set_engine(outermost)

    def _note(self, make: Any, handles: Any) -> Any:
        for hooks in list(self._active):
            hooks.note()
        return make(handles)


_WATCHING = _Watching()  # one per process, because the function that it replaces in torch is


def _are_on_nodes(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether there are hooks on the nodes that add up the gradients of some parameters."""
    found = [get_gradient_edge(one).node for one in parameters if one.requires_grad and not is_lazy(one)]
    return any(_are_others(register) for node in found for register in (node.register_hook, node.register_prehook))


def _are_others(register: Callable[..., RemovableHandle]) -> bool:
    """Return whether a node has hooks of the kind that `register` adds."""
    handle = register(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)
