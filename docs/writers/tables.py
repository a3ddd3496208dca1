"""Write the tables of README.md and docs/, and README's chart, from the JSON files of benchmarks/.

python docs/writers/tables.py

A page holds a table between `<!-- table: NAME -->` and `<!-- end of table -->`. NAME is one of TABLES and TEXTS. A
table shows one file, so all its cells have one baseline. A file that mixes two commits is refused. A test
fails where a page differs. No sentence has a number of a file.

The block of code below `<!-- recipe: FILE -->` is a file of tests/stacks/recipes.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import chart
import headline
import options
import stacks
import summary
import vllm
from documents import (
    ROOT,
    Cell,
    Document,
    Row,
    conditions,
    digits,
    further_token_ms,
    grid,
    is_measured,
    load,
    times,
    title,
)
from timings import TIMINGS

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PLACE = re.compile(r"(<!-- table: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
RECIPE = re.compile(r"(<!-- recipe: (?P<file>[a-z_]+\.[a-z]+) -->\n)```.*?^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Declare one table, whose cells all come from one file.

    Args:
        file: the name of the JSON file
        write: writes the table from the content of the file
    """

    file: str
    write: Callable[[Document], str]

    def text(self) -> str:
        """Write the table, and the conditions of its measurement below.

        Raises:
            ValueError: if the file mixes measurements of two commits
        """
        document = load(self.file)
        return f"{self.write(document)}\n{conditions(document, self.file)}\n"


def whole_call(document: Document) -> str:
    """Write the time of towers and of whole calls of `generate`."""
    rows = []
    for row in document["rows"]:
        cells = [title(row["model"]), row["size"], str(row["tokens"] or "tower alone"), digits(row["stock"])]
        for way in (headline.FLASH, *headline.WITH):
            cells.append(f"{digits(row[way])} ({row['stock'] / row[way]:.1f}x)" if way in row else "")
        rows.append(cells)
    head = ["ms", "pictures", "new tokens", "stock", "stock, FlashAttention-3 in the tower"]
    return grid([*head, *(f"with {names}" for names in headline.WITH.values())], rows)


def further_tokens(document: Document) -> str:
    """Write the time of each token after the first."""
    times_by_call: dict[Cell, dict[int, Row]] = {}
    for row in document["rows"]:
        times_by_call.setdefault((row["model"], row["size"]), {})[row["tokens"]] = row
    rows = []
    for (model, size), by_tokens in times_by_call.items():
        if max(by_tokens) <= 1 or 1 not in by_tokens:
            continue
        ms_a_token = {way: further_token_ms(by_tokens, way) for way in ("stock", *headline.WITH)}
        stock = ms_a_token["stock"]
        ours = [f"{digits(ms_a_token[way])} ({stock / ms_a_token[way]:.1f}x)" for way in headline.WITH]
        rows.append([title(model), size, digits(stock), *ours])
    head = ["ms a token after the first", "pictures", "stock"]
    return grid([*head, *(f"with {names}" for names in headline.WITH.values())], rows)


def captioning(document: Document) -> str:
    """Write the images per second of the batch captioner, stock and patched."""
    rows = []
    for row in document["rows"]:
        rates = []
        for way in ("stock", "patched"):
            runs = [digits(rate) for rate in row["all"][way]]
            rates.append(f"{digits(row[way])} ({', '.join(runs)})" if len(runs) > 1 else runs[0])
        speedup = f"{row['patched'] / row['stock']:.1f}x"
        rows.append([title(row["model"]), str(row["tokens"]), *rates, speedup])
    head = ["pictures a second", "new tokens", "stock", "patched", "times as fast"]
    return grid(head, rows)


