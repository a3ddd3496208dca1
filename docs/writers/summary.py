"""Write the first table of docs/benchmarks.md: how much towers gain, each row from one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from documents import MODELS, commit_of, grid, is_measured, load, times, title


@dataclass(frozen=True)
class Comparison:
    """One row: the default beside the fastest of some stock contenders.

    Args:
        label: what is timed
        baseline: what it is compared with, in words
        file: the name of the JSON file
        stock: the stock contenders
    """

    label: str
    baseline: str
    file: str
    stock: Sequence[str]

    def cells(self) -> list[str]:
        """Write the row: the speed-up of every model, as a range over the sizes.

        Raises:
            KeyError: if a contender was not timed for a size
            ValueError: if the file mixes measurements of two commits
        """
        document = load(self.file)
        speedups: dict[str, list[float]] = {model: [] for model in MODELS}
        for (model, _), by_contender in times(document).items():
            fastest = min(by_contender[f"stock {name}"]["ms"] for name in self.stock)
            speedups[model].append(fastest / by_contender["auto"]["ms"])
        ranges = [range_of(of_model) for of_model in speedups.values()]
        return [self.label, self.baseline, *ranges, f"`{self.file}`, {commit_of(document, self.file)}"]


COMPARISONS = (
    Comparison(
        label="forward, six input sizes",
        baseline="the fastest of sdpa, FlashAttention-2 and -3",
        file="towers.json",
        stock=("sdpa", "flash_attention_2", "flash_attention_3"),
    ),
    Comparison("forward, with `.[cuda]`", "sdpa", "cuda_extra.json", ("sdpa",)),
    Comparison("forward, plain install", "sdpa", "plain.json", ("sdpa",)),
    Comparison("forward of one small picture", "compiled, in a CUDA graph", "small.json", ("compile+graph",)),
    Comparison(
        label="forward and backward",
        baseline="the fastest of sdpa, FlashAttention-2 and compiled blocks",
        file="training.json",
        stock=("sdpa", "flash_attention_2", "compile_blocks"),
    ),
)


def range_of(speedups: Sequence[float]) -> str:
    """Write the least and the largest speed-up; nothing where none was measured."""
    if not speedups:
        return ""
    low = f"{min(speedups):.1f}"
    high = f"{max(speedups):.1f}"
    return f"{low}x" if low == high else f"{low} to {high}x"


def summary() -> str:
    """Write the table.

    Raises:
        KeyError: if a file lacks a contender for a size
        ValueError: if a file mixes measurements of two commits
    """
    head = ["the tower alone", "compared with", *map(title, MODELS), "file, commit"]
    return grid(head, [comparison.cells() for comparison in COMPARISONS if is_measured(comparison.file)])
