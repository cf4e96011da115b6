"""Print to the terminal through rich: tables, colours if the terminal has them, and a progress display for long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bpipe.errors import ConfigurationError, printable
from bpipe.extras import how_to_install

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__: list[str] = []

WIDTH_OF_FILES = 160


def console(*, to_errors: bool = False) -> Console:
    """Return a console on standard output, or on standard error for what is not part of the result."""
    with _needing_rich():
        from rich.console import Console
    stream = sys.stderr if to_errors else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH_OF_FILES)


@contextmanager
def _needing_rich() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"tables need rich: {how_to_install('cli')}; or use --json") from error


def note(text: str) -> None:
    """Say what a result leaves out, on standard error, so that it does not get into the result."""
    print(f"bpipe: note: {printable(text)}", file=sys.stderr)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column is a name and whose other columns are numbers."""
    with _needing_rich():
        from rich import box
        from rich.table import Table
        from rich.text import Text
    result = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in result.columns[1:]:
        column.justify = "right"
    for row in rows:
        result.add_row(*(Text(printable(cell)) for cell in row))  # not markup: "[b]" is a name like any other
    return result


@contextmanager
def sign_of_life(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal what is running and for how long; called with `(done, total)`, how much of it is done too."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(to_errors=True), transient=True) as progress:
        task = progress.add_task(printable(text), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a command."""

    data: Any  # what `--json` prints
    shown: Callable[[], Sequence[Any]]  # makes what is printed otherwise: strings, and rich's renderables
    exit_code: int = 0  # 0, or 1 if the answer is no
