"""What the tests of `examples/batch_caption.py` share: its command line, drawn scenes, a model loaded once."""

from __future__ import annotations

import copy
import io
import json
import tarfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import batch_caption
from captioning.journal import Journal, Record
from click.testing import Result
from programs import EXAMPLES, RUNNER, draw

MODEL = EXAMPLES / "tiny_captioner" / "qwen3_vl"
PROMPT = "describe this {kind} ."
WORDS = 4
"""Of a caption: "a large red star", which tells pictures apart; WHOLE lets it go on to its end."""
WHOLE = "--max-new-tokens=24"
LOAD = lru_cache(maxsize=4)(batch_caption.load_model)


def load_once(*arguments: Any) -> Any:
    """In place of `batch_caption.load_model`: reads each checkpoint once."""
    return copy.deepcopy(LOAD(*arguments))


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