def ways(document: Document) -> str:
    """Write the ways to train a tower: stock, patched and the speed-up.

    Raises:
        ValueError: if rows do not alternate between stock and patched, or a patched call ran stock
    """
    cells: dict[Cell, dict[str, str]] = {}
    for stock, ours in zip(document["rows"][::2], document["rows"][1::2], strict=True):
        if any(stock[key] != ours[key] for key in ("model", "size", "way")) or ours["calls"]["stock"]:
            raise ValueError(f"not a pair of stock and patched: {stock} and {ours}")
        ratio = stock["ms"] / ours["ms"]
        decimals = 2 if ratio < 1 else 1
        cell = f"{digits(stock['ms'])} / {digits(ours['ms'])} ({ratio:.{decimals}f}x)"
        cells.setdefault((stock["model"], stock["size"]), {})[stock["way"]] = cell
    head = ["ms, stock sdpa / patched", *(f"{title(model)}, {size}" for model, size in cells)]
    names = next(iter(cells.values()))
    rows = [[way, *(by_way[way] for by_way in cells.values())] for way in names]
    return grid(head, rows)


def random_calls(document: Document) -> str:
    """Write the mean time of calls of random sizes, and the memory that torch holds after a quarter and after all."""
    rows = []
    for row in document["rows"]:
        without = row["ms"]["without"]
        default = row["ms"]["default"]
        cells = [title(row["model"]), f"{row['calls']:,}", row["stream"], digits(without)]
        cells += [f"{digits(default)} ({default / without:.2f})", str(row["captures"]), f"{row['replays']:,}"]
        rows.append([*cells, f"{row['held_gb'][0]:.2f}, {row['held_gb'][-1]:.2f}"])
    head = ["ms, mean", "calls", "sizes", "`cuda_graphs=False`", "`patch(model)` (of that)", "captures", "replays"]
    return grid([*head, "GB held after a quarter, after all"], rows)


def training_step(document: Document) -> str:
    """Write the seconds of a step of `Trainer`, which include the language model."""
    rows = []
    for row in document["rows"]:
        stock = row["stock"]
        patched = row["patched"]
        step = f"{patched['step']:.2f} ({stock['step'] / patched['step']:.1f}x)"
        cells = [f"{stock['step']:.2f}", step, f"{stock['tower']:.2f}", f"{patched['tower']:.2f}"]
        rows.append([title(row["model"]), row["way"], *cells])
    return grid(["seconds", "trained", "stock", "patched", "of it the tower, stock", "patched"], rows)


def memory_of_graphs(document: Document) -> str:
    """Write the memory of steps with a small picture, without and with CUDA graphs."""
    rows = []
    for row in document["rows"]:
        without = row["peak_gb"]["without graphs"]
        default = row["peak_gb"]["default"]
        percentage = round(100 * (default / without - 1), 1) + 0.0  # -0.0 becomes 0.0
        cells = [f"{without:.2f}", f"{default:.2f} ({percentage:+.1f}%)"]
        rows.append([title(row["model"]), row["way"], *cells])
    return grid(["GB, one 448²", "trained", "`cuda_graphs=False`", "`patch(model)`"], rows)


def data_parallel(document: Document) -> str:
    """Write the time of one call that several GPUs share, beside that of one GPU."""
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
    return grid(head, rows)


def _shared_cells(row: Row | None, has_balance: bool) -> list[str]:
    """Return the cells of one number of GPUs: the time and, with `has_balance`, the load of the slowest rank."""
    if row is None:
        return [""] * (1 + has_balance)
    cells = [f"{digits(row['shared_ms'])} ({row['alone_ms'] / row['shared_ms']:.2f}x)"]
    if has_balance:
        is_measured = "balance_measured" in row
        cells.append(f"{row['balance_measured']:.2f} ({row['balance']:.2f})" if is_measured else "")
    return cells


def reuse(document: Document) -> str:
    """Write the time of calls that hold copies, with and without reuse."""
    rows = []
    for row in document["rows"]:
        milliseconds = row["ms"]
        cells = [digits(milliseconds["without"]), digits(milliseconds["reuse"]), f"{row['ratio']:.2f}"]
        rows.append([title(row["model"]), row["what"], *cells])
    head = ["ms", "calls", "without", "with reuse", "share of the time"]
    return grid(head, rows)


