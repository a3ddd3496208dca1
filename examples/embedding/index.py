"""Find the files of embeddings in a folder, and the pages that no file holds yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from media.batches import Task
from media.files import fingerprint, say
from media.items import Item, size
from media.sources import find
from safetensors import safe_open

__all__ = ["Plan", "Settings", "name_of", "paths_of_files", "plan", "shards"]

Settings = dict[str, Any]
"""Everything that changes the embeddings: the model, its revision, the size of pages, the dtype."""


def shards(output: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield every file of embeddings and its metadata, the oldest first. Other files are reported and skipped."""
    for path in sorted(output.glob("pages-*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                yield path, file.metadata()
        except Exception as error:  # safetensors has errors of its own
            say(f"passed over: {path}: {error}")


def name_of(item: Item) -> str:
    """Return the name of an item's tensor: its key, escaped where it is not UTF-8."""
    return item.key.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Plan:
    """The work of a run.

    Args:
        tasks: the pages to embed
        run: the name of the run, made from its settings
        number: the number of the next file
    """

    tasks: list[Task]
    run: str
    number: int


def plan(inputs: list[str], output: Path, settings: Settings, *, column: str | None, split: str) -> Plan:
    """Find the pages that have no embeddings with these settings.

    Args:
        inputs: folders, globs and files
        output: the folder of the embeddings
        settings: everything that changes the embeddings
        column: the column of the pictures in tables; None for the first known name
        split: the split of datasets
    """
    run = fingerprint(settings)
    sizes: dict[str, int] = {}
    number = 0
    for path, metadata in shards(output):
        if metadata["run"] == run:
            sizes |= json.loads(metadata["bytes"])
        number = int(path.stem.split("-")[1]) + 1
    sources = find(inputs, column=column, split=split)
    pages = [item for item in sources.items if item.kind == "image"]
    to_embed = [item for item in pages if name_of(item) not in sizes or sizes[name_of(item)] != size(item)]
    others = len(sources.items) - len(pages) + sum(len(files) for files in sources.passed_over.values())
    say(f"{len(pages)} pages, {len(to_embed)} of them to embed (run {run}); {others} other files are passed over")
    return Plan([Task(item=item, prompts=(), tokens=0) for item in to_embed], run, number)


def paths_of_files(output: Path, number: int, process: int) -> Iterator[Path]:
    """Yield the paths of the files that a process writes."""
    while True:
        yield output / f"pages-{number:08d}-{process:05d}.safetensors"
        number += 1
