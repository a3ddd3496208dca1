"""Run the captioner, load its models once, draw its pictures and read its records, for the tests of captioning."""

import copy
import io
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from captioner import items
from captioner import main as batch_caption
from captioner.batches import Task
from captioner.checkpoints import config_of
from captioner.exports import Export
from captioner.items import Item
from captioner.journal import Journal, Record
from captioner.processors import load_processor
from click.testing import Result
from PIL import Image
from programs import CAPTIONERS, RUNNER, draw, encode
from transformers import PreTrainedModel

MODEL = CAPTIONERS / "qwen3_vl"
PROMPT = "describe this {kind} ."
PICTURE_PROMPT = "describe this picture ."
FAMILIES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32}  # the side of a merged token, in pixels
WORDS = 4
"""Tokens of a short caption such as "a large red star". WHOLE allows complete captions."""
WHOLE = "--max-new-tokens=24"


# --- checkpoints that are read once -----------------------------------------------------------------------------------


_read_model = lru_cache(maxsize=4)(batch_caption.load_model)


def load_once(*arguments: object) -> PreTrainedModel:
    """Read a model once, as `load_model` does, and return copies that share its weights."""
    model = _read_model(*arguments)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def once(read: Callable[[str, str | None], Any]) -> Callable[..., Any]:
    """Return a function that reads a part of a trained captioner, which no test changes, once, and returns copies."""
    cached = lru_cache(read)

    def read_once(model: str, revision: str | None = None) -> Any:
        is_captioner = Path(model).parent == CAPTIONERS
        return copy.deepcopy(cached(model, revision)) if is_captioner else read(model, revision)

    return read_once


load_processor_once = once(load_processor)
config_once = once(config_of)


# --- files, commands and records --------------------------------------------------------------------------------------


def seed_of(name: str) -> int:
    """Return the number of the scene that `put` draws into a file."""
    return sum(ord(character) for character in name)


def put(folder: Path, *names: str) -> dict[str, str]:
    """Draw a scene into every file, and return the captions by name."""
    captions = {}
    for name in names:
        image, captions[name] = draw(seed_of(name))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)
    return captions


def write_tar(path: Path, *members: tuple[str, bytes], **options: object) -> Path:
    """Write a tar archive, with the options of `tarfile.open`. A name may come twice."""
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_parquet(path: Path, columns: Mapping[str, object], **options: object) -> Path:
    """Write a table, with the options of `pyarrow.parquet.write_table`; skip the test where pyarrow is missing."""
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), path, **options)
    return path


def call(*arguments: object) -> Result:
    """Run `captioner/main.py` with any arguments."""
    return RUNNER.invoke(batch_caption.app, [str(argument) for argument in arguments])


def caption(
    inputs: object, output: Path, *options: object, model: object = MODEL, prompt: str | None = PROMPT
) -> Result:
    """Caption one input, or a list of them."""
    input_list = inputs if isinstance(inputs, list) else [inputs]
    settings = [f"--output={output}", f"--model={model}", f"--max-new-tokens={WORDS}"]
    if prompt is not None:
        settings.append(f"--prompt={prompt}")
    return call("caption", *input_list, *settings, *options)


def texts(folder: Path, pattern: str = "**/*.txt") -> dict[str, str]:
    """Return the contents of all text files in a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.glob(pattern)}


def captions_in(output: Path) -> Mapping[str, str | None]:
    """Return the captions of the merged records, by key."""
    return {record.key: record.caption for record in merged(output) if record.status == "ok"}


def merged(output: Path) -> list[Record]:
    return Journal(output).select().records


def counted(output: Path) -> Counter[Record]:
    return Counter(Journal(output).records())


def record_of(key: str = "a", prompt: str = "p", run: str = "r", **fields: object) -> Record:
    """Return a record of a caption, unless `fields` say otherwise."""
    values = {"status": "ok", "caption": f"caption of {key}"} | fields
    return Record(key=key, prompt=prompt, run=run, **values)


def export(records: list[Record], path: Path, **options: object) -> Export:
    """Export the records of a run that found its pictures in `path`."""
    with tempfile.TemporaryDirectory() as folder:
        exporter = Export(Path(folder), {"root": str(path), "prompts": ["p", "q"]}, **options)
        exporter(records, path)
        return exporter


def named_task(key: str, tokens: int = 1, prompts: Sequence[str] = (PICTURE_PROMPT,), **fields: object) -> Task:
    """Return a task of an item whose file may not exist."""
    return Task(item=Item(key=key, file=key, **fields), prompts=tuple(prompts), tokens=tokens)


# --- one picture that is replaced by another of the same size ---------------------------------------------------------


def _scene_of_160_pixels(seed: int) -> Image.Image:
    return draw(seed)[0].resize((160, 160), Image.Resampling.NEAREST)


FIRST = _scene_of_160_pixels(0)
SECOND = _scene_of_160_pixels(1)
"""Two scenes of the same size in bytes, in a format without compression."""


def as_file(folder: Path, image: Image.Image) -> str:
    """Write a picture, and return the input that names it."""
    (folder / "x.bmp").write_bytes(encode(image, "BMP"))
    return str(folder / "x.bmp")


def as_member(folder: Path, image: Image.Image) -> str:
    """Write a shard of one picture, and return the input that names it."""
    return str(write_tar(folder / "x.tar", ("x.bmp", encode(image, "BMP"))))


def as_row(folder: Path, image: Image.Image) -> str:
    """Write a table of one picture, and return the input that names it."""
    of_one_size = dict(compression="none", use_dictionary=False, write_statistics=False)
    return str(write_parquet(folder / "x.parquet", {"image": [encode(image, "BMP")]}, **of_one_size))


def as_row_that_names_a_file(folder: Path, image: Image.Image) -> str:
    """Write a picture and a table with its path, and return the input that names the table."""
    as_file(folder, image)
    if not (folder / "x.parquet").exists():
        write_parquet(folder / "x.parquet", {"image": ["x.bmp"]})
    return str(folder / "x.parquet")


KINDS = {"file": as_file, "member": as_member, "row": as_row, "row that names a file": as_row_that_names_a_file}


def start_anew() -> None:
    """Forget open tables, as a new process would."""
    items.parquet_file.cache_clear()
    items.row_group.cache_clear()
