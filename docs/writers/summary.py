"""Write the summary at the top of docs/benchmarks.md: one line a comparison, each from one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from documents import MODELS, Document, Row, commit_of, conditions, digits, grid, is_measured, load, times, title


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


VLLM = "beside_vllm.json"
"""Rows have a model, its number of new tokens and `pictures_per_second`, with the keys `ours` and `vllm`."""


def beside_vllm() -> str:
    """Write the table of docs/benchmarks.md, or a line while vLLM was not timed.

    Raises:
        ValueError: if the file mixes measurements of two commits
    """
    if not is_measured(VLLM):
        return "vLLM was not timed.\n"
    document = load(VLLM)
    rows = []
    for row in document["rows"]:
        rate = row["pictures_per_second"]
        rows.append(
            [title(row["model"]), str(row["tokens"]), digits(rate["vllm"]), f"{digits(rate['ours'])} ({_times(rate)})"]
        )
    cells = grid(["pictures per second", "new tokens", "vLLM", "`patch` and `graphed_decoding`"], rows)
    return f"{cells}\n{conditions(document, VLLM)}\n"


def _times(rate: Row) -> str:
    """Write how many times as fast as vLLM ours is, with two digits below one."""
    ratio = rate["ours"] / rate["vllm"]
    return f"{ratio:.2f}x"


def beside_the_headline() -> str:
    """Write README's second table: captioning, beside vLLM where that was timed, and training.

    Raises:
        ValueError: if a file mixes measurements of two commits
    """
    both = "`patch`, `graphed_decoding`"
    captions = load("captioning.json")
    tokens = max(row["tokens"] for row in captions["rows"])
    cells = [
        f"{digits(row['stock'])} → {digits(row['patched'])} ({row['patched'] / row['stock']:.1f}x)"
        for row in captions["rows"]
        if row["tokens"] == tokens
    ]
    label = f"captions of JPEG files, {tokens} tokens, pictures per second"
    rows = [[label, both, *cells, _source(captions, "captioning.json")]]
    if is_measured(VLLM):
        document = load(VLLM)
        tokens = max(row["tokens"] for row in document["rows"])
        rates = {row["model"]: row["pictures_per_second"] for row in document["rows"] if row["tokens"] == tokens}
        of_models = [rates.get(model) for model in dict.fromkeys(row["model"] for row in captions["rows"])]
        cells = [
            f"{digits(rate['vllm'])} → {digits(rate['ours'])} ({_times(rate)})" if rate else "" for rate in of_models
        ]
        vllm = f"vLLM {document['versions'].get('vllm', '')}".rstrip()
        label = f"{vllm} → this library, {tokens} tokens, pictures per second"
        rows.append([label, both, *cells, _source(document, VLLM)])
    steps = load("training_step.json")
    by_way: dict[str, list[str]] = {}
    for row in steps["rows"]:
        stock = row["stock"]["step"]
        ours = row["patched"]["step"]
        by_way.setdefault(row["way"], []).append(f"{stock:.2f} → {ours:.2f} s ({stock / ours:.1f}x)")
    for way, cells in by_way.items():
        label = f"`Trainer` step, 16 pictures (~480x480), {way}"
        rows.append([label, "`patch`", *cells, _source(steps, "training_step.json")])
    names = list(dict.fromkeys(title(row["model"]) for row in captions["rows"]))
    return grid(["job", "you add", *names, "file, commit"], rows)


def _source(document: Document, file: str) -> str:
    return f"`{file}`, {commit_of(document, file)}"


def promise() -> str:
    """Write the largest speed-up of answers, of a batch that is embedded, and of training steps."""
    calls = load("whole_call.json")["rows"]
    answers = [row["stock"] / row["decoding"] for row in calls if row["tokens"] > 1]
    answers += [row["patched"] / row["stock"] for row in load("captioning.json")["rows"] if row["tokens"] > 1]
    embedding = [row["stock"] / row["patched"] for row in calls if row["tokens"] == 1 and row["size"].startswith("32")]
    steps = [row["stock"]["step"] / row["patched"]["step"] for row in load("training_step.json")["rows"]]
    return (
        f"**Answers and captions up to {max(answers):.1f}x as fast as transformers' default, embedding up to "
        f"{max(embedding):.1f}x, training steps up to {max(steps):.1f}x.**\n"
    )


def text() -> str:
    """Write all lines.

    Raises:
        KeyError: if a file lacks a contender for a size
        ValueError: if a file mixes measurements of two commits
    """
    return "".join([*_captioning(), *_trainer_steps(), *(line.text() for line in LINES if is_measured(line.file))])
