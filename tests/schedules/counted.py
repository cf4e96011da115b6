"""What the replay's machine holds: every object with its bytes, one by one. It shares no code with bpipe's own count."""

from __future__ import annotations

from dataclasses import dataclass, field

from bpipe.schedules import Action, Plan, StageSizes
from tests.amounts import number_of
from tests.schedules.shape_of_plan import shape_of


@dataclass
class Store:
    """The objects on one rank, and the most bytes that they ever took together."""

    objects: dict[tuple[object, ...], int] = field(default_factory=dict)
    peak: int = 0

    def hold(self, *objects: tuple[tuple[object, ...], int]) -> None:
        """Take some objects at once; one that is there already changes its size."""
        self.objects |= dict(objects)
        self.peak = max(self.peak, sum(self.objects.values()))

    def drop(self, *names: tuple[object, ...]) -> None:
        for name in names:
            self.objects.pop(name, None)


@dataclass
class RemoteBuffers:
    """What is reserved for one evictor: each takes the smallest free buffer that it fits, else the largest, which grows."""

    sizes: list[int] = field(default_factory=list)
    remotes: dict[tuple[object, ...], int] = field(default_factory=dict)

    def enter(self, remote: tuple[object, ...], size: int) -> None:
        free = [room for room in range(len(self.sizes)) if room not in self.remotes.values()]
        if not free:
            free = [len(self.sizes)]
            self.sizes.append(0)
        fitting = [room for room in free if self.sizes[room] >= size]
        room = min(fitting, key=self.sizes.__getitem__) if fitting else max(free, key=self.sizes.__getitem__)
        self.sizes[room] = max(self.sizes[room], size)
        self.remotes[remote] = room

    def leave(self, remote: tuple[object, ...]) -> None:
        del self.remotes[remote]


