"""Run programs in one or two processes, and draw scenes, for the tests of several examples."""

from __future__ import annotations

import io
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest
import scenes
import torch
import torch.distributed as dist
import typer
from accelerate.state import AcceleratorState
from click.testing import Result
from PIL import Image
from torch.multiprocessing import start_processes
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HELD_OUT = 1 << 40
UNIT = 32
RUNNER = CliRunner(env={"ACCELERATE_USE_CPU": "true", "COLUMNS": "1000"})
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


def _process(rank: int, app: typer.Typer, arguments: list[str], port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(True)  # an earlier test left its state
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    Path(folder, f"output-{rank}").write_text(result.output)
    assert result.exit_code == 0, result.output
    if dist.is_initialized():
        dist.destroy_process_group()


def run_in_fork(script: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a fork of this process, which has spent seconds on importing libraries already.

    The program imports every module of `examples/` anew, and finds the modules that it would find in a process of
    its own. Only a new process shows that it imports each library that it needs. Where a GPU is present, the program
    runs in a new process, since forks cannot use CUDA.

    Args:
        script: The program.
        arguments: Its arguments.
        cwd: The folder in which it runs.

    Returns:
        The exit code and both outputs.
    """
    command = [str(script), *(str(argument) for argument in arguments)]
    if torch.cuda.is_available():
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = get_context("fork").Process(target=_run_script, args=(command, cwd, outputs))
        with warnings.catch_warnings():
            # Python 3.12 and newer warn of any second thread. Those of pytest-xdist do not matter to the program.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in outputs))


def _run_script(command: list[str], cwd: Path, outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    own_folders = (str(EXAMPLES), str(ROOT / "tests"))
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(own_folders):
            del sys.modules[name]
    libraries = [entry for entry in sys.path if not entry.startswith(own_folders)]
    sys.path[:] = [os.path.dirname(command[0]), str(ROOT), *libraries]
    sys.argv[:] = command
    os.chdir(cwd)
    runpy.run_path(command[0], run_name="__main__")
