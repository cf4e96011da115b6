"""Modules as a dry run has them: with fake parameters and buffers, and as they were afterwards."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import _lru_cache_wrapper, partial
from itertools import count
from types import CellType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from bpipe.device import is_asynchronous
from bpipe.device.generators import PYTHON, Drawn, GlobalNumPy
from bpipe.errors import StageError
from bpipe.model.pytree import mapped
from bpipe.model.state.contents import Container, Contents
from bpipe.model.state.reachable import Reachable
from bpipe.prediction.known_values import KnownValues, know
from bpipe.torch_private.fakes import FakeTensor, fake_mode
from bpipe.torch_private.modules import hooks_of

__all__: list[str] = []

LIBRARIES = frozenset({"torch", "transformers", "peft"})  # whose hooks make a weight, or let an input need a gradient
MOMENT_S, MOST_MOMENTS = 0.02, 100  # of a wait for what torch's threads still hold
SMALL = 64  # elements of a tensor of floating-point numbers that counts as known, if it is neither a parameter nor a buffer


class State:
    """What modules, a loss and all that they lead to hold: dicts of attributes, other containers, and variables of functions."""

    def __init__(self, contents: Contents, containers: Sequence[Container], cells: Sequence[tuple[CellType, Any]]) -> None:
        self._contents, self._containers, self._cells = contents, containers, cells

    def now(self) -> State:
        """Return what the same objects hold now."""
        containers = [one.now() for one in self._containers]
        return State(self._contents.now(), containers, [(cell, cell.cell_contents) for cell, _ in self._cells])

    def restore(self) -> None:
        self._contents.fill()
        for container in self._containers:
            container.fill()
        for cell, value in self._cells:
            cell.cell_contents = value


class Fakes:
    """Fake tensors that stand for real ones."""

    def __init__(self) -> None:
        self.mode = fake_mode()
        self._made = WeakIdKeyDictionary()  # by the real tensor, as long as others have it, too

    def of(self, tensor: torch.Tensor, most_numbers: int = 0) -> torch.Tensor:
        """Return the fake tensor of a real one, always the same, with its values if they can decide what runs."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: torch.Tensor | None = self._made.get(tensor)
        if fake is None:
            with warnings.catch_warnings(action="ignore"):  # of a gradient that only leaves have, which torch asks for
                self._made[tensor] = fake = self.mode.from_tensor(tensor)
            know(fake, tensor, most_numbers)
        return fake


class FakeModules:
    """Modules and a loss on fake tensors, while this context is entered, which may be several times, and as they were outside.

    Operations inside make fake tensors. No random number is drawn, and nothing is written to a parameter, a gradient or a buffer.
    What a forward notes in what the modules and the loss lead to is there inside, and gone outside.
    """

    def __init__(self, modules: Sequence[nn.Module], loss_fn: Any, device: torch.device) -> None:
        self._modules = list({id(part): part for module in modules for part in module.modules()}.values())
        self._found, self._device, self._fakes = Reachable([*modules, loss_fn]), device, Fakes()
        self._known = KnownValues(partial(self._fakes.of, most_numbers=SMALL))
        self._inside: State | None = None
        self._entered = ExitStack()

    def fake(self, value: Any) -> Any:
        """Return a pytree with a fake tensor for each of its tensors, always the same one for the same tensor."""
        return mapped(self._fakes.of, value)

    def __enter__(self) -> None:
        dicts, containers, cells = self._found.everything()
        outside = State(Contents([*dicts, *(one for module in self._modules for one in hooks_of(module))]), containers, cells)
        with ExitStack() as entered:
            entered.enter_context(Drawn(self._device, [PYTHON, GlobalNumPy(), *self._found.sources]).again())
            entered.callback(outside.restore)
            if self._inside is None:
                self._prepare()
            else:
                self._inside.restore()
            entered.callback(self._look_inside, outside)
            entered.callback(torch.clear_autocast_cache)
            entered.enter_context(_masks_as_of_real_tensors())
            entered.enter_context(self._fakes.mode)
            entered.enter_context(self._known)
            self._entered = entered.pop_all()

    def __exit__(self, *error: object) -> None:
        self._entered.close()
        self._known.check()

    def _look_inside(self, outside: State) -> None:
        self._inside = outside.now()

    def _prepare(self) -> None:
        """Put fake tensors into the modules, and copies of counters, and take the user's hooks out."""
        for module in self._modules:
            vars(module).update({name: copy(one) for name, one in vars(module).items() if isinstance(one, count)})
            held: list[dict[str, Any]] = [module._parameters, module._buffers]
            for tensors in held:
                tensors.update({name: self._fakes.of(one) for name, one in tensors.items() if one is not None})
            for hooks in hooks_of(module):
                for key in [key for key, hook in hooks.items() if not is_a_librarys(hook)]:
                    del hooks[key]

    @property
    def made(self) -> Sequence[ref[torch.Tensor]]:
        """All fake tensors that operations have made."""
        return self._known.made


def check_gone(made: Sequence[Callable[[], torch.Tensor | None]], device: torch.device) -> None:
    """Raise a StageError if fake tensors are still there, but for those in caches of functions, which are cleared.

    The thread in which torch runs the backwards of a device lets go of the last one a moment after its end.
    """
    wait: Callable[[], object] = partial(time.sleep, MOMENT_S)
    waits = [wait] * (MOST_MOMENTS * is_asynchronous(device))
    for release in (*waits[:1], gc.collect, _clear_caches, gc.collect, *waits, gc.collect):
        if not (left := [tensor for tensor in (one() for one in made) if tensor is not None]):
            return
        shape = list(left[0].shape)
        del left
        release()
    if any(one() is not None for one in made):
        raise StageError(
            f"a stage or its loss has kept a tensor of shape {shape} of the dry run before this step, where bpipe cannot find it: "
            "in a global, an attribute of a class, or an object of another library. Make the model anew, and give Balanced "
            "options=bpipe.Options(measure='in_order'), so that the step measures instead"
        )


def _clear_caches() -> None:
    for one in gc.get_objects():
        if type(one) is _lru_cache_wrapper and not str(one.__module__).startswith(("torch.", "sympy.")):
            one.cache_clear()


def is_a_librarys(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is of a library that changes modules by hooks."""
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(kind.__module__).partition(".")[0] in LIBRARIES


@contextmanager
def _masks_as_of_real_tensors() -> Iterator[None]:
    """Let Transformers make the masks that it makes of real tensors: of fake ones, it keeps those that mask nothing."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    with ExitStack() as after:
        if (before := getattr(utils, "is_fake_tensor", None)) is not None:
            after.callback(setattr, utils, "is_fake_tensor", before)
            utils.is_fake_tensor = lambda tensor: False
        yield
