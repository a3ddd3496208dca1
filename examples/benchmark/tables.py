"""Write the tables of README.md and docs/ from the JSON files beside this one; a test fails where a page differs.

python examples/benchmark/tables.py

A page holds a table between `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is one of TABLES.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from documents import HERE, MODELS, Cell, Document, Row, conditions, digits, grid, load, steps, times, title
from timings import TIMINGS, Timings

ROOT = HERE.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PLACE = re.compile(r"(<!-- table: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TRAINED = ("sdpa", "flash_attention_2", "compile_blocks")
"""The stock contenders that patched training is compared with."""


def timings_table(timings: Timings) -> str:
    """Write a table of a file that `hf-vit-accel bench` wrote."""
    return timings.table(load(timings.file))


def whole_call() -> str:
    """Write the time of whole calls of `generate`."""
    document = load("whole_call.json")
    rows = []
    for row in document["rows"]:
        milliseconds = [digits(row["stock"])]
        milliseconds += [f"{digits(row[way])} ({row['stock'] / row[way]:.1f}x)" for way in ("patched", "decoding")]
        rows.append([title(row["model"]), row["size"], str(row["tokens"]), *milliseconds])
    head = ["ms", "pictures", "new tokens", "stock", "patched", "patched, `graphed_decoding`"]
    command = f"python examples/benchmark/whole_call.py --tokens {_tokens(document)}"
    return grid(head, rows) + f"\n{conditions(document, 'whole_call.json', command)}\n"


def _tokens(document: Document) -> str:
    """Return the numbers of new tokens of a document, in their order."""
    return ",".join(dict.fromkeys(str(row["tokens"]) for row in document["rows"]))


def captioning() -> str:
    """Write the images per second of the batch captioner: the median and every run of stock and patched."""
    document = load("captioning.json")
    rows = []
    for row in document["rows"]:
        rates = []
        for way in ("stock", "patched"):
            runs = ", ".join(digits(rate) for rate in row["all"][way])
            rates.append(f"{digits(row[way])} ({runs})")
        rows.append([str(row["tokens"]), *rates, f"{row['patched'] / row['stock']:.1f}x"])
    head = ["new tokens", "stock, images/s, median (each run)", "patched", "times as fast"]
    return grid(head, rows) + f"\n{conditions(document, 'captioning.json')}\n"


def captioning_processes() -> str:
    """Write the images per second of the batch captioner by its number of processes, one GPU each."""
    document = load("captioning_processes.json")
    rates: dict[int, dict[int, float]] = {}
    for row in document["rows"]:
        rates.setdefault(row["tokens"], {})[row["processes"]] = row["per_second"]
    rows = []
    for tokens, by_processes in rates.items():
        cells = [f"{digits(rate)} ({rate / by_processes[1]:.2f}x)" for rate in by_processes.values()]
        rows.append([str(tokens), *cells])
    counts = [f"{count} process{'es' * (count > 1)}" for count in by_processes]
    command = "accelerate launch --num_processes N examples/benchmark/captioning_benchmark.py build/captioning"
    table = grid(["new tokens, images/s", *counts], rows)
    return table + f"\n{conditions(document, 'captioning_processes.json', command)}\n"


def ways(file: str = "ways.json") -> str:
    """Write the ways to train a tower: stock, patched and the speed-up.

    Raises:
        ValueError: if rows do not alternate between stock and patched, or a patched call ran stock
    """
    document = load(file)
    cells: dict[Cell, dict[str, str]] = {}
    for stock, ours in zip(document["rows"][::2], document["rows"][1::2], strict=True):
        if any(stock[key] != ours[key] for key in ("model", "size", "way")) or ours["calls"]["stock"]:
            raise ValueError(f"{file}: not a pair of stock and patched: {stock} and {ours}")
        ratio = stock["ms"] / ours["ms"]
        decimals = 2 if ratio < 1 else 1
        cell = f"{digits(stock['ms'])} / {digits(ours['ms'])} ({ratio:.{decimals}f}x)"
        cells.setdefault((stock["model"], stock["size"]), {})[stock["way"]] = cell
    head = ["ms, stock sdpa / patched", *(f"{title(model)}, {size}" for model, size in cells)]
    names = next(iter(cells.values()))
    rows = [[way, *(by_way[way] for by_way in cells.values())] for way in names]
    return grid(head, rows) + f"\n{conditions(document, file)}\n"


def hosts() -> str:
    """Write the influence of the CPU: one small image on several machines, median and range."""
    files = ["towers.json", *sorted(path.name for path in HERE.glob("hosts_*.json"))]
    documents = {file: load(file) for file in files}
    measured = [times(document) for document in documents.values()]
    columns = {"stock sdpa": "stock sdpa", "auto": "`auto`", "auto+graph": "`auto`, CUDA graph"}
    rows = []
    for cell in measured[-1]:
        ranges = [_range([machine[cell][contender]["ms"] for machine in measured]) for contender in columns]
        rows.append([title(cell[0]), cell[1], *ranges])
    head = [f"ms on {len(files)} machines, median (range)", "input", *columns.values()]
    machines = "".join(f"- {conditions(document, file)}\n" for file, document in documents.items())
    return grid(head, rows) + f"\n{machines}"


def _range(values: Sequence[float]) -> str:
    return f"{digits(statistics.median(values))} ({digits(min(values))} to {digits(max(values))})"


def checks() -> str:
    """Write the time that a host needs for all checks of a steady call."""
    document = load("checks.json")
    cells: dict[str, list[str]] = {}
    for row in document["rows"]:
        cells.setdefault(row["model"], []).append(f"{digits(row['median'])} ({digits(row['least'])})")
    head = ["us, median (fastest tenth)", "without gradients", "frozen, gradients enabled"]
    table = grid(head, ([title(model), *of_model] for model, of_model in cells.items()))
    return table + f"\n{conditions(document, 'checks.json')}\n"


def training_step() -> str:
    """Write the seconds of a step of `Trainer`, which include the language model."""
    document = load("training_step.json")
    rows = []
    for way, timing in steps(document).items():
        stock = timing["stock"]
        patched = timing["patched"]
        step = f"{patched['step']:.2f} ({stock['step'] / patched['step']:.1f}x)"
        rows.append([way, f"{stock['step']:.2f}", step, f"{stock['tower']:.2f}", f"{patched['tower']:.2f}"])
    command = "python examples/benchmark/training_step.py --json examples/benchmark/training_step.json"
    head = [f"seconds, {title(document['model'])}", "stock", "patched", "of it the tower, stock", "patched"]
    return grid(head, rows) + f"\n{conditions(document | {'dtype': 'bfloat16'}, 'training_step.json', command)}\n"


def data_parallel() -> str:
    """Write the time of one call that several GPUs share, beside that of one GPU."""
    document = load("data_parallel.json")
    by_cell: dict[Cell, dict[int, Row]] = {}
    for run in document["runs"]:
        for row in run["towers"]:
            if not row["graphs"] and "448" not in row["size"]:
                by_cell.setdefault((row["model"], row["size"]), {})[run["ranks"]] = row
    counts = [run["ranks"] for run in document["runs"]]
    has_balance = any("balance_measured" in row for by_ranks in by_cell.values() for row in by_ranks.values())
    head = ["ms", "input", "one GPU"]
    for count in counts:
        head += [f"{count} GPUs", *["slowest rank by mean (expected)"] * has_balance]
    rows = []
    for (model, size), by_ranks in by_cell.items():
        cells = [title(model), size, digits(statistics.median(row["alone_ms"] for row in by_ranks.values()))]
        for count in counts:
            cells += _shared_cells(by_ranks.get(count), has_balance)
        rows.append(cells)
    return grid(head, rows) + f"\n{conditions(document | {'gpus': counts[-1]}, 'data_parallel.json')}\n"


def _shared_cells(row: Row | None, has_balance: bool) -> list[str]:
    """Return the cells of one number of GPUs: the time and, with `has_balance`, the load of the slowest rank."""
    if row is None:
        return [""] * (1 + has_balance)
    cells = [f"{digits(row['shared_ms'])} ({row['alone_ms'] / row['shared_ms']:.2f}x)"]
    if has_balance:
        is_measured = "balance_measured" in row
        cells.append(f"{row['balance_measured']:.2f} ({row['balance']:.2f})" if is_measured else "")
    return cells


def reuse() -> str:
    """Write the time of calls that hold copies, with and without reuse."""
    document = load("reuse.json")
    rows = []
    for row in document["rows"]:
        milliseconds = row["ms"]
        cells = [digits(milliseconds["without"]), digits(milliseconds["reuse"]), f"{row['ratio']:.2f}"]
        rows.append([title(row["model"]), row["what"], *cells])
    head = ["ms", "calls", "without", "with reuse", "share of the time"]
    return grid(head, rows) + f"\n{conditions(document, 'reuse.json')}\n"


def max_rows() -> str:
    """Write the time and memory of a long video by the size of a pass."""
    document = load("max_rows.json")
    one_pass = {row["model"]: row["ms"] for row in document["rows"] if row["max_rows"] is None}
    rows = []
    for row in document["rows"]:
        size = "one pass" if row["max_rows"] is None else f"{row['max_rows']:,}"
        milliseconds = f"{digits(row['ms'])} ({row['ms'] / one_pass[row['model']]:.2f})"
        rows.append([title(row["model"]), size, f"{row['beyond_gb']:.2f}", milliseconds])
    head = [f"{document['rows_of_call']:,} patches", "`max_rows`", "GB beyond weights and outputs", "ms (of one pass)"]
    command = "python examples/benchmark/max_rows.py"
    return grid(head, rows) + f"\n{conditions(document, 'max_rows.json', command)}\n"


def long_video() -> str:
    """Write the memory and time of a video's tower and of its answer within a budget, stock and patched."""
    document = load("long_video.json")
    rows = []
    for row in document["rows"]:
        measured = [_memory_and_time(row["encode"]), _memory_and_time(row.get("generate"))]
        rows.append([row["way"], f"{row['fps']:g}", f"{row['patches']:,}", *measured])
    head = [f"within {document['rows'][0]['budget_gb']:g} GB", "frames a second", "patches", "encoding", "answering"]
    return grid(head, rows) + f"\n{conditions(document, 'long_video.json')}\n"


