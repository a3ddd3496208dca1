"""Write README's tables: how much each job gains."""

from __future__ import annotations

from dataclasses import dataclass

import vllm
from documents import MODELS, Document, Row, commit_of, digits, grid, load, measured_at, times, title

FILE = "whole_call.json"
EMBEDDING = "embedding.json"
STEPS = "training_step.json"
CAPTION_TOKENS = 128
SHOWN = MODELS[:2]
"""The models that README shows."""
FLASH = "flash_attention_3"
"""The key of stock's time with FlashAttention-3 in the tower."""
WITH = {"patched": "`patch`", "decoding": "`patch` and `graphed_decoding`"}
"""What a row's own time was measured with, by the key of the file."""
YOU_ADD = {"patched": "`patch`", "decoding": "`patch`, `graphed_decoding`"}
"""The same in README's table."""
BATCH = "32 x 34x46"
PICTURES = {"one 1024²": "one picture (~950x950)", BATCH: "batch of 32 (~500x700)"}
"""A size in pixels: between that of Qwen2.5-VL, whose patches have 14 a side, and that of Qwen3-VL, which has 16."""


@dataclass(frozen=True)
class Case:
    """One thing that is timed for every model.

    Args:
        name: what is timed
        size: the pictures, by their name in the file
        tokens: the number of new tokens; 0 for the tower alone
        way: the key of our time: "patched" or "decoding"
    """

    name: str
    size: str
    tokens: int
    way: str

    @property
    def label(self) -> str:
        """Say what is timed, with the pictures."""
        return f"{self.name}, {PICTURES[self.size]}"


TOWER = Case("vision tower", "one 1024²", 0, "patched")
ANSWER = Case("answer of 64 tokens", "one 1024²", 64, "decoding")
FIRST_TOKEN = Case("first token", BATCH, 1, "patched")
ANSWERS = Case("answer of 64 tokens", BATCH, 64, "decoding")
CASES = (TOWER, ANSWER, FIRST_TOKEN, ANSWERS)
"""The rows of README's first table. With one picture the host limits the first token, so a batch stands for it."""


def row_of(document: Document, model: str, case: Case) -> Row:
    """Return the row of a case.

    Raises:
        KeyError: if the case was not timed for the model
    """
    for row in document["rows"]:
        if (row["model"], row["size"], row["tokens"]) == (model, case.size, case.tokens):
            return dict(row)
    raise KeyError(f"{FILE} has no row of {model}, {case.label}")


def speedup(document: Document, model: str, case: Case) -> float:
    """Return how many times as fast as stock ours is."""
    row = row_of(document, model, case)
    return float(row["stock"] / row[case.way])


def both_times(row: Row, case: Case) -> str:
    """Write both times and the speed-up, as the table and the chart show them."""
    stock = row["stock"]
    ours = row[case.way]
    return f"{four_digits(stock)} → {four_digits(ours)} ms ({stock / ours:.1f}x)"


def four_digits(number: float) -> str:
    """Write a number so that readers who divide two of them get the speed-up that stands beside."""
    decimals = 0 if number >= 1000 else 1 if number >= 100 else 2
    return f"{number:.{decimals}f}"


def jobs() -> str:
    """Write README's two tables of jobs.

    Raises:
        KeyError: if a job was not timed for a model
        ValueError: if a file mixes measurements of two commits
    """
    document = load(FILE)
    rows = calls(document)
    note = "\\* Here FlashAttention-3 is slower than sdpa. " * ("\\*" in rows)
    return f"{rows}\n{note}*{measured_at(document, FILE)}*\n\n{other_jobs()}"


def calls(document: Document) -> str:
    """Write the tower and calls of `generate`: stock beside ours, and the speed-up over FlashAttention-3.

    An asterisk marks where FlashAttention-3 is slower than sdpa.
    """
    rows = []
    for case in CASES:
        cells = [case.label, YOU_ADD[case.way]]
        for model in SHOWN:
            row = row_of(document, model, case)
            over_flash = row[FLASH] / row[case.way]
            mark = "\\*" if round(over_flash, 1) > round(speedup(document, model, case), 1) else ""
            cells += [both_times(row, case), f"{over_flash:.1f}x{mark}"]
        rows.append(cells)
    head = [heading for model in SHOWN for heading in (title(model), "over FlashAttention-3")]
    return grid(["job", "you add", *head], rows)


def other_jobs() -> str:
    """Write captioning beside vLLM, embedding and training, each with the commit of its file."""
    captions = load(vllm.FILE)
    sides = [vllm.jobs(captions)[model, vllm.CAPTIONING, CAPTION_TOKENS] for model in SHOWN]
    cells = ["vLLM {} → {} ({})".format(*vllm.both_sides(of_model)) for of_model in sides]
    pictures = round(sides[0]["ours"]["pictures/s"] * sides[0]["ours"]["ms"] / 1e3)
    label = f"captions a second, {pictures} JPEG files, {CAPTION_TOKENS} tokens, against {vllm.name(captions)}"
    rows = [[label, "[the captioner](docs/captioning.md)", *cells, str(commit_of(captions, vllm.FILE))]]
    embedding = load(EMBEDDING)
    cells = []
    for model in SHOWN:
        stock, ours = embedded(embedding, model)
        cells.append(f"{digits(stock)} → {digits(ours)} ms ({stock / ours:.1f}x)")
    commit = str(commit_of(embedding, EMBEDDING))
    rows.append([f"embedding, {PICTURES[BATCH]}", "`patch(model, text=True)`", *cells, commit])
    steps = load(STEPS)
    for way in dict.fromkeys(row["way"] for row in steps["rows"]):
        cells = []
        for model in SHOWN:
            stock, ours = trained(steps, model, way)
            cells.append(f"{stock:.2f} → {ours:.2f} s ({stock / ours:.1f}x)")
        label = f"`Trainer` step, 16 pictures (~480x480), {way}"
        rows.append([label, "`patch`", *cells, str(commit_of(steps, STEPS))])
    return grid(["job", "you add", *map(title, SHOWN), "commit"], rows)


def embedded(document: Document, model: str) -> tuple[float, float]:
    """Return the milliseconds of stock and of `text=True` for the batch."""
    by_contender = times(document)[model, BATCH]
    return by_contender["stock"]["ms"], by_contender["text=True"]["ms"]


def trained(document: Document, model: str, way: str) -> tuple[float, float]:
    """Return the seconds of a step of `Trainer`, stock and patched."""
    [row] = [row for row in document["rows"] if (row["model"], row["way"]) == (model, way)]
    return row["stock"]["step"], row["patched"]["step"]


def gains() -> str:
    """Write the small table at the top of README: the speed-up of one job of each kind.

    Raises:
        KeyError: if a job was not timed for a model
    """
    document = load(FILE)
    steps = load(STEPS)
    lora, tower = dict.fromkeys(row["way"] for row in steps["rows"])
    rows = []
    for model in SHOWN:
        pairs = [embedded(load(EMBEDDING), model), trained(steps, model, lora), trained(steps, model, tower)]
        speedups = [speedup(document, model, ANSWER), *(stock / ours for stock, ours in pairs)]
        captions = vllm.both_sides(vllm.jobs(load(vllm.FILE))[model, vllm.CAPTIONING, CAPTION_TOKENS])[-1]
        rows.append([title(model), *(f"{number:.1f}x" for number in speedups), captions])
    device = document["device"].removeprefix("NVIDIA ")
    head = f"times as fast as transformers' default, one {device}"
    return grid([head, "answers", "embedding", "LoRA, tower frozen", "training the tower", "captions, over vLLM"], rows)
