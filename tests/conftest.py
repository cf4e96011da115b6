"""Hypothesis for two busy cores: fewer examples, no deadline for one, no store of failures. One thread where bits count."""

from __future__ import annotations

import gc
import lzma
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import tiers
from tests.quiet import why_busy
from tests.tiers import FEW_EXAMPLES, Tier

TIER = pytest.StashKey[str]()
COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=[*Tier, "every"], help="which tests run: test, and every of named files (tests/tiers.py)")
    parser.addoption("--explain-tiers", nargs="?", const=os.devnull, help="print each test's tier, and why")
    parser.addoption("--write-seconds", action="store_true", help="write what tests take in this run into tests/seconds.json")
    parser.addoption("--write-table", action="store_true", help="write docs/faults.md from this run of tests/faults")
    parser.addoption("--write-transformers", action="store_true", help="write docs/transformers.md from a sweep over all classes")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background: Ctrl-C would never come
        signal.signal(signal.SIGINT, signal.default_int_handler)
    explains = config.getoption("--explain-tiers") is not None
    if again := config.getoption("lf", False):
        config.option.last_failed_no_failures = "none"
    are_named = explains or again or any(map(tiers.is_named, config.args))
    tier = config.getoption("--tier") or ("every" if are_named else Tier.TEST)
    config.stash[TIER] = tier
    settings.register_profile("few", max_examples=FEW_EXAMPLES, **COMMON)
    settings.register_profile("all", max_examples=50, **COMMON)
    settings.load_profile("few" if tier == Tier.TEST or config.getoption("--write-seconds") else "all")
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        some = again or config.option.keyword or config.option.markexpr or any("[" in one for one in config.args)
        config.pluginmanager.register(tiers.Stopwatch(are_all=tier == "every" and not some))


def pytest_report_header(config: pytest.Config) -> str:
    return f"tier: {config.stash[TIER]} (tests/tiers.py says which test is in which; --tier every takes all)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import files without a test of this tier."""
    return True if tiers.has_none(collection_path, config.stash[TIER]) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage meanwhile, and later not among what is collected: it takes a third less time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (ids := config.getoption("--explain-tiers")) is not None:
        with lzma.open(ids, "rt") if ids.endswith(".xz") else open(ids) as lines:
            print(*tiers.explanation(items, lines.read().splitlines()), sep="\n")
        items.clear()
    elif (tier := config.stash[TIER]) != "every":
        items[:], left_out = tiers.parted(items, Tier(tier))
        config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--explain-tiers") is not None:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from decided(item))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Look for no garbage among what a file's tests leave, such as modules: it takes seconds where Dynamo is loaded."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from decided(item))


def decided(item: pytest.Item) -> Iterator[None]:
    """What measures time decides nothing on a busy machine."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception):
        if tiers.measures_time(item.nodeid) and (why := why_busy()):
            pytest.skip(why)
        raise


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the ranks of `run_ranks`: sums are split, and so rounded, by the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide threads that other tests have left, as torch.compile's: for all that bpipe knows they may draw random numbers."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
