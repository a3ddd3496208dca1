"""A run of `examples/caption_on_ray.py` on a cluster of three nodes, of which some are killed and others added.

    python tests/examples/captioning/soak_on_ray.py build/soak --pictures 5000 --kills 8

Draws the pictures of `soak_captioning.py`, has one undisturbed process caption them, then a cluster on this machine,
and compares the records. Kills processes of models and of decoders, and nodes, for which others come but for the last.
Prints figures and exits with 1 if something is wrong. Needs `ray[data]`.
"""

# ruff: noqa: E402, as a program it finds its helpers by itself

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
FOLDERS = ("tests/examples", "examples", "examples/tiny_captioner")
sys.path[:0] = [str(REPOSITORY / folder) for folder in FOLDERS]

import psutil
import typer
from captioning.journal import Journal
from programs import EXAMPLES, ROOT
from soak_captioning import ENVIRONMENT, PROMPTS, lay_out, spellings
from support_captioning import MODEL

OPTIONS = [f"--model={MODEL}", f"--prompt={PROMPTS[0]}", "--max-new-tokens=8", "--max-failures=1", "--batch-size=16"]
STORE = 120 << 20
"""Bytes of a node's object store: a few batches, not the whole run."""
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # else Ray writes into the home folder


@dataclass
class Nodes:
    """A cluster on this machine: its head, where the driver is, and nodes that come and go."""

    cluster: Any
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.cluster.add_node(num_cpus=2, object_store_memory=STORE)

    def kill(self, what: str, *, last: bool) -> None:
        """A node at once with all that is on it; or a process of a model ("_Actor") or a decoder ("_ready").

        last: no other node comes.
        """
        if what == "node":
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)
            if not last:
                self.add()
        elif found := list(self.workers(what)):
            found[0].send_signal(signal.SIGKILL)
        else:
            return
        self.killed[what] += 1

    def stored(self) -> dict[str, int]:
        """Megabytes in the memory of the stores' processes, and of what they put on the disk."""
        session = Path(self.cluster.head_node.get_session_dir_path())
        spilled = sum(path.stat().st_size for path in session.glob("ray_spilled_objects*/**/*") if path.is_file())
        stores = [each for each in psutil.Process().children() if each.name() == "raylet"]
        return {"stores": sum(each.memory_info().rss for each in stores) >> 20, "spilled": spilled >> 20}

    def workers(self, what: str) -> Iterator[psutil.Process]:
        """Processes of this cluster that are at it."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if what in (name := "".join(process.cmdline())) and name.startswith("ray::") and self._ours(process):
                    yield process

    def _ours(self, process: psutil.Process) -> bool:
        return psutil.Process().pid in (parent.pid for parent in process.parents())


@contextmanager
def cluster() -> Iterator[Nodes]:
    """Three nodes."""
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False},
    )
    nodes = Nodes(found)
    try:
        nodes.add()
        nodes.add()
        yield nodes
    finally:
        found.shutdown()


def alone(inputs: Sequence[str], output: Path) -> None:
    """One undisturbed process."""
    command = [sys.executable, EXAMPLES / "batch_caption.py", "caption", *inputs, f"--output={output}", *OPTIONS]
    subprocess.run([str(each) for each in command], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def on_cluster(nodes: Nodes, inputs: Sequence[str], output: Path, log: Path) -> Iterator[psutil.Popen]:
    """The pipeline, in a process of its own."""
    command = [sys.executable, EXAMPLES / "caption_on_ray.py", *inputs, f"--output={output}", *OPTIONS, "--actors=3"]
    with log.open("ab") as file:
        environment = ENVIRONMENT | {"RAY_ADDRESS": nodes.address}
        process = psutil.Popen([str(each) for each in command], env=environment, stdout=file, stderr=file)
        try:
            yield process
        finally:
            with suppress(psutil.Error):
                process.kill()
            process.wait()


def written(output: Path) -> int:
    """Batches whose records are there."""
    return sum(1 for _ in output.glob("captions-ray-*/*.parquet"))


def compare(one: Path, other: Path) -> list[str]:
    """What is lost, doubled or another."""
    expected, found = ({(each.key, each.prompt): each for each in Journal(path).records()} for path in (one, other))
    times = Counter((each.key, each.prompt) for each in Journal(other).records())
    wrong = [f"{number} times: {name}" for name, number in times.items() if number > 1]
    wrong += [f"missing: {name}" for name in expected.keys() - found.keys()]
    wrong += [f"unknown: {name}" for name in found.keys() - expected.keys()]
    both = expected.keys() & found.keys()
    return wrong + [f"{expected[name]} is {found[name]}" for name in both if expected[name] != found[name]]


def run(nodes: Nodes, inputs: Sequence[str], output: Path, kills: Sequence[str], log: Path) -> dict[str, Any]:
    """Captions while it is disturbed, once every so many batches; figures."""
    begun, total = time.monotonic(), 0
    memory: list[dict[str, int]] = []
    with on_cluster(nodes, inputs, output, log) as process:
        while process.poll() is None:
            time.sleep(0.2)
            if not total and (said := re.search(r"(\d+) batches", log.read_text())):
                total = int(said[1])
            due = written(output) * (len(kills) + 1) // (total or 1 << 40)  # kills that are to be behind us
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


def soak(folder: Path, pictures: int, kills: int, seed: int) -> dict[str, Any]:
    """All of it; the figures, and under "problems" what is wrong."""
    chance = random.Random(seed)
    data = lay_out(folder.resolve() / "data", pictures, chance)
    inputs = spellings(data.top)[0]
    alone(inputs, folder / "alone")
    whats = [*chance.choices(["node", "_Actor", "_ready"], k=kills - 1), "node"]
    with cluster() as nodes:
        figures = run(nodes, inputs, folder / "captions", whats, folder / "log.txt")
    wrong = compare(folder / "alone", folder / "captions")
    wrong += [f"{figures['killed']} killed, not {whats}"] * (Counter(whats) != Counter(figures["killed"]))
    wrong += [f"exit {figures['exit']}"] * bool(figures["exit"])
    return {"pictures": pictures, "damaged": len(data.bad), **figures, "problems": wrong[:20]}


def main(
    folder: Annotated[Path, typer.Argument(help="A new folder for all files.")],
    pictures: Annotated[int, typer.Option(min=40)] = 5_000,
    kills: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Run it; exit with 1 if something is wrong."""
    os.environ.update(QUIET, PYTHONPATH=str(ROOT))
    figures = soak(folder, pictures, kills, seed)
    print(json.dumps(figures, indent=1, default=str))
    raise typer.Exit(bool(figures["problems"]))


if __name__ == "__main__":
    typer.run(main)
