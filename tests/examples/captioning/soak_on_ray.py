"""Run `examples/captioner/on_ray.py` on a cluster of three nodes, of which some are killed and others added.

    python tests/examples/captioning/soak_on_ray.py build/soak --pictures 5000 --kills 8

Draws the pictures of `soak_captioning.py`. One undisturbed process captions them, then a cluster on this machine, and
their records are compared. Processes of models and decoders are killed, and nodes, which others replace but for the
last one. Prints figures, and exits with 1 if something is wrong. Needs `ray[data]`.
"""

# ruff: noqa: E402, the helpers below are found by path if this runs as a program

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDERS = ("tests/examples", "examples", "tests/tiny_captioner")
sys.path[:0] = [str(REPOSITORY / folder) for folder in FOLDERS]

import psutil
import typer
from captioner.journal import Journal
from programs import EXAMPLES, ROOT
from soak_captioning import ENVIRONMENT, PROMPTS, lay_out, spellings
from support_captioning import MODEL

BATCH = 16
OPTIONS = [
    f"--model={MODEL}",
    f"--prompt={PROMPTS[0]}",
    "--max-new-tokens=8",
    "--max-failures=1",
    f"--batch-size={BATCH}",
]
STORE = 120 << 20
"""Bytes of a node's object store, which hold a few batches."""
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # Ray would write into the home folder


@dataclass
class Nodes:
    """A cluster on this machine: its head with the driver, and nodes that join and leave."""

    cluster: Any
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.cluster.add_node(num_cpus=2, object_store_memory=STORE)

    def kill(self, what: str, *, last: bool) -> None:
        """Kill a node with all its processes, or a process of a model or of a decoder.

        Args:
            what: "node", "_Actor" (a model) or "_ready" (a decoder).
            last: Add no other node.
        """
        if what == "node":
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)
            if not last:
                self.add()
            self.killed[what] += 1
            return
        for process in self.workers(what):
            process.send_signal(signal.SIGKILL)
            self.killed[what] += 1
            return

    def stored(self) -> dict[str, int]:
        """Return the megabytes that the stores have in memory, and those that they spilled to disk."""
        session = Path(self.cluster.head_node.get_session_dir_path())
        spilled = sum(path.stat().st_size for path in session.glob("ray_spilled_objects*/**/*") if path.is_file())
        stores = [process for process in psutil.Process().children() if process.name() == "raylet"]
        return {"stores": sum(process.memory_info().rss for process in stores) >> 20, "spilled": spilled >> 20}

    def workers(self, what: str) -> Iterator[psutil.Process]:
        """Yield the processes of this cluster that run a function or class of that name."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                name = "".join(process.cmdline())
                if what in name and name.startswith("ray::") and self._is_ours(process):
                    yield process

    def _is_ours(self, process: psutil.Process) -> bool:
        return psutil.Process().pid in (parent.pid for parent in process.parents())


@contextmanager
def cluster() -> Iterator[Nodes]:
    """Start three nodes."""
    from ray.cluster_utils import Cluster

    nodes_of_ray = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False},
    )
    nodes = Nodes(nodes_of_ray)
    try:
        nodes.add()
        nodes.add()
        yield nodes
    finally:
        nodes_of_ray.shutdown()


def alone(inputs: Sequence[str], output: Path) -> None:
    """Caption in one undisturbed process."""
    command = [sys.executable, EXAMPLES / "captioner" / "main.py", "caption", *inputs, f"--output={output}", *OPTIONS]
    subprocess.run([str(argument) for argument in command], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def on_cluster(nodes: Nodes, inputs: Sequence[str], output: Path, log: Path) -> Iterator[psutil.Popen]:
    """Start the pipeline in a process of its own."""
    command = [
        sys.executable,
        EXAMPLES / "captioner" / "on_ray.py",
        *inputs,
        f"--output={output}",
        *OPTIONS,
        "--actors=3",
    ]
    with log.open("ab") as file:
        environment = ENVIRONMENT | {"RAY_ADDRESS": nodes.address}
        process = psutil.Popen([str(argument) for argument in command], env=environment, stdout=file, stderr=file)
        try:
            yield process
        finally:
            with suppress(psutil.Error):
                process.kill()
            process.wait()


def written(output: Path) -> int:
    """Count the batches whose records are written."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob("captions-*.jsonl")) // BATCH


def compare(one: Path, other: Path) -> list[str]:
    """List the records that are lost, doubled or different."""
    expected = {(record.key, record.prompt): record for record in Journal(one).records()}
    records = {(record.key, record.prompt): record for record in Journal(other).records()}
    times = Counter((record.key, record.prompt) for record in Journal(other).records())
    wrong = [f"{number} times: {name}" for name, number in times.items() if number > 1]
    wrong += [f"missing: {name}" for name in expected.keys() - records.keys()]
    wrong += [f"unknown: {name}" for name in records.keys() - expected.keys()]
    both = expected.keys() & records.keys()
    return wrong + [f"{expected[name]} is {records[name]}" for name in both if expected[name] != records[name]]


def run(nodes: Nodes, inputs: Sequence[str], output: Path, kills: Sequence[str], log: Path) -> dict[str, object]:
    """Caption, and kill something after every few batches. Return figures."""
    begun = time.monotonic()
    total = 0
    memory: list[dict[str, int]] = []
    with on_cluster(nodes, inputs, output, log) as process:
        while process.poll() is None:
            time.sleep(0.2)
            announced = re.search(r"(\d+) batches", log.read_text())
            if announced:
                total = int(announced[1])
            due = written(output) * (len(kills) + 1) // total if total else 0  # kills so far
            if total and due * 2 > len(memory):
                memory.append({"driver": process.memory_info().rss >> 20, **nodes.stored()})
            if due > nodes.killed.total() and nodes.killed.total() < len(kills):
                number = nodes.killed.total()
                nodes.kill(kills[number], last=number + 1 == len(kills))
    return {
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "batches": total,
        "killed": dict(nodes.killed),
        "MB": memory,
        "exit": process.returncode,
    }


def soak(folder: Path, pictures: int, kills: int, seed: int) -> dict[str, object]:
    """Run the soak, and return its figures and its problems."""
    chance = random.Random(seed)
    data = lay_out(folder.resolve() / "data", pictures, chance)
    inputs = spellings(data.top)[0]
    alone(inputs, folder / "alone")
    victims = [*chance.choices(["node", "_Actor", "_ready"], k=kills - 1), "node"]
    with cluster() as nodes:
        figures = run(nodes, inputs, folder / "captions", victims, folder / "log.txt")
    wrong = compare(folder / "alone", folder / "captions")
    wrong += [f"{figures['killed']} killed, not {victims}"] * (Counter(victims) != Counter(figures["killed"]))
    wrong += [f"exit {figures['exit']}"] * bool(figures["exit"])
    return {"pictures": pictures, "damaged": len(data.bad), **figures, "problems": wrong[:20]}


def main(
    folder: Annotated[Path, typer.Argument(help="A new folder for all files.")],
    pictures: Annotated[int, typer.Option(min=40)] = 5_000,
    kills: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Run the soak. Exits with 1 if something is wrong."""
    os.environ.update(QUIET, PYTHONPATH=str(ROOT))
    figures = soak(folder, pictures, kills, seed)
    print(json.dumps(figures, indent=1, default=str))
    raise typer.Exit(bool(figures["problems"]))


if __name__ == "__main__":
    typer.run(main)
