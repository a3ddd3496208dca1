"""What the tests of several examples share: runs of a program in one or two processes, drawn scenes."""

from __future__ import annotations

import io
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import scenes
import torch.distributed as dist
from accelerate.state import AcceleratorState
from click.testing import Result
from PIL import Image
from torch.multiprocessing import start_processes
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HELD_OUT, UNIT = 1 << 40, 32
RUNNER = CliRunner(env={"ACCELERATE_USE_CPU": "true", "COLUMNS": "1000"})
WAYS = ["forked", pytest.param("accelerate launch", marks=pytest.mark.matrix)]
"""For a test of two processes: what `accelerate launch` tells them, the forked are told, too."""


def draw(seed: int, unit: int = UNIT) -> tuple[Image.Image, str]:
    """A scene that no model was trained on, and its caption. unit: pixels along a side of a merged token."""
    scene, chance = scenes.scene(HELD_OUT + seed, video=False), random.Random(seed)
    return scenes.draw(scene, unit * chance.randint(4, 7), unit * chance.randint(4, 7))[0], scene.caption


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file that holds an image."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def words(result: Result) -> str:
    """All that was printed, without line ends and boxes."""
    return " ".join(result.output.replace("│", " ").split())


def launched(way: str, script: Path, app: Any, command: Sequence[object], folder: Path) -> str:
    """What two processes of a command print that must succeed. folder: for what they say."""
    arguments = [str(each) for each in command]
    if way == "forked":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(_process, (app, arguments, port, str(folder)), nprocs=2, start_method="fork")
        return "".join((folder / f"said-{rank}").read_text() for rank in range(2))
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # `--cpu` would start one process, whatever their number, unless by mpirun; so do not believe in `--multi_gpu`.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    process = [sys.executable, *launch, "--main_process_port=0", str(script), *arguments]
    done = subprocess.run(process, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _process(rank: int, app: Any, arguments: list[str], port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(True)  # that of an earlier test
    done = RUNNER.invoke(app, arguments, catch_exceptions=False)
    Path(folder, f"said-{rank}").write_text(done.output)
    assert done.exit_code == 0, done.output
    if dist.is_initialized():
        dist.destroy_process_group()
