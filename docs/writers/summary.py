"""Write the summary at the top of docs/benchmarks.md: one line a comparison, each from one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from documents import MODELS, Document, commit_of, digits, load, times, title


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison of towers, as a range over the sizes of a file.

    Args:
        label: what is timed, and what it is compared with
        file: the name of the JSON file
        ours: our contender
        stock: the stock contenders; the fastest counts
    """

    label: str
    file: str
    ours: str
    stock: Sequence[str]

    def text(self) -> str:
        """Write the line.

        Raises:
            KeyError: if `ours` or a stock contender was not timed for a size
            ValueError: if the file mixes measurements of two commits
        """
        document = load(self.file)
        ranges = [f"{title(model)} {range_}" for model, range_ in gains(document, self.ours, self.stock).items()]
        return _line(self.label, ranges, document, self.file)


TRAINED = ("sdpa", "flash_attention_2", "compile_blocks")
"""The stock contenders that patched training is compared with."""
FASTEST = "the fastest of stock sdpa, FlashAttention-2 and compiled blocks"
LINES = (
    Line(
        label="Vision tower, compared with the fastest of sdpa, FlashAttention-2 and -3, six input sizes",
        file="towers.json",
        ours="auto",
        stock=("sdpa", "flash_attention_2", "flash_attention_3"),
    ),
    Line(label="Tower, with `.[cuda]`, against stock sdpa", file="cuda_extra.json", ours="auto", stock=("sdpa",)),
    Line(label="Tower, plain install, against stock sdpa", file="plain.json", ours="auto", stock=("sdpa",)),
    Line(
        label="One small picture, against stock compiled and in a CUDA graph",
        file="small.json",
        ours="auto",
        stock=("compile+graph",),
    ),
    Line(label=f"Training a tower, against {FASTEST}", file="training.json", ours="auto", stock=TRAINED),
)


def gains(document: Document, ours: str, stock: Sequence[str]) -> dict[str, str]:
    """Return the speed-up of every model over the fastest stock contender, as a range over the sizes.

    Raises:
        KeyError: if `ours` or a stock contender was not timed for a size
    """
    by_cell = times(document)
    by_model: dict[str, str] = {}
    for model in MODELS:
        ratios = []
        for (model_of_cell, _), by_contender in by_cell.items():
            if model_of_cell == model:
                fastest = min(by_contender[f"stock {name}"]["ms"] for name in stock)
                ratios.append(fastest / by_contender[ours]["ms"])
        if ratios:
            low = f"{min(ratios):.1f}"
            high = f"{max(ratios):.1f}"
            by_model[model] = f"{low}x" if low == high else f"{low} to {high}x"
    return by_model


def _trainer_steps() -> list[str]:
    """Write a line for each way to train in a step of `Trainer`."""
    file = "training_step.json"
    document = load(file)
    by_way: dict[str, list[str]] = {}
    for row in document["rows"]:
        stock = row["stock"]["step"]
        ours = row["patched"]["step"]
        text = f"{title(row['model'])} {stock:.2f} → {ours:.2f} s ({stock / ours:.1f}x)"
        by_way.setdefault(row["way"], []).append(text)
    label = "`Trainer` step, 16 pictures (~480x480)"
    return [_line(f"{label}, {way}", texts, document, file) for way, texts in by_way.items()]


def _captioning(ours: str = "`patch` and `graphed_decoding`") -> list[str]:
    """Write a line for each number of new tokens in batch captioning; `ours` names what speeds it up."""
    file = "captioning.json"
    document = load(file)
    by_tokens: dict[int, list[str]] = {}
    for row in document["rows"]:
        rates = f"{digits(row['stock'])} → {digits(row['patched'])} ({row['patched'] / row['stock']:.1f}x)"
        by_tokens.setdefault(row["tokens"], []).append(f"{title(row['model'])} {rates}")
    lines = []
    files = "Captioning JPEG files from disk in batches, up to 1700x2200,"
    for number, texts in by_tokens.items():
        tokens = f"{number} token{'s' * (number > 1)}"
        lines.append(_line(f"{files} with {ours}, {tokens}, pictures per second", texts, document, file))
    return lines


def _line(label: str, ranges: Sequence[str], document: Document, file: str) -> str:
    commit = commit_of(document, file)
    return f"- {label}: **{', '.join(ranges)}** (`{file}`, {commit}).\n"


def beside_the_headline() -> str:
    """Write the lines of README below its table: captioning and training.

    Raises:
        ValueError: if a file mixes measurements of two commits
    """
    return "".join([*_captioning()[1:2], *_trainer_steps()])


def text() -> str:
    """Write all lines.

    Raises:
        KeyError: if a file lacks a contender for a size
        ValueError: if a file mixes measurements of two commits
    """
    return "".join([*_captioning(), *_trainer_steps(), *(line.text() for line in LINES)])
