"""Find the files of embeddings in a folder, and the pages that no file holds yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from media.batches import Task
from media.files import fingerprint, say
from media.items import Item, checksum, open_item, stamp
from media.places import kept_root
from media.sources import find
from safetensors import safe_open

__all__ = ["Plan", "Run", "Settings", "choose_run", "find_runs", "name_of", "paths_of_files", "plan"]

NAMES = ("model", "revision", "checkpoint", "root")
"""The metadata of a run: the model, its revision, the fingerprint of its files, the folder of the keys."""
FILES = "pages-[0-9]*-[0-9]*.safetensors"
Settings = dict[str, Any]
"""Everything that changes the embeddings: the model, its revision, the size of pages, the dtype."""


@dataclass
class Run:
    """The embeddings that were made with one model and the same settings.

    Args:
        metadata: the metadata of its newest file: what names the model, and the folder that keys are relative to
        files: its files, the oldest first
        pages: the checksum and the stamp of every page when it was embedded last, by the name of its tensor
    """

    metadata: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    pages: dict[str, dict[str, str | None]] = field(default_factory=dict)


def find_runs(output: Path) -> dict[str, Run]:
    """Find the runs in a folder by their names, that which began first first. Other files are reported."""
    runs: dict[str, Run] = {}
    for path in sorted(output.glob(FILES)):
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            pages = json.loads(metadata["pages"])
            run = runs.setdefault(metadata["run"], Run())
            run.metadata = {name: metadata[name] for name in NAMES}
            run.pages |= pages
            run.files.append(path)
        except KeyError:
            say(f"passed over: {path}: not a file of this version of embed_pages.py")
        except Exception as error:  # safetensors has errors of its own
            say(f"passed over: {path}: {error}")
    return runs


def choose_run(runs: Mapping[str, Run], output: Path, name: str | None) -> str:
    """Return the name of the run that queries search.

    Args:
        runs: the runs in the folder
        output: the folder of the embeddings
        name: the name of the run; None for the only one

    Raises:
        ValueError: if there is no run, no run of this name, or no name for one of several
    """
    if not runs:
        raise ValueError(f"{output} holds no embedded pages. Name pages to embed, and --model.")
    if name in runs:
        return name
    if name is None and len(runs) == 1:
        return next(iter(runs))
    choices = ", ".join(f"{run} ({len(runs[run].pages)} pages, {runs[run].metadata['model']})" for run in runs)
    if name is not None:
        raise ValueError(f"{output} holds no run {name}, but {choices}")
    raise ValueError(f"{output} holds several runs: {choices}. Name one with --run, or repeat its pages and options.")


def name_of(item: Item) -> str:
    """Return the name of an item's tensor: its key, escaped where it is not UTF-8."""
    return item.key.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Plan:
    """The work of a run.

    Args:
        tasks: the pages to embed
        metadata: the metadata of every file that the run writes
        number: the number of the next file
    """

    tasks: list[Task]
    metadata: dict[str, str]
    number: int


def plan(
    inputs: list[str],
    output: Path,
    settings: Settings,
    identity: dict[str, str],
    *,
    column: str | None,
    split: str,
) -> Plan:
    """Find the pages that have no embeddings with these settings.

    Args:
        inputs: folders, globs and files
        output: the folder of the embeddings
        settings: everything that changes the embeddings
        identity: the metadata that name the model
        column: the column of the pictures in tables; None for the first known name
        split: the split of datasets
    """
    run = fingerprint(settings)
    former = find_runs(output).get(run, Run())
    root = kept_root(former.metadata.get("root"))
    numbers = [int(path.stem.split("-")[1]) for path in output.glob(FILES)]
    sources = find(inputs, column=column, split=split, root=root)
    pages = [item for item in sources.items if item.kind == "image"]
    to_embed = [item for item in pages if not _is_same(item, former.pages.get(name_of(item)))]
    others = len(sources.items) - len(pages) + sum(len(files) for files in sources.passed_over.values())
    say(f"{len(pages)} pages, {len(to_embed)} of them to embed (run {run}); {others} other files are passed over")
    tasks = [Task(item=item, prompts=(), tokens=0) for item in to_embed]
    return Plan(tasks, identity | {"run": run, "root": sources.root or ""}, max(numbers, default=-1) + 1)


def _is_same(item: Item, embedded: dict[str, str | None] | None) -> bool:
    """Tell whether a page has the bytes that were embedded. They are read only if the stamp is another."""
    if embedded is None:
        return False
    if embedded["stamp"] is not None and embedded["stamp"] == stamp(item):
        return True
    try:
        with open_item(item) as file:
            return checksum(file) == embedded["checksum"]
    except (OSError, ValueError):  # to be reported when it is read to be embedded
        return False


def paths_of_files(output: Path, number: int, process: int) -> Iterator[Path]:
    """Yield the paths of the files that a process writes."""
    while True:
        yield output / f"pages-{number:08d}-{process:05d}.safetensors"
        number += 1