def _memory_and_time(step: Document | str | None) -> str:
    """Write a step that ran as memory and seconds, and an error as it is."""
    if isinstance(step, dict):
        return f"{step['peak_gb']:.1f} GB, {step['seconds']:.2f} s"
    return step or ""


def fp8_errors() -> str:
    """Write the error of FP8 attention beside that of bf16."""
    columns = {"stock sdpa": "stock sdpa", "auto": "`auto`", "auto+fp8": "`auto` with `fp8=True`"}
    rows = []
    for (model, size), by_contender in times(load("fp8.json")).items():
        errors = [f"{by_contender[contender]['error']:.2%}" for contender in columns]
        rows.append([title(model), size, *errors])
    return grid(["error", "input", *columns.values()], rows)


def headline() -> str:
    """Write the table at the top of README: end to end, then the tower beside the fastest stock setup."""
    rows = [*_end_to_end(), *_towers()]
    rows = [[cell or "not timed" for cell in row] for row in rows]
    return grid(["what is timed", "compared with", *(title(model) for model in MODELS)], rows)


def _end_to_end() -> list[list[str]]:
    """Return the rows of the headline that include the language model."""
    rows = []
    for tokens in (1, 64):
        calls = [
            row for row in load("whole_call.json")["rows"] if (row["size"], row["tokens"]) == ("one 1024²", tokens)
        ]
        way = "patched" if tokens == 1 else "decoding"
        speedups = {row["model"]: row["stock"] / row[way] for row in calls}
        name = "first token" if tokens == 1 else f"{tokens} tokens by `graphed_decoding`, of a call"
        rows.append([f"{name} about one 1024² image", "stock sdpa", *_speedups(speedups)])
    trained = load("training_step.json")
    for way, timing in steps(trained).items():
        speedup = timing["stock"]["step"] / timing["patched"]["step"]
        rows.append([f"step of `Trainer`, {way}", "stock sdpa", *_speedups({trained["model"]: speedup})])
    captions = load("captioning.json")
    for row in captions["rows"]:
        if row["tokens"] > 1:
            speedup = row["patched"] / row["stock"]
            name = f"batch captioning, {row['tokens']} new tokens"
            rows.append([name, "stock sdpa", *_speedups({captions["model"]: speedup})])
    return rows


