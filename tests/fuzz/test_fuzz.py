"""Whatever a file, a peer, a store, the environment or the command line says ends in an error of bpipe's own, or in none."""

from __future__ import annotations

import tracemalloc
from random import Random
from traceback import format_exception

import pytest

from bpipe.errors import BPipeError, is_printable
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import READERS

SLOW = {"trace": 8, "trace command": 8, "compare": 8, "advise": 8}  # how much longer one example of these takes
MEMORY, ALLOWANCE = 400, 2**23  # bytes for each byte of input, and in any case: caches, tables, an import


def _fuzz(name: str, seed: object) -> None:
    reader, random = READERS[name], Random(f"{name} {seed}")
    data = mutated(random.choice(reader.examples), random)
    said = ""
    try:
        reader.read(data)
    except BPipeError as error:
        said = str(error)
    except Exception as error:
        told = ascii("".join(format_exception(error)))  # a report with half a character in it would end all of the run
        raise AssertionError(f"{name} {seed}: {data[:2000]!r} raised {told}") from None
    assert is_printable(said), f"{name} {seed}: {said!a}"


@pytest.mark.parametrize("name", READERS)
def test_valid_input_is_read(name: str) -> None:
    for data in READERS[name].examples:
        READERS[name].read(data)


@pytest.mark.parametrize("name", READERS)
def test_mutated_input_raises_errors_of_our_own(name: str) -> None:
    for seed in range(24 // SLOW.get(name, 1)):
        _fuzz(name, seed)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("block", range(3))
def test_mutated_input_raises_errors_of_our_own_many(name: str, block: int) -> None:
    for seed in range(400 // SLOW.get(name, 1)):
        _fuzz(name, (block, seed))


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if name not in ("command", "advise")])
def test_mutated_input_takes_memory_in_proportion(name: str) -> None:
    for seed in range(300 // SLOW.get(name, 1)):
        data = mutated(Random(f"{name} {seed}").choice(READERS[name].examples), Random(seed))
        tracemalloc.start()
        try:
            READERS[name].read(data)
        except BPipeError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MEMORY * len(data) + ALLOWANCE, f"{name} {seed}: {peak} bytes for {len(data)}"