def max_rows(document: Document) -> str:
    """Write the time and memory of a long video by the size of a pass."""
    one_pass = {row["model"]: row["ms"] for row in document["rows"] if row["max_rows"] is None}
    rows = []
    for row in document["rows"]:
        size = "one pass" if row["max_rows"] is None else f"{row['max_rows']:,}"
        milliseconds = f"{digits(row['ms'])} ({row['ms'] / one_pass[row['model']]:.2f})"
        rows.append([title(row["model"]), size, f"{row['beyond_gb']:.2f}", milliseconds])
    head = [f"{document['rows_of_call']:,} patches", "`max_rows`", "GB beyond weights and outputs", "ms (of one pass)"]
    return grid(head, rows)


def long_video(document: Document) -> str:
    """Write the memory and time of a video's tower and of its answer within a budget, stock and patched."""
    rows = []
    for row in document["rows"]:
        measured = [_memory_and_time(row["encode"]), _memory_and_time(row.get("generate"))]
        rows.append([row["way"], f"{row['fps']:g}", f"{row['patches']:,}", *measured])
    head = [f"within {document['rows'][0]['budget_gb']:g} GB", "frames a second", "patches", "encoding", "answering"]
    return grid(head, rows)


def _memory_and_time(step: Document | str | None) -> str:
    """Write a step that ran as memory and seconds, and an error as it is."""
    if isinstance(step, dict):
        return f"{step['peak_gb']:.1f} GB, {step['seconds']:.2f} s"
    return step or ""


def captions(document: Document) -> str:
    """Write the share of right captions of trained models by the way to patch them, and how many differ from stock's.

    Raises:
        ValueError: if a way did not run with every model and dtype
    """
    by_way: dict[str, list[Row]] = {}
    for row in document["rows"]:
        by_way.setdefault(row["way"], []).append(row)
    models = [f"{row['family']}, {row['dtype']}" for row in by_way["stock"]]
    rows = []
    for way, of_way in by_way.items():
        if len(of_way) != len(models):
            raise ValueError(f"{way} did not run with every model and dtype")
        shares = [f"{row['right'] / row['scenes']:.1%}" for row in of_way]
        changed = sum(row["changed"] for row in of_way)
        replays = f"{sum(row['replays'] for row in of_way)}, {sum(row['calls'] for row in of_way)}"
        rows.append([way, *shares, *(("", "") if way == "stock" else (str(changed), replays))])
    scenes = document["rows"][0]["scenes"]
    return grid([f"right of {scenes:,}", *models, "captions that differ from stock's", "replays, calls"], rows)


def fp8_errors(document: Document) -> str:
    """Write the error of FP8 attention beside that of bf16."""
    columns = {"stock sdpa": "stock sdpa", "auto": "`patch(model)`", "auto+fp8": "`fp8=True`"}
    rows = []
    for (model, size), by_contender in times(document).items():
        errors = [f"{by_contender[contender]['error']:.2%}" for contender in columns]
        rows.append([title(model), size, *errors])
    return grid(["error", "input", *columns.values()], rows)


def liger(document: Document) -> str:
    """Write the time of stock, Liger, ours and both: medians, with the fastest call in brackets."""
    names = {"stock": "stock", "Liger": "Liger", "ours": "`patch(model)`", "both": "Liger, then `patch(model)`"}
    rows = []
    for row in document["rows"]:
        contenders = row["contenders"]
        cells = [f"{digits(contenders[name]['ms'])} ({digits(contenders[name]['low'])})" for name in names]
        rows.append([title(row["model"]), row["job"], *cells])
    return grid(["ms (fastest call)", "job", *names.values()], rows)


