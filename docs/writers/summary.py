"""Write the summary at the top of docs/benchmarks.md: one line a comparison, each from one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from documents import (
    MODELS,
    Document,
    Row,
    commit_of,
    conditions,
    digits,
    grid,
    is_measured,
    load,
    measured_at,
    times,
    title,
)
from headline import PICTURES


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


BATCH = "32 x 34x46"
"""The batch of README's rows about embedding."""
CAPTIONING = "captioning"
CAPTION_TOKENS = 32
"""The job of captions in `VLLM`, and the new tokens of README's row."""
VLLM = "beside_vllm.json"
"""A row has a model, a job, its new tokens, a side ("vllm" or "ours") and "ms"; captions have "pictures/s", too."""
Sides = dict[str, Row]
"""The rows of a job by side."""


def _beside_vllm(document: Document) -> dict[tuple[str, str, int], Sides]:
    """Return the jobs that both sides ran, by model, name and number of new tokens."""
    jobs: dict[tuple[str, str, int], Sides] = {}
    for row in document["rows"]:
        jobs.setdefault((row["model"], row["job"], row["tokens"]), {})[row["side"]] = row
    return {key: sides for key, sides in jobs.items() if len(sides) == 2}


def _both_sides(sides: Sides) -> tuple[str, str, str]:
    """Write vLLM's time or rate, ours, and how many times as fast as vLLM ours is."""
    vllm = sides["vllm"]
    ours = sides["ours"]
    if "pictures/s" in ours:
        rates = (vllm["pictures/s"], ours["pictures/s"])
        return digits(rates[0]), digits(rates[1]), f"{rates[1] / rates[0]:.2f}x"
    return f"{digits(vllm['ms'])} ms", f"{digits(ours['ms'])} ms", f"{vllm['ms'] / ours['ms']:.2f}x"


def _name_of_vllm(document: Document) -> str:
    return f"vLLM {document['versions'].get('vllm', '')}".rstrip()


def beside_vllm() -> str:
    """Write the table of docs/benchmarks.md, or a line while vLLM was not timed.

    Raises:
        ValueError: if the file mixes measurements of two commits
    """
    if not is_measured(VLLM):
        return "vLLM was not timed.\n"
    document = {"command": "python benchmarks/beside_vllm.py build/beside_vllm"} | load(VLLM)
    rows = []
    for (model, job, tokens), sides in _beside_vllm(document).items():
        vllm, ours, ratio = _both_sides(sides)
        is_rate = "pictures/s" in sides["ours"]
        name = f"{job.replace(CAPTIONING, 'captions')}, pictures a second" if is_rate else f"one call, {job}"
        rows.append([title(model), name, str(tokens), vllm, f"{ours} ({ratio})"])
    head = ["", "job", "new tokens", _name_of_vllm(document), "`patch`, `graphed_decoding`"]
    return f"{grid(head, rows)}\n{conditions(document, VLLM)}\n"


def captions_beside_vllm() -> str:
    """Write the table of docs/captioning.md: captions a second beside vLLM, and the hours of a million pictures.

    Raises:
        ValueError: if the file mixes measurements of two commits
    """
    if not is_measured(VLLM):
        return "vLLM was not timed.\n"
    document = load(VLLM)
    rows = []
    for (model, job, tokens), sides in _beside_vllm(document).items():
        if job == CAPTIONING:
            vllm, ours, ratio = _both_sides(sides)
            hours = 1e6 / 3600 / sides["ours"]["pictures/s"]
            rows.append([title(model), str(tokens), vllm, f"{ours} ({ratio})", f"{hours:.1f} h"])
    head = ["pictures a second", "new tokens", _name_of_vllm(document), "the captioner", "a million pictures, one GPU"]
    return f"{grid(head, rows)}\n*{measured_at(document, VLLM)}*\n"


def beside_the_headline() -> str:
    """Write README's second table: captioning beside vLLM, embedding and training.

    Raises:
        ValueError: if a file mixes measurements of two commits
    """
    captions = load(VLLM)
    jobs = _beside_vllm(captions)
    models = [model for model in MODELS if (model, CAPTIONING, CAPTION_TOKENS) in jobs]
    sides = [jobs[model, CAPTIONING, CAPTION_TOKENS] for model in models]
    cells = ["vLLM {} → {} ({})".format(*_both_sides(of_model)) for of_model in sides]
    pictures = round(sides[0]["ours"]["pictures/s"] * sides[0]["ours"]["ms"] / 1e3)
    label = f"captions a second, {pictures} JPEG files, {CAPTION_TOKENS} tokens, beside {_name_of_vllm(captions)}"
    rows = [[label, "[the captioner](docs/captioning.md)", *cells, str(commit_of(captions, VLLM))]]
    embedding = load("embedding.json")
    cells = [_embedded(by_contender) for (_, size), by_contender in times(embedding).items() if size == BATCH]
    label = f"embedding, {PICTURES[BATCH]}"
    rows.append([label, "`patch(model, text=True)`", *cells, str(commit_of(embedding, "embedding.json"))])
    steps = load("training_step.json")
    by_way: dict[str, list[str]] = {}
    for row in steps["rows"]:
        stock = row["stock"]["step"]
        ours = row["patched"]["step"]
        by_way.setdefault(row["way"], []).append(f"{stock:.2f} → {ours:.2f} s ({stock / ours:.1f}x)")
    for way, cells in by_way.items():
        label = f"`Trainer` step, 16 pictures (~480x480), {way}"
        rows.append([label, "`patch`", *cells, str(commit_of(steps, "training_step.json"))])
    return grid(["job", "you add", *(title(model) for model in models), "commit"], rows)


def _embedded(by_contender: Mapping[str, Row]) -> str:
    stock = by_contender["stock"]["ms"]
    ours = by_contender["text=True"]["ms"]
    return f"{digits(stock)} → {digits(ours)} ms ({stock / ours:.1f}x)"


def promise() -> str:
    """Write the largest speed-up of answers, that of a batch that is embedded, and those of training steps."""
    embedding = {model: row for (model, size), row in times(load("embedding.json")).items() if size == BATCH}
    steps = load("training_step.json")["rows"]
    gains = []
    for model in MODELS[:2]:
        whole_calls = [row for row in load("whole_call.json")["rows"] if row["model"] == model and row["tokens"] > 1]
        answer = max(row["stock"] / row["decoding"] for row in whole_calls)
        embedded = embedding[model]["stock"]["ms"] / embedding[model]["text=True"]["ms"]
        trained = [
            row["stock"]["step"] / row["patched"]["step"] for row in steps if row["model"] == model
        ]  # LoRA, tower
        gains.append((answer, embedded, *trained))
    first, second = ([f"{ratio:.1f}x" for ratio in of_model] for of_model in gains)
    return (
        f"**Answers {first[0]} as fast as transformers' default, embedding {first[1]}, LoRA steps {first[2]}, "
        f"training the tower {first[3]} ({title(MODELS[0])} on one H200)**. {title(MODELS[1])}: answers {second[0]}, "
        f"embedding {second[1]}, LoRA {second[2]}, tower {second[3]}.\n"
    )


def text() -> str:
    """Write all lines.

    Raises:
        KeyError: if a file lacks a contender for a size
        ValueError: if a file mixes measurements of two commits
    """
    return "".join([*_captioning(), *_trainer_steps(), *(line.text() for line in LINES if is_measured(line.file))])
