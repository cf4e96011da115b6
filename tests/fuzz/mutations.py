"""Small changes to valid input: of its bytes, of its numbers and words, of a JSON value inside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = ["0", "-1", "1", "999999999", str(2**63), "9" * 30, "9" * 5000, "1e308", "1e999", "0.5", "nan", "\u0663", "\u00b2"]
WORDS = [
    "",
    " ",
    "\n",
    ",",
    "\0",
    "\x1b[2J",
    "\x9b",
    "\u202e",
    "\u2028",
    "\ud800",
    "[bold]",
    "[/x]",
    "@",
    "@host",
    ".1",
    "-",
    "%s",
    "a" * 3000,
]
VALUES: list[Any] = [None, True, -1, 2**63, 10**40, 1e308, 0.5, "", "9" * 3000, "\x1b[2J", "\ud800", [], {}, [[]], [0] * 300]
ACTIONS = [
    "0F0",
    "0B0",
    "9F9",
    "0F999999999",
    "0EVICT0@3",
    "0LOAD0@host",
    "0ACCEPT0@9",
    "0UNSHARD",
    "0F0.1",
    "0WAIT_RETURN0@1",
    "0R0",
]


def _bytes(data: bytes, random: Random) -> bytes:
    at, length = random.randrange(len(data) + 1), random.choice([0, 1, 1, 2, 8, 64])
    new = random.choice([b"", bytes([random.randrange(256)]), data[at : at + length] * 2, random.randbytes(length)])
    return data[:at] + new + data[at + length :]


def _number(data: bytes, random: Random) -> bytes:
    found = list(re.finditer(rb"\d+", data))
    if not found:
        return _bytes(data, random)
    one = random.choice(found)
    return data[: one.start()] + random.choice(NUMBERS).encode(errors="surrogateescape") + data[one.end() :]


def _word(data: bytes, random: Random) -> bytes:
    found = list(re.finditer(rb"[^\s,:]+", data))
    if not found:
        return _bytes(data, random)
    one, new = random.choice(found), random.choice(WORDS + ACTIONS)
    return data[: one.start()] + new.encode(errors="surrogatepass") + data[random.choice([one.start(), one.end()]) :]


def _line(data: bytes, random: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    lines[at : at + random.choice([0, 1])] = random.choice([[], [lines[other]], [lines[other]] * 2])
    return b"".join(lines)


def _value(data: bytes, random: Random) -> bytes:
    """Change a value in JSON: replace it, delete it, or put it there twice."""
    try:
        whole = json.loads(data)
    except ValueError:
        return _word(data, random)
    places: list[tuple[Any, Any]] = []
    todo = [whole]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else []
        places += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    if not places:
        return _bytes(data, random)
    holder, key = random.choice(places)
    how = random.randrange(4)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == 2 and isinstance(holder[key], str):
        holder[key] = _word(holder[key].encode(errors="surrogatepass"), random).decode(errors="replace")
    else:
        holder[key] = random.choice(VALUES)
    return json.dumps(whole).encode()


MUTATIONS: list[Callable[[bytes, Random], bytes]] = [_bytes, _number, _word, _line, _value]


def mutated(data: bytes, random: Random) -> bytes:
    """Return valid input with one to three changes."""
    for _ in range(random.choice([1, 1, 2, 3])):
        if data:
            data = random.choice(MUTATIONS)(data, random)
    return data