def quantised(document: Document) -> str:
    """Write the time of towers whose linears are quantised, stock and patched."""
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in document["rows"]:
        key = (title(row["model"]), f"{row['bits']} bit", row["size"], row["work"])
        cells.setdefault(key, {})[row["contender"]] = row
    rows = []
    for key, by_contender in cells.items():
        stock = by_contender["stock"]["ms"]
        ours = by_contender["patch(model)"]["ms"]
        rows.append([*key, digits(stock), f"{digits(ours)} ({stock / ours:.1f}x)"])
    return grid(["ms", "bitsandbytes", "input", "work", "stock", "`patch(model)`"], rows)


def pages(document: Document) -> str:
    """Write how many pages a loop reads and runs in a second."""
    cells: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        cells.setdefault(row["contender"], {})[row["model"]] = f"{1e3 / row['ms']:.2f}"
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    rows = [[way, *(by_model.get(model, "") for model in models)] for way, by_model in cells.items()]
    return grid(["pages of 1700x2200 a second, patched", *map(title, models)], rows)


SCRIPTS: Mapping[str, Callable[[Document], str]] = {
    "beside_vllm": vllm.beside_vllm,
    "captioning": captioning,
    "captions": captions,
    "data_parallel": data_parallel,
    "liger": liger,
    "long_video": long_video,
    "max_rows": max_rows,
    "pages": pages,
    "quantised": quantised,
    "random_calls": random_calls,
    "reuse": reuse,
    "training_step": training_step,
    "ways": ways,
    "whole_call": whole_call,
}
"""What writes the table of a file, by the file's name without ".json"; the table has the same name."""


DECLARED: Mapping[str, Table] = {
    "further_tokens": Table(file=headline.FILE, write=further_tokens),
    "fp8_errors": Table(file="fp8.json", write=fp8_errors),
    "captions_flashinfer": Table(file="captions_flashinfer.json", write=vllm.captions_alone),
    "beside_vllm_many": Table(file="beside_vllm_many.json", write=vllm.beside_vllm),
    "memory_of_graphs": Table(file="training_step.json", write=memory_of_graphs),
    **{name: Table(file=f"{name}.json", write=write) for name, write in SCRIPTS.items()},
    **{name: Table(file=timings.file, write=timings.table) for name, timings in TIMINGS.items()},
}
"""The tables by the name that a page gives them."""
TABLES: Mapping[str, Table] = {name: table for name, table in DECLARED.items() if is_measured(table.file)}
"""Those whose file is there. The others are shown as not measured."""


TEXTS: Mapping[str, Callable[[], str]] = {
    "gains": headline.gains,
    "jobs": headline.jobs,
    "summary": summary.summary,
    "captions_beside_vllm": vllm.captions_beside_vllm,
    "options": options.options,
    "stacks": stacks.table,
    "versions_that_ran": stacks.versions,
}
"""Tables from several files, or with other conditions, by the name that a page gives them."""


def filled(path: Path) -> str:
    """Write the tables of a page anew.

    Raises:
        KeyError: if the page names an unknown table
        ValueError: if a table would mix measurements of two commits
    """
    page = path.read_text(encoding="utf-8")
    page = RECIPE.sub(lambda place: place[1] + stacks.recipe(place["file"]), page)
    return PLACE.sub(lambda place: f"{place[1]}\n{text_of(place['name'])}\n{place[3]}", page)


def text_of(name: str) -> str:
    """Write the table of a name.

    Raises:
        KeyError: if it is not declared
    """
    if name in TEXTS:
        return TEXTS[name]()
    return TABLES[name].text() if name in TABLES else f"Not measured: `{DECLARED[name].file}` is missing.\n"


if __name__ == "__main__":
    if sys.argv[1:]:  # it takes no arguments
        print(__doc__)
        raise SystemExit
    chart.CHART.write_text(chart.chart(load(headline.FILE)), encoding="utf-8")
    for page in PAGES:
        page.write_text(filled(page), encoding="utf-8")
