"""Describe in words where a microbatch of a stage is after an action."""

from __future__ import annotations

from bpipe.plan.action import HOST, MESSAGES, Action, Op

__all__: list[str] = []

AFTER = {
    Op.RECV_F: "its input is on its way here",
    Op.WAIT_RECV_F: "its input is here",
    Op.F: "it has run forward, and {part} here",
    Op.SEND_F: "its output is being sent",
    Op.WAIT_SEND_F: "its output was sent, and {part} here",
    Op.EVICT: "{part} on the way to {peer}",
    Op.WAIT_EVICT: "{part} on {peer}",
    Op.LOAD: "{part} on the way back from {peer}",
    Op.WAIT_LOAD: "{part} here again, from {peer}",
    Op.ACCEPT: "{part} on the way here, from {peer}",
    Op.WAIT_ACCEPT: "{part} kept here for {peer}",
    Op.RETURN: "{part} on the way back to {peer}",
    Op.WAIT_RETURN: "{part} with {peer} again",
    Op.R: "it has run forward a second time, and {part} here",
    Op.RECV_B: "the gradient of its output is on its way here",
    Op.WAIT_RECV_B: "the gradient of its output is here",
    Op.B: "it has run backward",
    Op.I: "the gradient of its input is computed, those of its weights are not",
    Op.W: "it has run backward",
    Op.SEND_B: "the gradient of its input is being sent",
    Op.WAIT_SEND_B: "the gradient of its input was sent",
}

OF_SKIPS = {
    Op.RECV_F: "skips of stage {other} are on their way here",
    Op.WAIT_RECV_F: "skips of stage {other} are here",
    Op.SEND_F: "its skips for stage {other} are being sent",
    Op.WAIT_SEND_F: "its skips for stage {other} were sent",
    Op.RECV_B: "the gradients of its skips for stage {other} are on their way here",
    Op.WAIT_RECV_B: "the gradients of its skips for stage {other} are here",
    Op.SEND_B: "the gradients of skips of stage {other} are being sent",
    Op.WAIT_SEND_B: "the gradients of skips of stage {other} were sent",
}


def whereabouts(action: Action) -> str:
    """Return where an action's microbatch is, on the action's rank, after it; empty if the action has none.

    Example:
        >>> from bpipe.schedules import Action, Op
        >>> whereabouts(Action(Op.WAIT_EVICT, 0, 1, peer=3))
        'its activations are on rank 3'
    """
    if action.part and action.op in MESSAGES:
        return OF_SKIPS[action.op].format(other=action.part - 1)
    peer = "the host" if action.peer == HOST else f"rank {action.peer}"
    part = f"part {action.part} of its activations is" if action.part else "its activations are"
    return AFTER.get(action.op, "").format(part=part, peer=peer)
