"""What the tests of `examples/batch_caption.py` share: its command line, drawn scenes, a model loaded once."""

from __future__ import annotations

import copy
import io
import json
import random
import sys
import tarfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "tiny_captioner")]

import batch_caption  # noqa: E402
import scenes  # noqa: E402
from captioning.journal import Journal, Record  # noqa: E402

MODEL = EXAMPLES / "tiny_captioner" / "qwen3_vl"
HELD_OUT, UNIT = 1 << 40, 32
PROMPT = "describe this {kind} ."
WORDS = 4
"""Of a caption: "a large red star", which tells pictures apart; WHOLE lets it go on to its end."""
WHOLE = "--max-new-tokens=24"
RUNNER = CliRunner(env={"ACCELERATE_USE_CPU": "true", "COLUMNS": "1000"})
LOAD = lru_cache(maxsize=4)(batch_caption.load_model)


def load_once(*arguments: Any) -> Any:
    """In place of `batch_caption.load_model`: reads each checkpoint once."""
    return copy.deepcopy(LOAD(*arguments))


def draw(seed: int, unit: int = UNIT) -> tuple[Image.Image, str]:
    """A scene that no model was trained on, and its caption. unit: pixels along a side of a merged token."""
    scene, chance = scenes.scene(HELD_OUT + seed, video=False), random.Random(seed)
    return scenes.draw(scene, unit * chance.randint(4, 7), unit * chance.randint(4, 7))[0], scene.caption


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file that holds an image."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def put(folder: Path, *names: str) -> dict[str, str]:
    """Draws a scene into each file; name to caption."""
    captions = {}
    for name in names:
        seed = sum(map(ord, name))
        image, captions[name] = draw(seed)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)
    return captions


def write_tar(path: Path, *members: tuple[str, bytes], **options: Any) -> Path:
    """A tar archive; a name may come twice. options: `tarfile.open`'s."""
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def words(result: Result) -> str:
    """All that was printed, without line ends and boxes."""
    return " ".join(result.output.replace("│", " ").split())


def call(*arguments: object) -> Result:
    """Any command."""
    return RUNNER.invoke(batch_caption.app, [str(each) for each in arguments])


def caption(
    inputs: object, output: Path, *options: object, model: object = MODEL, prompt: str | None = PROMPT
) -> Result:
    """Captions one input, or a list of them."""
    each = inputs if isinstance(inputs, list) else [inputs]
    more = [] if prompt is None else [f"--prompt={prompt}"]
    return call(
        "caption", *each, f"--output={output}", f"--model={model}", f"--max-new-tokens={WORDS}", *more, *options
    )


def texts(folder: Path, pattern: str = "**/*.txt") -> dict[str, str]:
    """Name to content of all text files in a folder."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.glob(pattern)}


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def captions_in(output: Path) -> Mapping[str, str | None]:
    """Key to caption of the merged records that have one."""
    return {record.key: record.caption for record in merged(output) if record.status == "ok"}


def merged(output: Path) -> list[Record]:
    """The records that `merge` takes."""
    return Journal(output).merged()
