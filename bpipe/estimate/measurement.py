"""The measurements of `bpipe.profile`: plain numbers, written to JSON and read back, and turned into the costs of a plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise

from bpipe.checks import check_count, check_positive
from bpipe.errors import ConfigurationError, printable
from bpipe.estimate.columns import columns
from bpipe.estimate.state_bytes import MASTER_BYTES, STATE_BYTES
from bpipe.plan.amounts import show_bytes, show_seconds

__all__ = ["Measurement", "Profile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurements of a stage with microbatches of one size.

    Args:
        microbatch_size: rows of the batch dimension.
        own_bytes: saved for the backward and freed by it.
        movable_bytes: of these, what an eviction moves.
        shared_bytes: saved, but also owned by others: counted once for all microbatches.
        output_bytes: what the stage sends to the next one.
        input_gradient_bytes: what its backward sends to the previous one.
        forward_s: seconds of a forward, the median.
        backward_s: seconds of a backward, the median; 0 if none ran.
        input_s: seconds of the half of a split backward that computes the gradients of inputs, the median; None if none ran, as in
            profiles of earlier versions.
        weight_s: seconds of the other half, likewise.

    Raises:
        ConfigurationError: a value is not a number or negative, more bytes are movable than saved, or a forward takes no time.

    Example:
        >>> one = Measurement(
        ...     microbatch_size=1, own_bytes=1000, movable_bytes=900, shared_bytes=0, output_bytes=100, input_gradient_bytes=100,
        ...     forward_s=0.01, backward_s=0.02,
        ... )
        >>> one.own_bytes - one.movable_bytes  # stays on its rank
        100
    """

    microbatch_size: int
    own_bytes: int
    movable_bytes: int
    shared_bytes: int
    output_bytes: int
    input_gradient_bytes: int
    forward_s: float
    backward_s: float
    input_s: float | None = None
    weight_s: float | None = None

    def __post_init__(self) -> None:
        check_count("microbatch_size", self.microbatch_size)
        for name in ("own_bytes", "movable_bytes", "shared_bytes", "output_bytes", "input_gradient_bytes"):
            check_count(name, getattr(self, name), least=0)
        if self.movable_bytes > self.own_bytes:
            raise ConfigurationError(f"movable_bytes={self.movable_bytes} are part of own_bytes={self.own_bytes}")
        check_positive("forward_s", self.forward_s)
        if self.backward_s != 0 or isinstance(self.backward_s, bool):
            check_positive("backward_s", self.backward_s)
        if (self.input_s is None) is not (self.weight_s is None):
            raise ConfigurationError(f"input_s={self.input_s}, weight_s={self.weight_s}: give both halves of a backward, or none")
        for name in ("input_s", "weight_s"):
            if (half_s := getattr(self, name)) is not None:
                check_positive(name, half_s)

    @property
    def halves_s(self) -> tuple[float, float]:
        """Seconds of the halves of a split backward: half of a whole one each, if they were not measured."""
        if self.input_s is None or self.weight_s is None:
            return self.backward_s / 2, self.backward_s / 2
        return self.input_s, self.weight_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A stage, measured alone.

    Args:
        name: the module's class.
        device: where it ran.
        num_parameters: elements of all parameters.
        num_trainable: elements of those that get a gradient.
        parameter_bytes: bytes of all parameters.
        trainable_bytes: bytes of those that get a gradient.
        gradient_bytes: bytes of the parameters' gradients.
        buffer_bytes: bytes of the module's buffers.
        measurements: one for each size, in increasing order.

    Raises:
        ConfigurationError: a value is not a number or negative, a part is larger than the whole, or there is no measurement.

    Example:
        >>> import torch
        >>> from bpipe import profile
        >>> measured = profile(torch.nn.Linear(4, 4), torch.zeros(1, 4), microbatch_sizes=[1, 2])
        >>> measured.num_parameters, [one.microbatch_size for one in measured.measurements]
        (20, [1, 2])
    """

    name: str
    device: str
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    trainable_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    measurements: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        for name in ("name", "device"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give a text")
        for name in ("num_parameters", "num_trainable", "parameter_bytes", "trainable_bytes", "gradient_bytes", "buffer_bytes"):
            check_count(name, getattr(self, name), least=0)
        for part, whole in (("num_trainable", "num_parameters"), ("trainable_bytes", "parameter_bytes")):
            if getattr(self, part) > getattr(self, whole):
                raise ConfigurationError(f"{part}={getattr(self, part)} are part of {whole}={getattr(self, whole)}")
        measured = self.measurements
        if not isinstance(measured, tuple) or not measured or not all(isinstance(one, Measurement) for one in measured):
            raise ConfigurationError("measurements: give a tuple of one Measurement or more")
        if any(before >= after for before, after in pairwise(self.microbatch_sizes)):
            raise ConfigurationError(f"measurements of sizes {self.microbatch_sizes}: give one per size, in increasing order")

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.microbatch_sizes))
        return f"Profile({self.name} on {self.device}: {self.num_parameters:,} parameters, microbatches of {sizes})"

    def __str__(self) -> str:
        rows = [["microbatch", "forward", "backward", "saves", "moves", "sends"]]
        for one in self.measurements:
            seconds = (show_seconds(one.forward_s), show_seconds(one.backward_s) if one.backward_s else "-")
            num_bytes = one.own_bytes, one.movable_bytes, one.output_bytes
            rows.append([str(one.microbatch_size), *seconds, *map(show_bytes, num_bytes)])
        weights, stay = show_bytes(self.parameter_bytes), show_bytes(self.static_bytes())
        head = f"{self.name} on {self.device}: {self.num_parameters:,} parameters, {weights}; with Adam {stay} stay"
        return "\n".join([head, *columns(rows, numbers=range(len(rows[0])))])

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The sizes that were measured."""
        return tuple(measurement.microbatch_size for measurement in self.measurements)

    def at(self, microbatch_size: int) -> Measurement:
        """Return what was measured at one size.

        Raises:
            ConfigurationError: that size was not measured.
        """
        for measurement in self.measurements:
            if measurement.microbatch_size == microbatch_size:
                return measurement
        known = ", ".join(map(str, self.microbatch_sizes))
        raise ConfigurationError(
            f"microbatch size {microbatch_size} of {self.name} was not measured, only {known}: "
            f"profile(..., microbatch_sizes=[{microbatch_size}]) measures it"
        )

    def static_bytes(self, bytes_per_parameter: float | None = None) -> int:
        """Compute the bytes that stay: buffers, and parameters with their gradients and optimizer states.

        Args:
            bytes_per_parameter: total for each trainable parameter; default: parameters and gradients as measured, and Adam's
                two fp32 moments, with an fp32 copy of trainable ones that have 16 bits.
        """
        if bytes_per_parameter is None:
            num_16_bit = (4 * self.num_trainable - self.trainable_bytes) // 2  # of trainable ones in 2 or 4 bytes each
            optimizer = STATE_BYTES["adam"] * self.num_trainable + MASTER_BYTES * max(num_16_bit, 0)
            return self.parameter_bytes + self.gradient_bytes + self.buffer_bytes + optimizer
        frozen_bytes = self.parameter_bytes - self.trainable_bytes
        return round(self.num_trainable * bytes_per_parameter) + frozen_bytes + self.buffer_bytes

    def to_json(self) -> str:
        """Return it as JSON that `Profile.from_json` reads back unchanged."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote.

        Raises:
            ConfigurationError: the text is not such a profile.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "measurements": tuple(Measurement(**one) for one in fields["measurements"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            shown = repr(text[:80] if isinstance(text, (str, bytes)) else text)
            raise ConfigurationError(
                f"this is not a profile that to_json() wrote: {shown} ({printable(str(error))[:200]})"
            ) from error
