"""Run programs in one or two processes, and draw scenes, for the tests of several examples."""

from __future__ import annotations

import io
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest
import scenes
import torch.distributed as dist
import typer
from accelerate.state import AcceleratorState
from click.testing import Result
from PIL import Image
from torch.multiprocessing import start_processes
from tqdm import tqdm
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CAPTIONERS = ROOT / "tests" / "tiny_captioner"
HELD_OUT = 1 << 40
UNIT = 32
RUNNER = CliRunner(env={"ACCELERATE_USE_CPU": "true", "COLUMNS": "1000"})

# Forks share tqdm's lock with their parent, which would wait for ever for one that was killed while it held it.
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))

WAYS = ["forked", pytest.param("accelerate launch", marks=pytest.mark.matrix)]
"""Ways to start two processes. Forked ones start faster, with the environment that `accelerate launch` would set."""


def draw(seed: int, unit: int = UNIT) -> tuple[Image.Image, str]:
    """Draw a scene that no model was trained on.

    Args:
        seed: Number of the scene.
        unit: Pixels along a side of a merged token.

    Returns:
        The picture and its caption.
    """
    scene = scenes.scene(HELD_OUT + seed, video=False)
    chance = random.Random(seed)
    return scenes.draw(scene, unit * chance.randint(4, 7), unit * chance.randint(4, 7))[0], scene.caption


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """Return the bytes of a file that holds an image."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def words(result: Result) -> str:
    """Return the output of a command, without line ends and boxes."""
    return " ".join(result.output.replace("│", " ").split())


def launched(way: str, script: Path, app: typer.Typer, command: Sequence[object], folder: Path) -> str:
    """Run a command in two processes, which must succeed.

    Args:
        way: One of `WAYS`.
        script: The program.
        app: The program's app, for forked processes.
        command: The arguments.
        folder: Where forked processes write their output.

    Returns:
        The output of both processes.
    """
    arguments = [str(argument) for argument in command]
    if way == "forked":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(_process, (app, arguments, port, str(folder)), nprocs=2, start_method="fork")
        return "".join((folder / f"output-{rank}").read_text() for rank in range(2))
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # With `--cpu` accelerate starts only one process. With `--multi_gpu` it starts two, which find no GPU.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    process = [sys.executable, *launch, "--main_process_port=0", str(script), *arguments]
    completed = subprocess.run(process, env=environment, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def start_forked(script: Path, folder: Path, *arguments: str, run_name: str = "__main__") -> str:
    """Run a script in a forked process, which has torch and transformers imported but nothing else of this project.

    Args:
        script: The program.
        folder: Where it runs. It gets a file of the output.
        arguments: Its arguments.
        run_name: Another name only imports the program.

    Returns:
        Its output.
    """
    printed = folder / f"{script.stem}.printed"
    process = get_context("fork").Process(target=_start, args=(script, folder, arguments, run_name, printed))
    process.start()
    process.join()
    assert process.exitcode == 0, printed.read_text()
    return printed.read_text()


def _start(script: Path, folder: Path, arguments: Sequence[str], run_name: str, printed: Path) -> None:
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    folders = tuple(str(ROOT / name) for name in ("benchmarks", "examples", "tests"))
    for name, module in list(sys.modules.items()):  # modules of these folders may have equal names
        if str(getattr(module, "__file__", None)).startswith(folders):
            del sys.modules[name]
    sys.path[:] = [str(script.parent), *(path for path in sys.path if not path.startswith(folders)), str(ROOT)]
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name=run_name)


def _process(rank: int, app: typer.Typer, arguments: list[str], port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(True)  # an earlier test left its state
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    Path(folder, f"output-{rank}").write_text(result.output)
    assert result.exit_code == 0, result.output
    if dist.is_initialized():
        dist.destroy_process_group()
