"""torch's base classes of schedules, of which bpipe's schedules count as subclasses, and its search of a schedule by name."""

from __future__ import annotations

from abc import ABCMeta
from importlib import import_module
from typing import Any

from bpipe.api.schedule import Schedule
from bpipe.api.torch_attributes import is_single
from bpipe.errors import ConfigurationError
from bpipe.schedules.registry import rule_named

__all__ = ["PipelineScheduleMulti", "PipelineScheduleSingle", "_PipelineSchedule", "get_schedule_class"]

_PipelineSchedule = Schedule  # as torchtitan names, in annotations, what runs a pipeline

OF_TORCH = (  # as torch spells them
    *("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleGPipe", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"),
    *("ScheduleZBVZeroBubble", "ScheduleDualPipeV", "PipelineScheduleSingle", "PipelineScheduleMulti"),
)


_ORDERS = "construct a schedule such as Schedule1F1B, give FromPlan a plan, or write one of your own (docs/schedules.md)"


class _OnlyABase(ABCMeta):
    """The class of a class that only other classes' subclasses are."""

    takes_one: bool

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        for base in bases:
            if isinstance(base, _OnlyABase):
                raise ConfigurationError(f"{name} derives from {base.__name__}, which runs nothing by itself: {_ORDERS}")

    def __subclasscheck__(cls, kind: type) -> bool:
        if kind is cls:
            return True
        return issubclass(kind, Schedule) and is_single(kind) is cls.takes_one

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, Schedule) and one.takes_one_stage == cls.takes_one

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ConfigurationError(f"{cls.__name__} runs nothing by itself: {_ORDERS}")


class PipelineScheduleSingle(Schedule, metaclass=_OnlyABase):
    """The schedules with one stage per rank; it is there for `issubclass` and `isinstance`.

    Example:
        >>> import bpipe
        >>> issubclass(bpipe.OneFOneB, bpipe.PipelineScheduleSingle), issubclass(bpipe.ZBV, bpipe.PipelineScheduleSingle)
        (True, False)
    """

    takes_one = True


class PipelineScheduleMulti(Schedule, metaclass=_OnlyABase):
    """The schedules that take a list of stages; it is there for `issubclass` and `isinstance`.

    Example:
        >>> import bpipe
        >>> issubclass(bpipe.ZBV, bpipe.PipelineScheduleMulti), issubclass(bpipe.OneFOneB, bpipe.PipelineScheduleMulti)
        (True, False)
    """

    takes_one = False


def get_schedule_class(schedule_name: str) -> type:
    """Return the class of a schedule: by torch's name, by bpipe's, or by the name of its rule, in capitals or not.

    Raises:
        ConfigurationError: none is called so, or a rule that was registered has no class; the message lists the names of rules.

    Example:
        >>> get_schedule_class("1f1b").__name__, get_schedule_class("ZBVZeroBubble").__name__
        ('OneFOneB', 'ScheduleZBVZeroBubble')
        >>> get_schedule_class("balanced_1f1b").__name__
        'BalancedOneFOneB'
    """
    asked = schedule_name.casefold().removeprefix("schedule")
    called = next((name for name in OF_TORCH if name.casefold().removeprefix("schedule") == asked), None)
    name = rule_named(schedule_name).runs_as if called is None else called
    kind: type | None = None if name == "Schedule" else getattr(import_module("bpipe"), name, None)
    if kind is None:
        raise ConfigurationError(f"bpipe has no class that runs {schedule_name!r}: use your own subclass of bpipe.Schedule")
    return kind