def _speedups(by_model: Mapping[str, float]) -> list[str]:
    return [f"{by_model[model]:.1f}x" if model in by_model else "" for model in MODELS]


def _towers() -> list[list[str]]:
    """Return the rows of the headline that time the tower alone."""
    fastest_trained = "the fastest of stock sdpa, FlashAttention-2, compiled blocks"
    return [
        ["tower, forward", "stock with FlashAttention-3", *gains("towers.json", "auto", ("flash_attention_3",))],
        ["tower, forward, plain install", "stock sdpa", *gains("plain.json", "auto", ("sdpa",))],
        [
            "tower, forward, one small image (784 patches), CUDA graph",
            "stock, compiled and in a CUDA graph",
            *gains("small.json", "auto+graph", ("compile+graph",)),
        ],
        ["tower, forward and backward", fastest_trained, *gains("training.json", "auto", TRAINED)],
        [
            "tower, forward and backward, CUDA graphs",
            fastest_trained,
            *gains("training.json", "auto+graph", TRAINED),
        ],
    ]


def gains(file: str, ours: str, stock: Sequence[str]) -> Iterable[str]:
    """Yield the speed-up of each model over the fastest stock contender, as a range over the sizes.

    Raises:
        KeyError: if `ours` or a stock contender was not timed for a size
    """
    by_cell = times(load(file))
    for model in MODELS:
        ratios = []
        for (model_of_cell, _), by_contender in by_cell.items():
            if model_of_cell == model:
                fastest = min(by_contender[f"stock {name}"]["ms"] for name in stock)
                ratios.append(fastest / by_contender[ours]["ms"])
        if not ratios:
            yield ""
            continue
        low = f"{min(ratios):.1f}"
        high = f"{max(ratios):.1f}"
        yield f"{low}x" if low == high else f"{low} to {high}x"


TABLES: Mapping[str, Callable[[], str]] = {
    "headline": headline,
    "whole_call": whole_call,
    "fp8_errors": fp8_errors,
    "training_step": training_step,
    "hosts": hosts,
    "checks": checks,
    "ways": ways,
    "ways_two": partial(ways, "ways_two.json"),
    "captioning": captioning,
    "captioning_processes": captioning_processes,
    "data_parallel": data_parallel,
    "max_rows": max_rows,
    "long_video": long_video,
    "reuse": reuse,
    **{name: partial(timings_table, timings) for name, timings in TIMINGS.items()},
}
"""The function that writes a table, by the name that a page gives it."""


def filled(page: str) -> str:
    """Write the tables of a page's text anew.

    Raises:
        KeyError: if the page names an unknown table
    """
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place['name']]()}\n{place[3]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
