"""The cases of which the oracle has plans: tables of fragments, and covering combinations of them.

A series of numbers is one by stage (`static` by rank, `skip` by skip), which begins again at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]
Fragment = tuple[str, Case]  # of a case's name, and of the case
Row = dict[str, Any]  # a value of each factor

COSTS: dict[str, Case] = {
    "even": {"forward": [1.0], "backward": [2.0], "saved": [1]},
    "slow links": {
        **{"forward": [1.0], "backward": [2.0], "saved": [8], "output": [2], "gradients": [6], "static": [5]},
        **{"link": [0.1, 8.0], "cross link": [0.3, 2.0], "host link": [0.05, 4.0], "nodes": 2, "slowdown": 1.25, "fill": [0.75, 2]},
    },
    "uneven stages": {
        **{"forward": [1.0, 1.4, 0.7, 1.1, 0.9], "backward": [2.1, 2.6, 1.5, 2.0], "for inputs": [1.2, 0.9, 1.0]},
        **{"for weights": [0.8, 1.1, 0.7], "saved": [7, 9, 4], "output": [3, 1], "gradients": [5], "link": [0.02, 20.0]},
        **{"overlapped share": 0.3, "fill": [0.4, 5]},
    },
}
MIXED: Case = {"forward": [1.0], "backward": [2.0], "saved": [20], "output": [3], "link": [0.0, 40.0]}  # for what decides by costs

STAGES_A_RANK = {
    **dict.fromkeys(["gpipe", "1f1b", "balanced_1f1b", "zb_h1", "zb_h2", "seq_1f1b", "tera_pipe", "local_learning"], 1),
    **dict.fromkeys(["interleaved_1f1b", "interleaved_zb", "breadth_first", "zbv", "v_half", "v_min", "dualpipe_v", "chimera"], 2),
    **dict.fromkeys(["bitpipe", "bitpipe_reordered", "bitpipe_zb"], 4),
}
LOOPS = ("interleaved_1f1b", "interleaved_zb", "breadth_first")
SLICED = ("seq_1f1b", "tera_pipe", "interleaved_1f1b")
PAIRED = ("dualpipe_v", "interleaved_1f1b")
BOTH_WAYS = ("chimera", "bitpipe", "bitpipe_reordered", "bitpipe_zb")
SIZES = ((2, 4), (3, 6), (4, 8), (6, 12))  # ranks, microbatches
OTHER_SIZES = ((1, 2), (2, 1), (3, 3), (4, 5), (5, 10), (4, 16), (8, 16))

BYTES: Case = {
    **{"fixed": [3, 0, 5, 4], "output": [4, 2, 6, 3, 5], "input saved": [1, 4, 0], "output saved": [2, 0, 6], "static": [6, 0, 9]},
    **{"between halves": [11, 7, 20], "state": [2, 4], "state gradient": [3, 1], "more in slice": [0, 2, 5]},
    **{"gradients": [7, 3], "results": [4, 3], "skip": [5, 8], "skip saved": [0, 3], "skip gradient": [6, 2]},
}
PARTS = {1: [[31], [22], [27], [40], [25]], 3: [[9, 14, 8], [12, 5, 6], [10, 10, 7], [20, 1, 19]]}

WAYS: dict[str, Case] = {  # of keeping a budget, in percent of the highest peak without
    "evicting": {"by": "eviction", "budget": [80]},
    "evicting on even ranks": {"by": "eviction", "budget": [70, None], "costs": MIXED},
    "evicting to the lowest": {"by": "eviction", "budget": "lowest"},
    "recomputing": {"by": "recomputation", "budget": [80]},
    "recomputing to the lowest": {"by": "recomputation", "budget": "lowest"},
    "either": {"by": "either", "budget": [80], "costs": MIXED},
    "either over slow links": {"by": "either", "budget": [80], "costs": {**MIXED, "link": [0.0, 9.0]}},
}
EAGER = ("1f1b", "seq_1f1b", "gpipe", "tera_pipe", "breadth_first")  # schedules whose steady state an eager eviction suits
OF_WHOLE = ("recomputing", "recomputing to the lowest", "either", "either over slow links")  # ways that take no pieces
PLACES: dict[str, Callable[[int], Case]] = {
    "any rank": lambda p: {},
    "pairs alone": lambda p: {"to": {"pairs": [(rank + p // 2) % p for rank in range(p)], "others": False}},
    "own node first": lambda p: {"to": {"nodes": [2 * rank // p for rank in range(p)]}},
    "host last": lambda p: {"to": {"host": "last"}},
    "host only": lambda p: {"to": {"host": "only"}},
}
SKIPS: dict[str, Callable[[int], list[list[int]]]] = {
    "no skips": lambda depth: [],
    "one skip": lambda depth: [[0, depth - 1]],
    "two skips": lambda depth: [[0, 1, depth - 1], [depth // 2 - 1, depth // 2 + 1]],
}
ASIDE = ("none", "in the steady state", "wherever")  # pairs of a forward and a backward side by side
FACTORS: dict[str, list[Any]] = {
    "schedule": list(STAGES_A_RANK),
    "size": list(SIZES),
    "slices": [1, 2, 3],
    "skips": list(SKIPS),
    "side by side": list(ASIDE),
    "parts": [0, 1, 3],  # 0: bytes are not counted
    "way": ["none", *WAYS],
    "place": list(PLACES),
    "inside": [False, True],
    "forward only": [False, True],
}


def all_cases() -> dict[str, Case]:
    """Every case by its name; but for those that move parts inside a computation, which bpipe no longer does."""
    families = (plain_cases, covering_cases, replica_cases, encoder_cases, eager_cases, made_cases, pairs_of_features)
    return {name: case for family in families for name, case in family() if not case.get("inside")}


def _sized(schedule: str, ranks: int, microbatches: int, stages_a_rank: int | None = None) -> Fragment:
    v = STAGES_A_RANK[schedule] if stages_a_rank is None else stages_a_rank
    case = {"schedule": schedule, "ranks": ranks, "stages a rank": v, "microbatches": microbatches}
    return f"{schedule} p={ranks} v={v} m={microbatches}", case


def _joined(*fragments: Fragment) -> Fragment:
    return ", ".join(name for name, _ in fragments if name), {word: one for _, case in fragments for word, one in case.items()}


def plain_cases() -> Iterator[Fragment]:
    for schedule, (p, m) in product(STAGES_A_RANK, (*SIZES, *OTHER_SIZES)):
        yield _sized(schedule, p, m)
    for schedule, v, (p, m) in product(LOOPS, (3, 4), ((2, 4), (3, 6), (4, 8))):
        yield _sized(schedule, p, m, v)


# Combinations in which each two values that can go together do.


def covering_cases() -> Iterator[Fragment]:
    for seed in range(2):
        yield from map(_case_of, covering(FACTORS, can_be, Random(seed)))


def can_be(row: Row) -> bool:
    """Whether bpipe may plan what a row, or a part of one, says; what it refuses anyway is among `pairs_of_features`."""
    schedule, size, way, parts = (row.get(name) for name in ("schedule", "size", "way", "parts"))
    features = {name for name, value in row.items() if name in FACTORS and value != FACTORS[name][0]}
    if schedule is not None:
        steady = row.get("side by side") == "in the steady state"
        if ("slices" in features and schedule not in SLICED) or (steady and schedule not in PAIRED):
            return False
        if schedule == "local_learning" and (features & {"slices", "skips", "side by side", "inside"} or way in OF_WHOLE):
            return False
        if size is not None and schedule in BOTH_WAYS and size[0] % 2:
            return False
        if size is not None and "skips" in features and _depth(schedule, size[0]) < 4:
            return False
    if "inside" in features and (way in ("none", *OF_WHOLE) or parts in (0, 1) or size == (6, 12)):
        return False  # the last would take long
    return not (
        {"skips", "side by side"} <= features
        or {"inside", "side by side"} <= features
        or (parts == 0 and way in ("either", "either over slow links"))
        or ("place" in features and way in ("none", "recomputing", "recomputing to the lowest"))
        or ("forward only" in features and features & {"way", "parts"})
    )


def _depth(schedule: str, ranks: int) -> int:
    return ranks * STAGES_A_RANK[schedule] // (2 if schedule in BOTH_WAYS else 1)


def covering(factors: dict[str, list[Any]], is_able: Callable[[Row], bool], random: Random) -> Iterator[Row]:
    """Yield rows in which each two values of two factors stand together that are able to, most of them once."""
    items = [(name, value) for name, values in factors.items() for value in values]
    left = {frozenset(two) for two in combinations(items, 2) if two[0][0] != two[1][0]}
    for one, other in combinations(items, 2):
        if frozenset((one, other)) not in left:
            continue
        row = _completed(dict((one, other)), factors, is_able, left, random)
        if row is not None:
            left -= {frozenset(two) for two in combinations(row.items(), 2)}
            yield row


def _completed(
    row: Row, factors: dict[str, list[Any]], is_able: Callable[[Row], bool], left: set[frozenset[tuple[str, Any]]], random: Random
) -> Row | None:
    """Give a row the values that bring most pairs of those that are left; None if there is a factor without one that is able to."""
    others = [name for name in factors if name not in row]
    for name in random.sample(others, len(others)):
        able = [value for value in factors[name] if is_able({**row, name: value})]
        if not able or not is_able(row):
            return None
        gains = {value: sum(frozenset(((name, value), item)) in left for item in row.items()) for value in able}
        row = {**row, name: random.choice([value for value in able if gains[value] == max(gains.values())])}
    return row


def _case_of(row: Row) -> Fragment:
    p, m = row["size"]
    name, case = _sized(row["schedule"], p, m)
    fragments: list[Fragment] = [(name, case)]
    if row["slices"] > 1:
        fragments.append((f"{row['slices']} slices", {"slices": row["slices"]}))
    if row["skips"] != "no skips":
        fragments.append((row["skips"], {"skips": SKIPS[row["skips"]](_depth(row["schedule"], p))}))
    if row["side by side"] != "none":
        fragments.append((f"pairs {row['side by side']}", {"side by side": row["side by side"]}))
    if row["parts"]:
        fragments.append((f"bytes in parts of {row['parts']}", {"bytes": {**BYTES, "parts": PARTS[row["parts"]]}}))
    if row["inside"]:
        fragments.append(("inside", {"inside": True}))
    if row["way"] != "none":
        fragments.append((row["way"], {"keep": WAYS[row["way"]]}))
        fragments.append(("" if row["place"] == "any rank" else f"to {row['place']}", PLACES[row["place"]](p)))
    if row["forward only"]:
        fragments.append(("forward only", {"forward only": True}))
    return _joined(*fragments)


# What has no place in that table.


def replica_cases() -> Iterator[Fragment]:
    """Paths: microbatches are dealt to replicas of stages by their speeds; a speed of 0 is a rank that is not there."""
    speeds = ([[1], [2]], [[1, 1], [1, 1]], [[1, 2], [3, 1]], [[1, 1, 1], [2, 1, 0.5]], [[1, 1, 1], [1, 0, 2], [2, 1, 1]])
    speeds = (*speeds, [[1, 1, 1, 1], [1, 2, 1, 0.5]], [[1, 1], [0, 2], [1, 1]])
    for of_replicas, m in product(speeds, (1, 6, 30)):
        name = f"replicas {' '.join('/'.join(map(str, one)) for one in of_replicas)} m={m}"
        case = {"schedule": "replicas", "ranks": len(of_replicas) * len(of_replicas[0]), "microbatches": m, "speeds": of_replicas}
        yield name, case
        if m == 6:
            yield _joined((name, case), ("bytes", {"bytes": {**BYTES, "parts": PARTS[1]}}))
            yield _joined((name, case), ("forward only", {"forward only": True}))


def encoder_cases() -> Iterator[Fragment]:
    for schedule, (p, m), pieces, rank in product(("1f1b", "gpipe", "zb_h1"), SIZES[:3], (1, 2), (0, 1)):
        encoder = {"pieces": pieces, "rank": rank, "forward": [0.2, 0.5, 1.0, 0.9], **({"most": 6} if rank else {})}
        yield _joined(_sized(schedule, p, m), (f"encoder of {pieces} on {rank}", {"encoder": encoder}))


def eager_cases() -> Iterator[Fragment]:
    """One eviction with each forward and one load with each backward."""
    for schedule, (p, m), (place, budget) in product(EAGER, SIZES[1:], (("any rank", [70, None]), ("host only", [80]))):
        kept = {"keep": {"by": "eager eviction", "budget": budget}, **PLACES[place](p)}
        yield _joined(_sized(schedule, p, m), (f"evicting eagerly to {place}", kept))


def made_cases() -> Iterator[Fragment]:
    """Orders made to measure, kept within a budget by evictions and recomputations."""
    families = (("gpipe", "1f1b"), ("zb_h1", "zb_h2"), ("zbv", "v_half", "v_min"), ("seq_1f1b",), ("interleaved_1f1b",))
    for family, size, budget in product(families, SIZES[:3], (70, 90)):
        yield _made(family, size, budget)
    yield _made(families[0], (2, 64), 70)  # so many that few stand for all
    yield from (_made(families[0], SIZES[2], 80, only) for only in ("eviction", "recomputation"))


def _made(family: Sequence[str], size: tuple[int, int], budget: int, only: str = "") -> Fragment:
    first, *others = family
    costs = MIXED | COSTS["uneven stages"]
    keep = {"by": "orders", "orders like": others, "budget": [budget], "costs": costs, "effort": 30_000, "only": only}
    slices: Fragment = ("2 slices", {"slices": 2}) if first == "seq_1f1b" else ("", {})
    bytes_: Fragment = ("", {"bytes": {**BYTES, "parts": PARTS[1]}})
    name = f"made to measure within {budget}%" + f" by {only}" * bool(only)
    return _joined(_sized(first, *size), slices, bytes_, (name, {"keep": keep}))


FEATURES: dict[str, Case] = {  # behind the schedule that a feature needs, which the later of two decides
    "slices": {"schedule": "seq_1f1b", "slices": 2},
    "skips": {"skips": [[0, 2]]},
    "pairs": {"side by side": "wherever"},
    "encoder": {"encoder": {"pieces": 1, "rank": 0, "forward": [0.5, 1.0]}},
    "recomputation": {"keep": WAYS["recomputing to the lowest"]},
    "eviction": {"keep": WAYS["evicting to the lowest"]},
    "bytes": {"bytes": {**BYTES, "parts": PARTS[3]}},
    "host": {"keep": WAYS["evicting to the lowest"], "to": {"host": "only"}},
    "inside": {"bytes": {**BYTES, "parts": PARTS[3]}, "inside": True},
    "forward only": {"forward only": True},
    "pairs of a schedule": {"schedule": "dualpipe_v", "stages a rank": 2, "side by side": "in the steady state"},
    "directions": {"schedule": "chimera", "stages a rank": 2},
    "local": {"schedule": "local_learning"},
    "paths": {"schedule": "replicas", "speeds": [[1, 1], [1, 2]]},
}


def pairs_of_features() -> Iterator[Fragment]:
    """Each feature with each other one, whether bpipe plans that or not."""
    for (one, first), (other, second) in combinations(FEATURES.items(), 2):
        both = first.keys() & second.keys()
        if "keep" not in both and ("schedule" not in both or one == "slices"):
            _, case = _joined(_sized("1f1b", 4, 8), ("", first), ("", second))
            yield f"features: {one}, {other}", case
