"""Read the JSON files beside this one, and write their values as the cells of Markdown tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODELS = ("qwen2.5-vl-7b", "qwen3-vl-8b", "qwen2-vl-7b")

Row = Mapping[str, Any]
"""A row of a JSON file."""
Document = dict[str, Any]
"""The content of a JSON file."""
Cell = tuple[str, str]
"""A model and an input size."""
Times = dict[Cell, dict[str, Row]]
"""Rows by cell, then by contender."""


def load(file: str) -> Document:
    """Read one of the JSON files."""
    return dict(json.loads((HERE / file).read_text(encoding="utf-8")))


def times(document: Document) -> Times:
    """Return the timed rows of a document by cell and contender."""
    by_cell: Times = {}
    for row in document["rows"]:
        if row["ms"] is not None:
            by_cell.setdefault((row["model"], row["size"]), {})[row["contender"]] = row
    return by_cell


def steps(document: Document) -> dict[str, Document]:
    """Return the timings of `training_step.json` by the way to train."""
    return {way: timing for way, timing in document.items() if isinstance(timing, dict) and "patched" in timing}


def conditions(document: Document, file: str, command: str = "") -> str:
    """Name the hardware, versions, commit and command, as far as the document records them.

    Args:
        document: the content of `file`
        file: the name of the JSON file
        command: the command that writes the file, for documents that do not record it
    """
    versions = document["versions"]
    machine = document.get("machine") or {}
    gpus = document.get("gpus", 1)
    parts = [f"One {document['device']}" if gpus == 1 else f"{gpus} x {document['device']}", document["dtype"]]
    parts += [f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if versions.get(name)]
    if "driver" in machine:
        parts.append(f"driver {machine['driver']}, up to {machine['largest_clock']} MHz")
    parts.append(f"commit {document['commit']}" if document.get("commit") else "commit not recorded")
    parts += [f"`{document.get('command', command)}`", f"`examples/benchmark/{file}`"]
    note = f" {document['transcribed']}" if document.get("transcribed") else ""
    return f"*{'; '.join(parts)}.*{note}"


def title(model: str) -> str:
    """Spell a model's name as its makers do: qwen2.5-vl-7b becomes Qwen2.5-VL-7B."""
    return re.sub(r"\d+b$", lambda size: size[0].upper(), model.replace("qwen", "Qwen").replace("-vl-", "-VL-"))


def digits(number: float) -> str:
    """Write a number with three significant digits, or without decimals from 100 on."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
