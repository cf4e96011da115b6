"""The names and colours of a timeline's roles, from Okabe and Ito's palette: distinct for the colour-blind and in grey print."""

from __future__ import annotations

from bpipe.plan.action import START_OF, Op

__all__: list[str] = []

Role = str  # an operation, or one of these: with the rank's own host at the other end, or a send that was measured
HOST_EVICT, HOST_LOAD = "EVICT@host", "LOAD@host"
POSTED_F, POSTED_B = "SEND_F@posted", "SEND_B@posted"  # from posting to completion, of which the link is busy for a part

LIGHTEST = 0.4  # how near to white the last of a rank's stages comes


def lighten(colour: str, share: float) -> str:
    """Mix a colour with white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(colour[1:]))


def darken(colour: str, share: float) -> str:
    """Mix a colour with black."""
    return "#" + "".join(f"{round(part * (1 - share)):02x}" for part in bytes.fromhex(colour[1:]))


def luminance(colour: str) -> float:
    """Return how light a colour is, from 0 to 1: the relative luminance of WCAG 2.2."""
    parts = (part / 255 for part in bytes.fromhex(colour[1:]))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return "#000000" if luminance(colour) > 0.18 else "#ffffff"  # where the contrasts with black and white are equal


def shade(role: Role, place: int = 0, num_places: int = 1) -> str:
    """Return the colour of a role on the `place`-th of a rank's stages: the first is the darkest."""
    return lighten(COLOURS[role], LIGHTEST * place / max(num_places - 1, 1))


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
# Waits are grey for other ranks' results, and otherwise of the transfer's own colour, but darker.
WAITING = "#dddddd"
COLOURS |= dict.fromkeys(START_OF, WAITING)
COLOURS |= {f"WAIT_{move}": darken(COLOURS[move], 0.4) for move in (Op.EVICT, Op.LOAD, HOST_EVICT, HOST_LOAD)}

# In the order of a legend.
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
    **dict.fromkeys(START_OF, "wait for another rank"),
    Op.WAIT_EVICT: "wait for an eviction",
    Op.WAIT_LOAD: "wait for a load",
    f"WAIT_{HOST_EVICT}": "wait for an eviction to the host",
    f"WAIT_{HOST_LOAD}": "wait for a load from the host",
}

# What a device holds, from the bottom up, and its edge.
LAYERS = {"stays": "#a0a0a0", "activations": "#d6d6d6", "messages": "#f6f6f6"}
MEMORY_EDGE = "#666666"
