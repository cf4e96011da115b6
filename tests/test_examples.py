"""Every example runs as its first lines say, over processes of this machine, and prints what a reader would look for."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import fork_server

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PARTS = {"attention", "checkpoint", "files", "gpt", "picture", "processes", "progress", "report", "text", "timeline", "turns"}
TIMEOUT_S = 240.0

# Each with its number of processes, and a line of what it prints.
RUNS: dict[str, tuple[int, str]] = {
    "activation_checkpointing": (4, r"selective, rank 0: at most \d+ KiB of activations, [1-9]\d* KiB"),
    "auto": (4, r"The best of the other kinds"),
    "compile": (4, r"rank 0: 1 graph\(s\), 0 breaks, [1-9]\d* KiB"),
    "fill": (4, r"rank 0: \d+ batches embedded in \d+% of the waits, as the model alone does"),
    "fsdp": (4, r"pipeline 1, stage 0: \d+ of \d+ weights here"),
    "huggingface": (4, r"rank 3: \d+ tensors, memory \d+ KiB at most"),
    "local_learning": (4, r"mean of 1 seeds  backpropagation [\d.]+, local learning [\d.]+: [-+][\d.]+ points"),
    "long_context": (4, r"agreement   all four compute the same but for rounding"),
    "mixed_precision": (4, r"step 60/60  loss [\d.]+  norm [\d.]+  next scale \d+"),
    "mixture_of_experts": (4, r"rank 2: its experts get .+ of the tokens"),
    "moe_overlap": (4, r"place 1, pipeline 0: weights the same to the bit; side by side takes [\d.]+ of the time"),
    "own_model": (4, r"rank 0: 3 layers, memory ([\d.]+) MiB at most, \1 predicted; [1-9.]\d*\.\d+ MiB evicted per step"),
    "recurrent_slices": (4, r"agreement   the gradients of slices are those of whole sequences"),
    "resume": (4, r"step 20 over 4 stages  loss [\d.]+"),
    "split_model": (4, r"rank 0: embedding.weight to blocks\.\d+\.[\w.]+, [\d.]+ MiB of activations"),
    "stream": (4, r"tick 600: error 0\.0\d+\n50 later outputs without learning: error 0\.[01]\d+"),
    "tensor_parallel": (8, r"stage 0, tensor rank 1: at most \d+ KiB of activations, [1-9]\d* KiB evicted per step"),
    "unet": (4, r"rank 0 hands on by 0SEND_F0>3, 0SEND_F1>3"),
    "tied_embeddings": (4, r"rank 0: the matrix sums to (-?[\d.]+)(?s:.*)rank 3: the matrix sums to \1"),
}
ARGUMENTS = {
    "compile": ["--backend", "aot_eager"],  # inductor takes a minute for what it compiles
    "local_learning": ["--epochs", "1", "--seeds", "1"],
    "long_context": ["--tokens", "512", "--slices", "4", "--steps", "2"],  # attention to 32,768 tokens takes minutes
}
ELSEWHERE = {"train_gpt", "two_nodes"}  # the main job, and one that takes agents of torchrun: below


def run(name: str, num_ranks: int, folder: Path) -> str:
    """What the processes of an example print, in the order of ranks."""
    context, store = fork_server(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, name, rank, num_ranks, store.port, folder), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        printed = [end.recv() if wait([end], TIMEOUT_S) else (False, "it did not end") for end in ends]
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert all(is_whole for is_whole, _ in printed), "\n".join(f"rank {i}:\n{text}" for i, (_, text) in enumerate(printed))
    return "".join(text for _, text in printed)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(end: Any, name: str, rank: int, size: int, port: int, folder: Path) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in where.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is there, as torchrun's is
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)  # torch was loaded before, and would not look at OMP_NUM_THREADS
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *ARGUMENTS.get(name, [])]
    text, is_whole = io.StringIO(), True
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except BaseException:
        is_whole = False
        text.write(traceback.format_exc())
    end.send((is_whole, text.getvalue()))


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, tmp_path: Path) -> None:
    num_ranks, line = RUNS[name]
    printed = run(name, num_ranks, tmp_path)
    assert re.search(line, printed), printed
    says = re.search(r"torchrun --nproc-per-node (\d+) examples/(\w+)\.py", (EXAMPLES / f"{name}.py").read_text())
    assert says is not None and says.groups() == (str(num_ranks), name)


def test_no_example_is_forgotten() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RUNS, *ELSEWHERE, *PARTS}


def test_two_agents_keep_each_pair_on_one_node() -> None:
    """As two nodes would be started, on the loopback address."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", str(EXAMPLES / "two_nodes.py")),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    try:
        printed = "".join(agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], printed
    found = re.findall(r"node (\d), rank \d: stage (\d) of 4", printed)  # two processes' lines may run into one
    node_of = {int(stage): node for node, stage in found}
    assert len(node_of) == 4 and len({*node_of.values()}) == 2, printed
    assert node_of[0] == node_of[3] and node_of[1] == node_of[2]
    assert re.search(rf"node {node_of[0]}, stage 0: [1-9]\d* KiB evicted per step to stage 3", printed), printed
    assert "cannot share a node" not in printed
