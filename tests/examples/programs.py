"""Run programs in one or two processes, draw scenes and read lines, for the tests of several examples."""

import io
import json
import os
import random
import socket
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def draw(seed: int, unit: int = UNIT) -> tuple[Image.Image, str]:
    """Draw a scene that no model was trained on, with sides of 4 to 7 units; return the picture and its caption."""
    scene = scenes.scene(HELD_OUT + seed, video=False)
    chance = random.Random(seed)
    return scenes.draw(scene, unit * chance.randint(4, 7), unit * chance.randint(4, 7))[0], scene.caption


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """Return the bytes of a file that holds an image."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    """Return a PNG file whose header names a size, and that holds no pixels."""
    header = _png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _png_chunk(b"IDAT", b"") + _png_chunk(b"IEND", b"")


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def words(result: Result) -> str:
    """Return the output of a command, without line ends and boxes."""
    return " ".join(result.output.replace("│", " ").split())


def launched(app: typer.Typer, command: Sequence[object], folder: Path) -> str:
    """Run a command in two forked processes, which must succeed; return their output, which they write to the folder.

    They start faster than those of `accelerate launch`, with the environment that it would set.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(argument) for argument in command]
    start_processes(_process, (app, arguments, port, str(folder)), nprocs=2, start_method="fork")
    return "".join((folder / f"output-{rank}").read_text() for rank in range(2))


def _process(rank: int, app: typer.Typer, arguments: list[str], port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(True)  # an earlier test left its state
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    Path(folder, f"output-{rank}").write_text(result.output)
    assert result.exit_code == 0, result.output
    if dist.is_initialized():
        dist.destroy_process_group()
