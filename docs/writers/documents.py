"""Read the JSON files of benchmarks/, and write their values as the cells of Markdown tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "benchmarks"
"""The folder of the JSON files."""
MODELS = ("qwen2.5-vl-7b", "qwen3-vl-8b", "qwen2-vl-7b")

Row = Mapping[str, Any]
"""A row of a JSON file."""
Document = dict[str, Any]
"""The content of a JSON file."""
Cell = tuple[str, str]
"""A model and an input size."""
Times = dict[Cell, dict[str, Row]]
"""Rows by cell, then by contender."""


def is_measured(file: str) -> bool:
    """Say whether a file is there. A new one is missing until everything.py has measured it."""
    return (MEASURED / file).is_file()


def load(file: str) -> Document:
    """Read one of the JSON files."""
    return dict(json.loads((MEASURED / file).read_text(encoding="utf-8")))


def times(document: Document) -> Times:
    """Return the timed rows of a document by cell and contender."""
    by_cell: Times = {}
    for row in document["rows"]:
        if row["ms"] is not None:
            by_cell.setdefault((row["model"], row["size"]), {})[row["contender"]] = row
    return by_cell


def further_token_ms(by_tokens: Mapping[int, Row], way: str) -> float:
    """Compute the milliseconds of each token after the first: what the longest call takes beyond the one for one token.

    Args:
        by_tokens: the rows of whole calls by number of new tokens, among them one
        way: the key of a row's time
    """
    longest = max(by_tokens)
    return float(by_tokens[longest][way] - by_tokens[1][way]) / (longest - 1)


def commit_of(document: Document, file: str) -> str | None:
    """Return the one commit that a document was measured at; None if it records none.

    Raises:
        ValueError: if parts of the document were measured at different commits
    """
    commits = sorted(set(_commits(document)))
    if len(commits) > 1:
        raise ValueError(f"{file} mixes measurements of {' and '.join(commits)}: measure all of it at one commit")
    return commits[0] if commits else None


def _commits(part: object) -> Iterator[str]:
    """Yield every value of a key `commit` in a document and its parts."""
    if isinstance(part, dict):
        if part.get("commit"):
            yield part["commit"]
        for value in part.values():
            yield from _commits(value)
    elif isinstance(part, list):
        for value in part:
            yield from _commits(value)


def measured_at(document: Document, file: str = "") -> str:
    """Name the commit, hardware and versions of a document in a plain sentence."""
    versions = document["versions"]
    gpus = document.get("gpus") or max((run["ranks"] for run in document.get("runs", [])), default=1)
    device = f"one {document['device']}" if gpus == 1 else f"{gpus} x {document['device']}"
    packages = [f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if versions.get(name)]
    commit = commit_of(document, file) or "no recorded commit"
    return f"Measured at commit {commit} on {device}: {document['dtype']}, {', '.join(packages)}."


def conditions(document: Document, file: str) -> str:
    """Name the commit, hardware, versions, command and file.

    Args:
        document: the content of `file`
        file: the name of the JSON file

    Raises:
        ValueError: if parts of the document were measured at different commits
    """
    command = document["command"]
    path = f"benchmarks/{file}"
    source = f"By `{command}`." if command.endswith(path) else f"`{command}` wrote `{path}`."
    return f"*{measured_at(document, file)} {source}*"


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
