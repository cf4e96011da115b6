"""One rank's skips during a step: what its stages get and hand on, how long it is held, and how gradients come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.comm.wire.message import MessageSpec, flatten_message
from bpipe.engine.messages import versions_of
from bpipe.engine.microbatch_state import Arrived, Message, MicrobatchState, MicrobatchStates
from bpipe.errors import StageError
from bpipe.memory.saved.storages import MessageBytes, keys_of, num_tensors
from bpipe.plan.plan import Plan
from bpipe.skips.held import Held, Made, Use, added
from bpipe.skips.routes import Skip
from bpipe.skips.values import OUTPUT, Layout, layout_of, pack, value_of

__all__: list[str] = []


@dataclass
class Given:
    """The skips that a forward gets, besides those in the message from the stage before.

    Args:
        tensors: of all values.
        needed: for each tensor, whether it needs a gradient.
        borrowed: those of the tensors that an earlier stage on this rank has, too.
        shared: for each tensor, whether an earlier or a later stage on this rank has it, too.
        joined_held: the places in the message from the stage before that a later stage on this rank has, too.
        values: by name, the pytree and the places in `tensors`.
        joined: by name, likewise of the message from the stage before, if it carries skips; and of the output in it.
        shapes: a description of all.
        by_name: the tensors of each value, those in the message from the stage before, too, and whether they need a gradient.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    needed: list[bool] = field(default_factory=list)
    borrowed: list[torch.Tensor] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)
    joined_held: frozenset[int] = frozenset()
    values: Layout = field(default_factory=dict)
    joined: Layout = field(default_factory=dict)
    shapes: str = ""
    by_name: dict[str, list[tuple[torch.Tensor, bool]]] = field(default_factory=dict)

    def take(
        self, layout: Layout, tensors: Sequence[torch.Tensor], needed: Sequence[bool], *, is_borrowed: bool, is_shared: bool
    ) -> None:
        """Add values whose tensors are these."""
        begin = len(self.tensors)
        self.values |= {name: (tree, [begin + place for place in places]) for name, (tree, places) in layout.items()}
        self.count(layout, tensors, needed)
        self.tensors += tensors
        self.needed += needed
        self.borrowed += tensors if is_borrowed else []
        self.shared += [is_shared] * len(tensors)
        self.shapes += f" with {', '.join(layout)}: {[list(tensor.shape) for tensor in tensors]}"

    def lent(
        self, tensors: Sequence[torch.Tensor], received: Sequence[torch.Tensor], entered: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors that others on this rank have, too, each with the one that the stage gets over the same memory.

        Args:
            tensors: of the message from the stage before.
            received: likewise, as the stage gets them.
            entered: likewise of `self.tensors`.
        """
        joined = [pair for at, pair in enumerate(zip(tensors, received)) if at in self.joined_held]
        return joined + [pair for pair, is_shared in zip(zip(self.tensors, entered), self.shared) if is_shared]

    def shared_among(
        self, received: Sequence[torch.Tensor], entered: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, int]]:
        """Return the name, the tensor as the stage gets it, and its version, of all that others on this rank have, too.

        Args:
            received: the tensors of the message from the stage before, as the stage gets them.
            entered: likewise `tensors`.
        """
        joined = [(name, received[at]) for name, (_, places) in self.joined.items() for at in places if at in self.joined_held]
        own = [(name, entered[at]) for name, (_, places) in self.values.items() for at in places if self.shared[at]]
        return [(name, tensor, tensor._version) for name, tensor in (*joined, *own) if not tensor.is_inference()]

    def count(self, layout: Layout, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> None:
        """Note the tensors of each value, and whether they need gradients."""
        for name, (_, places) in layout.items():
            self.by_name[name] = [(tensors[place], needed[place]) for place in dict.fromkeys(places)]

    def arguments(self, received: Sequence[torch.Tensor], entered: Sequence[torch.Tensor], find_mesh: Any) -> dict[str, Any]:
        """Put all values together again.

        Args:
            received: the tensors of the message from the stage before, as the stage gets them.
            entered: likewise `tensors`.
        """
        joined = {name: value_of(one, received, find_mesh) for name, one in self.joined.items() if name != OUTPUT}
        return joined | {name: value_of(one, entered, find_mesh) for name, one in self.values.items()}


class Carrier:
    """The skips of one rank's stages.

    Args:
        plan: its `skips` are those of `skips`.
        skips: by name, the stage that makes a value and those that use it, as numbers of stages in one direction.
        stages: the stages on this rank.
        microbatches: of this rank.
    """

    def __init__(self, plan: Plan, skips: Mapping[str, Skip], stages: Sequence[int], microbatches: MicrobatchStates) -> None:
        self._microbatches, self._has_backward, self._stages = microbatches, plan.has_backward, frozenset(stages)
        names = [sorted(name for name, of in skips.items() if of == skip) for skip in plan.skips]
        self._places = {name: place for place, found in enumerate(names) for name in found}
        self._names = {way: [name for place in places for name in names[place]] for way, places in plan.routes.ways.items()}
        self._used = {stage: {name for name, (_, *users) in skips.items() if stage % plan.depth in users} for stage in stages}
        self._made = {stage: {name for name, (source, *_) in skips.items() if stage % plan.depth == source} for stage in stages}
        self._users = {stage: [user for source, user in self._names if source == stage] for stage in stages}
        ways = [way for way in self._names if way[1] in self._stages]
        self._own = {stage: [source for source, first in ways if first == stage and source + 1 != stage] for stage in stages}
        self._behind = {way: plan.routes.behind[way] for way in ways}  # the later users on this rank

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
        if arrived.message is not None and (stage - 1, stage) in self._names:
            given.joined = layout_of(arrived.message.spec, [OUTPUT, *self._names[stage - 1, stage]], self._place(state, stage - 1))
            joined = {name: of for name, of in given.joined.items() if name != OUTPUT}
            given.joined_held = frozenset(self._hold(state, stage - 1, arrived.message, joined))
            given.count(joined, _all(arrived.message), _needed(arrived.message.spec, trains=self._has_backward))
        if arrived.message is not None and stage - 1 in self._stages and set(self._users[stage - 1]) - {stage}:
            self._lend(state, _all(arrived.message))  # messages to other stages may carry the same tensors
        for source, message in arrived.skips:
            layout = layout_of(message.spec, self._names[source, stage], self._place(state, source))
            self._hold(state, source, message, layout)
            tensors, needed = _all(message), _needed(message.spec, trains=self._has_backward)
            is_local = source in self._stages
            given.take(layout, tensors, needed, is_borrowed=is_local, is_shared=is_local or bool(self._behind[source, stage]))
            self._lend_sent(state, source, tensors)
            uses.append(Use(source, stage, list(range(sum(needed)))))
        for (source, first), users in self._behind.items():
            if stage in users:
                uses.append(self._take_held(given, state, source, first))
        state.uses = uses
        self._count(state, given.by_name)
        given.by_name.clear()
        return given

    def _count(self, state: MicrobatchState, by_name: Mapping[str, Sequence[tuple[torch.Tensor, bool]]]) -> None:
        """Note the bytes of values, by place of their skip."""
        by_place: dict[int, dict[int, tuple[torch.Tensor, bool]]] = {}
        for name, found in by_name.items() if self._has_backward else ():
            by_place.setdefault(self._places[name], {}).update((id(tensor), (tensor, needed)) for tensor, needed in found)
        for place, tensors in by_place.items():
            gradient = sum(tensor.nbytes for tensor, needed in tensors.values() if needed)
            value, known = MessageBytes.of([tensor for tensor, _ in tensors.values()]), state.skip_bytes.get(place)
            state.skip_bytes[place] = (value, gradient) if known is None else (known[0].with_more(value), known[1])

    def count_made(self, state: MicrobatchState, user: int, message: Message) -> None:
        """Note the bytes of the values in a message that a forward has made."""
        names = self._names.get((state.stage, user))
        if names and self._has_backward:
            given, is_joined = Given(), user == state.stage + 1
            layout = layout_of(message.spec, [OUTPUT, *names] if is_joined else names, state.place)
            layout.pop(OUTPUT, None)
            given.count(layout, _all(message), _needed(message.spec, trains=True))
            self._count(state, given.by_name)

    def _place(self, state: MicrobatchState, source: int) -> str:
        return f"{state.place}: the message from stage {source}"

    def _hold(self, state: MicrobatchState, source: int, message: Message, layout: Layout) -> Sequence[int]:
        """Hold what later stages of this rank will use of a message, if there are any; return the places of its tensors."""
        users = self._behind[source, state.stage]
        if not users:
            return ()
        wanted = set[str]().union(*(self._used[stage] for stage in users))
        kept = {name: of for name, of in layout.items() if name in wanted}
        places = sorted({place for _, of in kept.values() for place in of})
        tensors = without_inference([_all(message)[place] for place in places])
        needed = _needed(message.spec, trains=self._has_backward)
        numbers = [sum(needed[:place]) if needed[place] else None for place in places]
        self._end(state, source).held = Held(_among(kept, places), tensors, versions_of(tensors), numbers, sum(needed), len(users))
        self._lend(state, tensors)
        return places

    def _take_held(self, given: Given, state: MicrobatchState, source: int, first: int) -> Use:
        """Give a stage what an earlier one on its rank was the first to use."""
        end = self._microbatches[first, state.microbatch, source + 1]
        held = end.held
        assert held is not None, "a message is held until all its users have run"
        _check_unchanged(state, source, held.versions)
        layout = {name: of for name, of in held.layout.items() if name in self._used[state.stage]}
        places = sorted({place for _, of in layout.values() for place in of})
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
        given.take(_among(layout, places), tensors, [number is not None for number in numbers], is_borrowed=True, is_shared=True)
        self._lend_sent(state, source, tensors)
        return Use(source, first, [number for number in numbers if number is not None])

    # What a stage hands on

    def flattened(self, output: Any, state: MicrobatchState) -> dict[int, tuple[str, list[torch.Tensor]]]:
        """Split a stage's result, by the stage that gets each part of it first, as `flatten_message` splits an output.

        Raises:
            StageError: the stage has returned something else than an output and its skips.
        """
        stage, names = state.stage, self._made[state.stage]
        output, values = _split(output, names, state.place) if names else (output, {})
        of_users = {user: {name: values[name] for name in self._names[stage, user]} for user in self._users[stage]}
        joined, behind = of_users.pop(stage + 1, None), stage + 1
        main = flatten_message(output, state.place) if joined is None else pack({OUTPUT: output, **joined}, state.place)
        return {behind: main, **{user: pack(found, state.place) for user, found in of_users.items()}}

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

    def hand_back(
        self, state: MicrobatchState, gradients: Sequence[torch.Tensor | None]
    ) -> dict[int, list[torch.Tensor | None]]:
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

    def _with_held(
        self, state: MicrobatchState, source: int, gradients: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
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
    if any(tensor._version != version for tensor, version in versions):
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


def _among(layout: Layout, places: Sequence[int]) -> Layout:
    """Return a layout whose tensors are those at some places of the old one."""
    return {name: (tree, [places.index(place) for place in of]) for name, (tree, of) in layout.items()}


def _all(message: Message) -> list[torch.Tensor]:
    return [tensor for tensor in message.tensors if tensor is not None]


def _needed(spec: MessageSpec, *, trains: bool) -> list[bool]:
    return [meta is not None and meta.requires_grad and trains for meta in spec.tensors]
