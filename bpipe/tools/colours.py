"""The names and colours of a timeline's roles, from Okabe and Ito's palette: distinct for the colour-blind and in grey print."""

from __future__ import annotations

from bpipe.plan.action import HOST, START_OF, Action, Op

__all__: list[str] = []

Role = str  # an operation, or one of these: with the rank's own host at the other end, or a send that was measured
HOST_EVICT, HOST_LOAD, WAIT_HOST_EVICT, WAIT_HOST_LOAD = "EVICT@host", "LOAD@host", "WAIT_EVICT@host", "WAIT_LOAD@host"

POSTED_F, POSTED_B = "SEND_F@posted", "SEND_B@posted"  # from posting to completion, of which the link is busy for a part

HOST_ROLES = (HOST_EVICT, HOST_LOAD, WAIT_HOST_EVICT, WAIT_HOST_LOAD)
OTHER_ROLES = (*HOST_ROLES, POSTED_F, POSTED_B)
LIGHTEST = 0.4  # how near to white the last of a rank's stages comes


def lighten(colour: str, share: float) -> str:
    """Mix a colour with white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in _parts(colour))


def darken(colour: str, share: float) -> str:
    """Mix a colour with black."""
    return "#" + "".join(f"{round(part * (1 - share)):02x}" for part in _parts(colour))


def luminance(colour: str) -> float:
    """Return how light a colour is, from 0 to 1: the relative luminance of WCAG 2.2."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (p / 255 for p in _parts(colour)))
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return "#000000" if luminance(colour) > 0.18 else "#ffffff"  # where the contrasts with black and white are equal


def role(action: Action, is_measured: bool = False) -> Role:
    """Return the role that a picture shows an action in."""
    if is_measured and action.op in (Op.SEND_F, Op.SEND_B):
        return f"{action.op}@posted"
    return f"{action.op}@host" if action.peer == HOST else action.op


def shade(role: Role, place: int = 0, num_places: int = 1) -> str:
    """Return the colour of an operation on the `place`-th of a rank's stages: the first is the darkest."""
    return lighten(COLOURS[role], LIGHTEST * place / max(num_places - 1, 1))


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


COLOURS: dict[Role, str] = {
    Op.F: lighten("#56b4e9", 0.3),  # lighter than the palette's, so that no stage's F has the grey of a B
    Op.B: "#d55e00",
    Op.I: "#e69f00",
    Op.W: "#009e73",
    Op.R: lighten("#0072b2", 0.4),
    Op.FILL: "#117733",
    Op.EVICT: "#cc79a7",
    Op.LOAD: "#0072b2",
    Op.ACCEPT: lighten("#cc79a7", 0.65),
    Op.RETURN: "#f0e442",
    HOST_EVICT: "#7f4f24",
    HOST_LOAD: "#dda15e",
}
COLOURS |= {Op.SEND_F: COLOURS[Op.F], Op.SEND_B: COLOURS[Op.B]}
COLOURS |= {POSTED_F: lighten(COLOURS[Op.F], 0.6), POSTED_B: lighten(COLOURS[Op.B], 0.6)}

NAMES: dict[Role, str] = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward, inputs",
    Op.W: "backward, weights",
    Op.R: "recompute",
    Op.FILL: "fill job",
    Op.EVICT: "evict",
    Op.LOAD: "load",
    HOST_EVICT: "evict to the host",
    HOST_LOAD: "load from the host",
    Op.ACCEPT: "accept a remote activation",
    Op.RETURN: "return a remote activation",
    Op.SEND_F: "send forward",
    Op.SEND_B: "send backward",
    POSTED_F: "send forward, from posting to completion",
    POSTED_B: "send backward, from posting to completion",
}
WAIT_NAMES: dict[Role, str] = dict.fromkeys(START_OF, "wait for another rank") | {
    Op.WAIT_EVICT: "wait for an eviction",
    Op.WAIT_LOAD: "wait for a load",
    WAIT_HOST_EVICT: "wait for an eviction to the host",
    WAIT_HOST_LOAD: "wait for a load from the host",
}

WAITING = "#dddddd"
# What a device holds, from the bottom up, and its edge.
LAYERS = {"stays": "#a0a0a0", "activations": "#d6d6d6", "messages": "#f6f6f6"}
MEMORY_EDGE = "#666666"

MOVE_WAITS: dict[Role, Role] = {
    Op.WAIT_EVICT: Op.EVICT,
    Op.WAIT_LOAD: Op.LOAD,
    WAIT_HOST_EVICT: HOST_EVICT,
    WAIT_HOST_LOAD: HOST_LOAD,
}


def wait_colour(role: Role) -> str:
    """Return the colour of a wait: grey for other ranks' results, the transfer's own but darker for an eviction or a load."""
    return darken(COLOURS[MOVE_WAITS[role]], 0.4) if role in MOVE_WAITS else WAITING
