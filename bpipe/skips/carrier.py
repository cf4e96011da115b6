"""One rank's skips during a step: what its stages get and hand on, how long it is held, and how gradients come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from bpipe.comm.wire.message import MessageSpec
from bpipe.engine.messages import versions_of
from bpipe.engine.microbatch_state import Arrived, Message, MicrobatchState, MicrobatchStates
from bpipe.errors import StageError
from bpipe.flow.flow import value_name
from bpipe.memory.saved.spans import Span
from bpipe.memory.saved.storages import MessageBytes, keys_of, num_tensors
from bpipe.plan.plan import Plan
from bpipe.skips.held import Held, Made, Use, added
from bpipe.skips.routes import Skip, routes_in, skips_of
from bpipe.skips.values import OUTPUT, Layout, described, fixed_among, layout_of, pack, value_of
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []


@dataclass
class Part:
    """The values in one message that a forward gets.

    Args:
        layout: by name, the pytree of a value and the places of its tensors; in the message from the stage before also the output.
        tensors: of all values.
        needed: for each tensor, whether it needs a gradient.
        shared: the places of what an earlier or a later stage on this rank has, too.
        fixed: the places of what a later stage on any rank has, too, at least in part, with the last such stage.
        is_borrowed: whether an earlier stage on this rank has the tensors.
        entered: the tensors as the stage gets them.
    """

    layout: Layout
    tensors: list[torch.Tensor]
    needed: list[bool]
    shared: Collection[int] = ()
    fixed: Mapping[int, int] = field(default_factory=dict)
    is_borrowed: bool = False
    entered: Sequence[torch.Tensor] = ()


@dataclass
class Given:
    """The skips that a forward gets: those in the message from the stage before, and those in the others."""

    joined: Part | None = None
    others: list[Part] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return self.others if self.joined is None else [self.joined, *self.others]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are not in the message from the stage before."""
        return [tensor for part in self.others for tensor in part.tensors]

    @property
    def needed(self) -> list[bool]:
        """For each of them, whether it needs a gradient."""
        return [needed for part in self.others for needed in part.needed]

    @property
    def borrowed(self) -> list[torch.Tensor]:
        """Those of them that an earlier stage on this rank has, too."""
        return [tensor for part in self.others if part.is_borrowed for tensor in part.tensors]

    @property
    def shapes(self) -> str:
        """A description of them."""
        each = ((", ".join(part.layout), [list(tensor.shape) for tensor in part.tensors]) for part in self.others)
        return "".join(f" with {names}: {shapes}" for names, shapes in each)

    def enter(self, received: Sequence[torch.Tensor], entered: Iterable[torch.Tensor]) -> None:
        """Note the tensors as the stage gets them: those of the message from the stage before, and `tensors`."""
        rest = iter(entered)
        for part in self.parts:
            part.entered = received if part is self.joined else list(islice(rest, len(part.tensors)))

    def lent(self, *, with_joined: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors that others on this rank have, too, each with the one that the stage gets over the same memory."""
        return [(part.tensors[at], part.entered[at]) for part in (self.parts if with_joined else self.others) for at in part.shared]

    def shared(self) -> list[tuple[str, torch.Tensor, int]]:
        """Return the name, the tensor as the stage gets it, and its version, of all that another stage has or will have, too.

        These are what others on this rank have, and what a later stage has on any rank.
        """
        return [
            (name, part.entered[at], version_of(part.entered[at]))
            for part in self.parts
            for name, (_, places) in part.layout.items()
            for at in places
            if (at in part.shared or at in part.fixed) and not part.entered[at].is_inference()
        ]

    def fixed(self) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors that a later stage has, too, as this stage gets them, with the last such stage."""
        return [(part.entered[at], last) for part in self.parts for at, last in part.fixed.items()]

    def values(self, find_mesh: Any) -> dict[str, Any]:
        """Put all values together again, by name; the output of the stage before is among them."""
        return {name: value_of(one, part.entered, find_mesh) for part in self.parts for name, one in part.layout.items()}


class Carrier:
    """The skips of one rank's stages.

    Args:
        plan: its flow has the skips of `skips`.
        skips: by name, the stage that makes a value and those that use it, as numbers of stages in one direction.
        stages: the stages on this rank.
        microbatches: of this rank.
    """

    def __init__(self, plan: Plan, skips: Mapping[str, Skip], stages: Sequence[int], microbatches: MicrobatchStates) -> None:
        self._microbatches, self._has_backward, self._stages = microbatches, plan.has_backward, frozenset(stages)
        in_plan = skips_of(plan.flow)
        names = [sorted(name for name, of in skips.items() if of == skip) for skip in in_plan]
        self._amounts = {name: value_name(skip) for skip, found in zip(in_plan, names) for name in found}  # where bytes are counted
        routes = routes_in(plan.flow)
        self._names = {way: [name for place in places for name in names[place]] for way, places in routes.ways.items()}
        self._used = {stage: {name for name, (_, *users) in skips.items() if stage % plan.depth in users} for stage in stages}
        self._made = {stage: {name for name, (source, *_) in skips.items() if stage % plan.depth == source} for stage in stages}
        self._users = {stage: [user for source, user in self._names if source == stage] for stage in stages}
        self._own = {stage: [source for source, first in self._names if first == stage and source + 1 != stage] for stage in stages}
        self._behind = routes.behind  # the later users on the rank of a message's first user

    def lead_past(self, stage: int) -> bool:
        """Return whether some skip leads from an earlier stage to a later one than this."""
        return any(source < stage < max((first, *later)) for (source, first), later in self._behind.items())

    # What a stage gets

    def arrived(self, state: MicrobatchState) -> list[tuple[int, Message]]:
        """Take the messages of skips that a stage is the first on its rank to use.

        Raises:
            StageError: a stage of this rank has changed a tensor in place since it was handed over.
        """
        found = []
        for source in self._own[state.stage]:
            end = self._end(state, source)
            assert end.input is not None, "a forward follows the receipt of its skips"
            found.append((source, end.input))
            end.input, versions, end.unsent_versions = None, end.unsent_versions, None
            _check_unchanged(state, source, versions or ())
            self._microbatches.drop(end)
        return found

    def given(self, state: MicrobatchState, arrived: Arrived) -> Given:
        """Return the skips that a forward gets, and hold what later stages of this rank use of them.

        Raises:
            CommError: a message carries other skips than expected.
            StageError: a stage has changed in place what another one uses.
        """
        stage, given, uses = state.stage, Given(), []
        if (message := arrived.message) is not None:
            given.joined = self._part(state, stage - 1, message)
            if stage - 1 in self._stages and set(self._users[stage - 1]) - {stage}:
                self._lend(state, given.joined.tensors)  # messages to other stages may carry the same tensors
        for source, message in arrived.skips:
            part = self._part(state, source, message)
            given.others.append(part)
            self._lend_sent(state, source, part.tensors)
            uses.append(Use(source, stage, list(range(sum(part.needed)))))
        for (source, first), users in self._behind.items():
            if stage in users:
                part, use = self._take_held(state, source, first)
                given.others.append(part)
                uses.append(use)
        state.uses = uses
        self._count(state, given.parts)
        return given

    def _part(self, state: MicrobatchState, source: int, message: Message) -> Part:
        """Return the values in a message that a stage is the first on its rank to get; hold what later ones here use of them."""
        where = f"{state.place}: the message from stage {source}"
        layout, fixed = layout_of(message.spec, self._names_in(source, state.stage), where)
        part = Part(layout, _all(message), _needed(message.spec, trains=self._has_backward))
        users, is_before = self._behind.get((source, state.stage), ()), source + 1 == state.stage
        held = self._hold(state, source, part, users) if users else ()
        part.is_borrowed = source in self._stages and not is_before
        is_all_shared = part.is_borrowed or (bool(users) and not is_before)
        part.shared = range(len(part.tensors)) if is_all_shared else held
        of_held = dict.fromkeys(held, max(users, default=0))
        part.fixed = of_held | {at: max(last, of_held.get(at, 0)) for at, last in fixed.items()}
        return part

    def _names_in(self, source: int, first: int) -> list[str]:
        """Return the names of the values in a message, its output included."""
        return [OUTPUT] * (source + 1 == first) + self._names.get((source, first), [])

    def _count(self, state: MicrobatchState, parts: Sequence[Part]) -> None:
        """Note the bytes of values, by the names of their skips in the plan."""
        by_name: dict[str, dict[int, tuple[torch.Tensor, bool]]] = {}
        for part in parts if self._has_backward else ():
            for name, (_, places) in part.layout.items():
                if name != OUTPUT:
                    found = {id(part.tensors[at]): (part.tensors[at], part.needed[at]) for at in places}
                    by_name.setdefault(self._amounts[name], {}).update(found)
        for name, tensors in by_name.items():
            gradient = sum(tensor.nbytes for tensor, needed in tensors.values() if needed)
            value, known = MessageBytes.of([tensor for tensor, _ in tensors.values()]), state.value_bytes.get(name)
            state.value_bytes[name] = (value, gradient) if known is None else (known[0].with_more(value), known[1])

    def count_made(self, state: MicrobatchState, user: int, message: Message) -> None:
        """Note the bytes of the values in a message that a forward has made."""
        if (state.stage, user) in self._names and self._has_backward:
            layout, _ = layout_of(message.spec, self._names_in(state.stage, user), state.place)
            self._count(state, [Part(layout, _all(message), _needed(message.spec, trains=True))])

    def _hold(self, state: MicrobatchState, source: int, part: Part, users: Sequence[int]) -> Sequence[int]:
        """Hold what later stages of this rank will use of a message; return the places of its tensors."""
        kept, places = _picked(part.layout, set[str]().union(*(self._used[stage] for stage in users)))
        tensors, needed = without_inference([part.tensors[place] for place in places]), part.needed
        numbers = [sum(needed[:place]) if needed[place] else None for place in places]
        self._end(state, source).held = Held(kept, tensors, versions_of(tensors), numbers, len(users), [None] * sum(needed))
        self._lend(state, tensors)
        return places

    def _take_held(self, state: MicrobatchState, source: int, first: int) -> tuple[Part, Use]:
        """Take what an earlier stage on this rank was the first to use."""
        end = self._microbatches[first, state.microbatch, source + 1]
        held = end.held
        assert held is not None, "a message is held until all its users have run"
        _check_unchanged(state, source, held.versions)
        layout, places = _picked(held.layout, self._used[state.stage])
        tensors, numbers = [held.tensors[place] for place in places], [held.numbers[place] for place in places]
        held.num_users -= 1
        if held.num_users:
            self._lend(state, tensors)
            tensors = without_inference(tensors)
        else:
            held.tensors, held.versions = [], []
            if not self._has_backward:
                end.held = None
                self._microbatches.drop(end)
        last = max(self._behind[source, first])
        fixed = dict.fromkeys(range(len(tensors)), last) if last > state.stage else {}
        needed = [number is not None for number in numbers]
        self._lend_sent(state, source, tensors)
        part = Part(layout, tensors, needed, range(len(tensors)), fixed, is_borrowed=True)
        return part, Use(source, first, [number for number in numbers if number is not None])

    # What a stage hands on

    def flattened(
        self, output: Any, state: MicrobatchState, received: Sequence[Span] = ()
    ) -> dict[int, tuple[str, list[torch.Tensor]]]:
        """Split a stage's result, by the stage that gets each part of it first, as `flatten_message` splits an output.

        Args:
            received: of what the stage has got, and a later one has, too.

        Raises:
            StageError: the stage has returned something else than an output and its skips.
        """
        stage, names = state.stage, self._made[state.stage]
        output, values = _split(output, names, state.place) if names else (output, {})
        packed = {}
        for user in dict.fromkeys((stage + 1, *self._users[stage])):
            of_user = {name: output if name == OUTPUT else values[name] for name in self._names_in(stage, user)}
            packed[user] = pack(of_user, state.place)
        last_users = {user: max((user, *self._behind.get((stage, user), ()))) for user in packed}
        spans = {user: [Span(tensor, last_users[user]) for tensor in tensors] for user, (_, tensors) in packed.items()}
        fixed = fixed_among(spans, received)
        return {user: (described(layout, fixed[user]), tensors) for user, (layout, tensors) in packed.items()}

    def note(self, state: MicrobatchState, flattened: Mapping[int, tuple[str, Sequence[torch.Tensor]]]) -> list[torch.Tensor]:
        """Remember which of a forward's results are in which message; return them, each once."""
        roots = {id(tensor): tensor for _, tensors in flattened.values() for tensor in tensors}
        differentiable = [key for key, tensor in roots.items() if tensor.requires_grad]
        numbers = {key: number for number, key in enumerate(differentiable)}
        state.made = [
            Made(user, [numbers[id(tensor)] for tensor in tensors if tensor.requires_grad])
            for user, (_, tensors) in flattened.items()
        ]
        return list(roots.values())

    def hand_on(self, state: MicrobatchState, user: int, message: Message) -> MicrobatchState | None:
        """Give a message of skips to a stage of this rank; return the state from which it is sent if it goes to another rank."""
        if user not in self._stages:
            return self._end(state, user)
        end = self._microbatches[user, state.microbatch, state.stage + 1]
        end.input, end.unsent_versions = message, versions_of(message.tensors)
        self._lend(state, _all(message))
        return None

    def _lend_sent(self, state: MicrobatchState, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Note tensors of a stage of this rank that are still sent to others: they stay, though this one may be the last here."""
        if source in self._stages and not self._stages.issuperset(self._users[source]):
            self._lend(state, tensors)

    def _lend(self, state: MicrobatchState, tensors: Sequence[torch.Tensor]) -> None:
        if self._has_backward:
            state.lent = [*state.lent, *tensors]

    # Gradients

    def gradients(self, state: MicrobatchState, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradient of each result of a forward that needs one.

        Args:
            gradients: those that came back in the message from the next stage.
        """
        made, state.made = state.made, ()
        total: list[torch.Tensor | None] = [None] * (1 + max((number for one in made for number in one.numbers), default=-1))
        for user, numbers in made:
            if user != state.stage + 1:
                end = self._end(state, user)
                assert end.output_gradients is not None, "a backward follows the receipt of its gradients"
                gradients, end.output_gradients = end.output_gradients.tensors, None
                self._microbatches.drop(end)
            for number, gradient in zip(numbers, gradients, strict=True):
                total[number] = added(total[number], gradient)
        return total

    def hand_back(self, state: MicrobatchState, gradients: Sequence[torch.Tensor | None]) -> dict[int, list[torch.Tensor | None]]:
        """Return the gradients that go back after a backward, by the stage that gets them; give the others to those held.

        Args:
            gradients: of the message from the stage before, then of the messages of skips.
        """
        together = num_tensors([gradient for gradient in gradients if gradient is not None])
        gradients = [gradient if gradient is None else _alone(gradient, together) for gradient in gradients]
        begin = len(gradients) - sum(len(use.numbers) for use in state.uses)
        found = {state.stage - 1: self._with_held(state, state.stage - 1, list(gradients[:begin]))}
        for source, first, numbers in state.uses:
            own, begin = list(gradients[begin : begin + len(numbers)]), begin + len(numbers)
            if first == state.stage:
                found[source] = self._with_held(state, source, own)
            else:
                held = self._microbatches[first, state.microbatch, source + 1].held
                assert held is not None, "it is held until its first user's backward"
                held.add(numbers, own)
        state.uses = ()
        return found

    def _with_held(self, state: MicrobatchState, source: int, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Add what later stages of this rank have given to the tensors of a message."""
        end = self._microbatches.get((state.stage, state.microbatch, source + 1))
        if end is None or end.held is None:
            return gradients
        held, end.held = end.held, None
        self._microbatches.drop(end)
        return [added(one, other) for one, other in zip(gradients, held.gradients, strict=True)]

    def return_(self, state: MicrobatchState, source: int, message: Message) -> MicrobatchState | None:
        """Give gradients to a stage of this rank; return the state from which they are sent if they go to another rank."""
        if source not in self._stages:
            return self._end(state, source)
        self._microbatches[source, state.microbatch, state.stage + 1].output_gradients = message
        return None

    def _end(self, state: MicrobatchState, other: int) -> MicrobatchState:
        """Return the state of a message of skips to or from another stage."""
        return self._microbatches[state.stage, state.microbatch, other + 1]


def _split(result: Any, names: set[str], place: str) -> tuple[Any, dict[str, Any]]:
    """Return a stage's output and the values that it hands on."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    if not is_pair or result[1].keys() != names:
        got = f"(output, a dict of {', '.join(map(repr, result[1])) or 'nothing'})" if is_pair else f"a {type(result).__qualname__}"
        raise StageError(
            f"{place}: a stage that hands on skips returns (output, values), where values is a dict with the keys "
            f"{', '.join(map(repr, sorted(names)))}; this one returned {got}"
        )
    return result[0], result[1]


def _check_unchanged(state: MicrobatchState, source: int, versions: Sequence[tuple[torch.Tensor, int]]) -> None:
    if any(version_of(tensor) != version for tensor, version in versions):
        raise StageError(
            f"{state.place}: a skip of stage {source} was changed in place by another stage on this rank before this one used it. "
            "Clone it where it is changed"
        )


def without_inference(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy inference tensors, which do not record that they are changed in place."""
    return [tensor.clone() if tensor.is_inference() else tensor for tensor in tensors]


def _alone(gradient: torch.Tensor, together: Mapping[int, int]) -> torch.Tensor:
    """Copy a gradient that shares memory with others, as those of `torch.stack` do: messages are freed at different times."""
    is_shared = any(together[key] > 1 for key in keys_of([gradient]))
    return gradient.clone() if is_shared else gradient


def _picked(layout: Layout, names: set[str]) -> tuple[Layout, list[int]]:
    """Return the layout of some of the values alone, and the places that their tensors have had."""
    places = sorted({place for name, (_, of) in layout.items() if name in names for place in of})
    kept = {name: (tree, [places.index(place) for place in of]) for name, (tree, of) in layout.items() if name in names}
    return kept, places


def _all(message: Message) -> list[torch.Tensor]:
    return [tensor for tensor in message.tensors if tensor is not None]


def _needed(spec: MessageSpec, *, trains: bool) -> list[bool]:
    return [meta is not None and meta.requires_grad and trains for meta in spec.tensors]
