"""The command line: `bpipe`, also `python -m bpipe`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from bpipe._version import __version__
from bpipe.errors import BPipeError, BudgetError, ConfigurationError, printable
from bpipe.tools.terminal import Result, console

__all__ = ["main"]

COMMANDS = {
    "schedules": "list the schedules there are, with their memory and bubbles",
    "show": "draw a schedule's grid in the terminal",
    "check": "prove a plan from a file, or say which rules it breaks",
    "simulate": "predict the step, the bubble and the memory of a schedule from costs",
    "plot": "draw a timeline, predicted or measured, as PNG, SVG or HTML",
    "compare": "compare schedules on the same costs",
    "trace": "merge the ranks' files of a trace, and show what was measured",
    "search": "find the fastest plan within a budget, or make an order to measure",
    "advise": "say whether balancing will help a model on a machine",
    "env": "show what bpipe finds on this machine",
}
HELP = """usage: bpipe COMMAND ...

{commands}

examples:
  bpipe show balanced_1f1b --ranks 8 --microbatches 32
  bpipe simulate balanced_1f1b -p 8 -m 32 --forward 20ms --saved 1.5GiB --bandwidth 20GB/s
  bpipe compare 1f1b balanced_1f1b -p 8 -m 32 --out compare.html
  bpipe compare 1f1b zbv v_half -p 8 -m 32 --per-rank
  bpipe trace runs/gpt/trace --out measured.html
  bpipe advise llama2-70b --device a100-80gb --stages 8 --tensor-parallel 8 --batch 128

`bpipe COMMAND --help` says more. Every command takes --json.
Exit codes: 0 done; 1 the answer is no, such as a broken plan; 2 bad input."""

DONE, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 for done, 1 if the answer is no, 2 for bad input.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, io.StringIO())
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except BudgetError as error:
        return _refuse(str(_said_as_option(error)))
    except BPipeError as error:
        return _refuse(str(error).partition("\n")[0])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return DONE
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {command:<9} {text}" for command, text in COMMANDS.items())))
        return DONE
    if name == "--version":
        print(f"bpipe {__version__}")
        return DONE
    if name not in COMMANDS:
        near = "".join(f", did you mean {match!r}?" for match in get_close_matches(name, COMMANDS, n=1))
        raise ConfigurationError(f"no command {name!r}{near}; there are {', '.join(COMMANDS)}")
    for argument in arguments:
        if argument.endswith("=--"):  # argparse takes it for an empty list
            raise ConfigurationError(f"{argument} gives no value")
    command = import_module(f"bpipe.tools.commands.{name}")
    args = _parser(name, command).parse_args(_joined(arguments[1:]))
    result: Result = command.run(args)
    _print(result, as_json=args.json)
    return result.exit_code


def _joined(arguments: list[str]) -> list[str]:
    """Rewrite `--slots -,3` as `--slots=-,3`, because argparse takes what begins with a dash for an option."""
    joined: list[str] = []
    for argument in arguments:
        if argument.startswith("-,") and joined and joined[-1].startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; `{self.prog} --help` shows how")


def _parser(name: str, command: ModuleType) -> _Parser:
    parser = _Parser(
        prog=f"bpipe {name}",
        description=command.__doc__,
        epilog=command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add(parser)
    parser.add_argument("--json", action="store_true", help="print data for scripts instead")
    return parser


def _print(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.data, indent=2))
        return
    for part in result.shown():
        if isinstance(part, str):
            print(printable(part))
        else:
            console().print(part)
    sys.stdout.flush()


def _said_as_option(error: BudgetError) -> BudgetError:
    """Let an error speak of the option for the budget: `--slots 3` in place of `slots=3`."""
    each = ["-" if one is None else str(one) for one in error.smallest]
    option = "slots" if "slots=" in str(error) else "budget"
    return error.said_as(f"--{option} {each[0] if len(set(each)) == 1 else ','.join(each)}") if each else error


def _refuse(message: str) -> int:
    print(f"bpipe: {printable(message)}", file=sys.stderr)
    return BAD_INPUT