class Bytes:
    """The bytes of a plan's objects; all are 0 where it has no sizes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.shape = plan, shape_of(plan)
        self.depth = self.shape.depth
        self.stores = [Store() for _ in plan.actions]

    def parts(self, stage: int) -> range:
        """The parts of a microbatch, from 1 on."""
        return range(1, 2 if self.plan.sizes is None else 1 + len(self.plan.sizes.stages[stage].parts))

    def concerned(self, action: Action) -> list[int]:
        """The parts that an action concerns."""
        return [action.part] if action.part else list(self.parts(action.stage))

    def movable(self, action: Action) -> int:
        """The bytes that an eviction moves."""
        return sum(self.part(action.stage, action.microbatch, part) for part in self.concerned(action))

    def of(self, stage: int, unit: int) -> StageSizes:
        """The sizes of a slice on a stage."""
        assert self.plan.sizes is not None
        slice_ = unit % self.plan.slices
        return (
            self.plan.sizes.later_slices[slice_ - 1][stage]
            if slice_ and self.plan.sizes.later_slices
            else self.plan.sizes.stages[stage]
        )

    def part(self, stage: int, unit: int, part: int) -> int:
        return 0 if self.plan.sizes is None else self.of(stage, unit).parts[part - 1]

    def size(self, stage: int, unit: int, name: str) -> int:
        """A number of a stage's sizes by its name; what has no stage at its other end is no message."""
        if self.plan.sizes is None or (stage % self.depth == 0 and "received" in name):
            return 0
        return number_of(self.of(stage, unit), name)

    def made(self, stage: int, unit: int) -> int:
        """The bytes of an output that are not among the saved ones."""
        return self.size(stage, unit, "sent") - self.size(stage, unit, "kept_sent")

    def is_near(self, stage: int) -> bool:
        """Whether a stage hands its output to the next one on the same rank, or there is no next one."""
        return self.is_last(stage) or (not self.shape.paths and self.plan.stage_ranks[stage] == self.plan.stage_ranks[stage + 1])

    def has_prediction(self, stage: int) -> bool:
        """Whether a stage sends its output on, and has a loss as well."""
        return self.shape.local and not self.is_last(stage)

    def is_last(self, stage: int) -> bool:
        """Whether a microbatch ends there."""
        return (stage + 1) % self.depth == 0

    def exchange(self, rank: int, stage: int, part: int) -> None:
        """Memory for the gradients of a stage's twin, or of another stage with a weight of it, is taken."""
        name = f"gradients-{part - 1}" if part else "gradients"
        gradients = 0 if self.plan.sizes is None else self.plan.sizes.stages[stage][name].num_bytes
        self.stores[rank].hold((("gradients", stage, part), gradients))

    def added(self, rank: int, stage: int) -> None:
        """All that came for a stage has been added up."""
        self.stores[rank].drop(*[name for name in self.stores[rank].objects if name[:2] == ("gradients", stage)])

    # The life of a microbatch's objects.

    def arrive(self, rank: int, action: Action) -> None:
        """Memory for a message is taken; sizes say nothing of skips."""
        if action.part:
            return
        kind, name = ("input", "received") if action.op.value == "RECV_F" else ("gradient", "sent")
        self.stores[rank].hold(((kind, *action[1:3]), self.size(*action[1:3], name)))

    def before_forward(self, rank: int, action: Action) -> None:
        """The input becomes part of what is saved, as far as it is kept."""
        _, stage, microbatch, *_ = action
        store, given = self.stores[rank], self.input_of(stage, microbatch)
        taken = [(("saved", stage, microbatch, k), self.part(stage, microbatch, k)) for k in self.parts(stage)]
        taken.append((("fixed", stage, microbatch), self.size(stage, microbatch, "fixed")))
        taken.append((("output", stage, microbatch), self.made(stage, microbatch)))
        if self.has_prediction(stage):
            size = self.size(stage, microbatch, "results") - self.size(stage, microbatch, "kept_results")
            taken.append((("prediction", stage, microbatch), size))
        elif self.is_last(stage):  # what the loss takes while it is computed
            taken.append((("loss", stage, microbatch), self.size(stage, microbatch, "results")))
        if given in store.objects:
            taken.append((given, max(0, store.objects[given] - self.size(stage, microbatch, "kept_received"))))
        store.hold(*taken)

    def after_forward(self, rank: int, action: Action) -> None:
        self.stores[rank].drop(self.input_of(action.stage, action.microbatch), ("prediction", *action[1:3]))
        if self.is_last(action.stage):  # the loss has been computed
            self.stores[rank].drop(("output", *action[1:3]), ("loss", *action[1:3]))

    def before_first_forward(self, rank: int, action: Action) -> None:
        """Of what runs again, the input stays beside the output; nothing is saved but the state that other slices need."""
        of = action[1:3]
        self.stores[rank].hold((("output", *of), self.size(*of, "sent")), (("state", *of), self.size(*of, "state")))

    def after_first_forward(self, rank: int, action: Action) -> None:
        if self.is_last(action.stage):
            self.stores[rank].drop(("output", *action[1:3]))

    def before_second_forward(self, rank: int, action: Action) -> None:
        """The output is made once more, and whoever has to send the first one may still have it. So is a slice's state."""
        _, stage, microbatch, *_ = action
        store, given = self.stores[rank], self.input_of(stage, microbatch)
        taken = [(("saved", stage, microbatch, k), self.part(stage, microbatch, k)) for k in self.parts(stage)]
        taken.append((("fixed", stage, microbatch), self.size(stage, microbatch, "fixed")))
        taken.append((("second output", stage, microbatch), self.made(stage, microbatch)))
        if given in store.objects:
            taken.append((given, max(0, store.objects[given] - self.size(stage, microbatch, "kept_received"))))
        store.hold(*taken)

    def after_second_forward(self, rank: int, action: Action) -> None:
        self.stores[rank].drop(self.input_of(*action[1:3]), ("second output", *action[1:3]), ("state", *action[1:3]))

    def input_of(self, stage: int, microbatch: int) -> tuple[object, ...]:
        is_handed_over = stage % self.depth and self.is_near(stage - 1)
        return ("output", stage - 1, microbatch) if is_handed_over else ("input", stage, microbatch)

    def before_backward(self, rank: int, action: Action) -> None:
        """A backward makes its result. The loss's makes the last output's gradient."""
        _, stage, microbatch, *_ = action
        taken = []
        if self.is_last(stage):
            taken.append((("gradient", stage, microbatch), self.size(stage, microbatch, "sent")))
        if self.has_prediction(stage):
            taken.append((("gradient", stage, microbatch), self.size(stage, microbatch, "results")))
        if stage % self.depth and not self.shape.local:
            taken.append((("result", stage, microbatch), self.size(stage, microbatch, "received")))
        given = self.gradients_of_states(stage, microbatch)
        taken.append((given, self.stores[rank].objects.get(given, 0) + self.size(stage, microbatch, "given")))
        self.stores[rank].hold(*taken)

    def gradients_of_states(self, stage: int, unit: int) -> tuple[object, ...]:
        """What the slices of a microbatch have given to states of earlier ones, and these have not collected."""
        return ("gradients of states", stage, unit // self.plan.slices)

    def after_backward(self, rank: int, action: Action) -> None:
        """A slice has used the gradients of its state up."""
        objects, given = self.stores[rank].objects, self.gradients_of_states(*action[1:3])
        objects[given] -= self.size(*action[1:3], "collected")
        assert objects[given] >= 0, f"{action} collects more than was given"
        if not objects[given]:
            del objects[given]

    def after_backward_input(self, rank: int, action: Action) -> None:
        """The gradient of the output is used up; so is the output, where it was kept for no other rank.

        What of an output that is still under way was among the saved bytes stays when these go.
        """
        _, stage, microbatch, *_ = action
        store, output = self.stores[rank], ("output", stage, microbatch)
        store.drop(("gradient", stage, microbatch), ("result", stage + 1, microbatch), *[output] * self.is_near(stage))
        if action.op.value == "I" and self.plan.sizes is not None and self.of(stage, microbatch).between is not None:
            store.drop(
                ("fixed", stage, microbatch),
                ("state", stage, microbatch),
                *(("saved", stage, microbatch, k) for k in self.parts(stage)),
            )
            under_way = [(output, self.size(stage, microbatch, "sent"))] * (output in store.objects)
            store.hold((("between", stage, microbatch), self.size(stage, microbatch, "between")), *under_way)

    def after_weight_half(self, rank: int, action: Action) -> None:
        _, stage, microbatch, *_ = action
        self.stores[rank].drop(*(("saved", stage, microbatch, k) for k in self.parts(stage)))
        self.stores[rank].drop(*((name, stage, microbatch) for name in ("fixed", "between", "state")))
        if self.has_prediction(stage) and ("output", stage, microbatch) in self.stores[rank].objects:  # still under way
            self.stores[rank].hold((("output", stage, microbatch), self.size(stage, microbatch, "sent")))

    def gone(self, rank: int, action: Action) -> None:
        """A message has left, or saved bytes have."""
        if action.op.value == "WAIT_EVICT":
            self.stores[rank].drop(*(("saved", *action[1:3], k) for k in self.concerned(action)))
        elif not action.part:
            self.stores[rank].drop(("output" if action.op.value == "WAIT_SEND_F" else "result", *action[1:3]))

    def back(self, rank: int, action: Action) -> None:
        """Memory for saved bytes that return is taken."""
        self.stores[rank].hold(*((("saved", *action[1:3], k), self.part(*action[1:3], k)) for k in self.concerned(action)))
