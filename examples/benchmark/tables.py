"""Writes the tables of README.md and docs/ from the JSON files beside it; a test fails where a page differs.

python examples/benchmark/tables.py

A page holds a table between `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is one of TABLES.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PLACE = re.compile(r"(<!-- table: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MODELS = ("qwen2.5-vl-7b", "qwen3-vl-8b", "qwen2-vl-7b")
TRAINED = ("sdpa", "flash_attention_2", "compile_blocks")  # stock's, that training is compared with
SIZE_448 = "one 448²"

Times = dict[tuple[str, str], dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """A table of one file that `hf-vit-accel bench --json` wrote.

    columns: contender to its heading, the first is what others are compared with. command: what makes the file, where
    it does not say so itself.
    memory: each cell says the peak memory in GB; else how many times as fast as the first column it is.
    """

    file: str
    columns: Mapping[str, str]
    command: str = ""
    memory: bool = False

    def __call__(self) -> str:
        """The table, and what it was measured on."""
        document = load(self.file)
        base = next(iter(self.columns))
        head = ["ms (peak GB)" if self.memory else "ms", "input", "patches", *self.columns.values()]
        rows = [
            [
                title(model),
                size,
                str(next(iter(rows.values()))["patches"]),
                *(self._cell(rows.get(name), rows.get(base) if name != base else None) for name in self.columns),
            ]
            for (model, size), rows in times(document).items()
        ]
        return grid(head, rows) + f"\n{conditions(document, self.file, self.command)}\n"

    def _cell(self, row: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        if self.memory:
            told = row["peak_gb"] is not None and not row["contender"].endswith("+graph")  # theirs is held beside
            return digits(row["ms"]) + (f" ({row['peak_gb']:.1f})" if told else "")
        return digits(row["ms"]) + (f" ({base['ms'] / row['ms']:.1f}x)" if base is not None else "")


def load(file: str) -> dict[str, Any]:
    """One of the JSON files."""
    return dict(json.loads((HERE / file).read_text(encoding="utf-8")))


def times(document: Mapping[str, Any]) -> Times:
    """(model, size) to contender to its row, of everything that was timed."""
    found: Times = {}
    for row in document["rows"]:
        if row["ms"] is not None:
            found.setdefault((row["model"], row["size"]), {})[row["contender"]] = row
    return found


def conditions(document: Mapping[str, Any], file: str, command: str = "") -> str:
    """Hardware, versions, commit and command, as far as the file says them."""
    versions, machine = document["versions"], document.get("machine") or {}
    parts = [
        f"One {document['device']}" if document.get("gpus", 1) == 1 else f"{document['gpus']} x {document['device']}",
        document["dtype"],
        *(f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if versions.get(name)),
        *([f"driver {machine['driver']}, up to {machine['largest_clock']} MHz"] if "driver" in machine else []),
        f"commit {document['commit']}" if document.get("commit") else "commit not recorded",
        f"`{document.get('command', command)}`",
        f"`examples/benchmark/{file}`",
    ]
    note = f" {document['transcribed']}" if document.get("transcribed") else ""
    return f"*{'; '.join(parts)}.*{note}"


def first_token() -> str:
    """Time to the first token, the language model included."""
    document = load("first_token.json")
    head = ["ms", "stock", "patched", "patched, CUDA graphs", "less time"]
    rows = [
        [
            title(row["model"]),
            *(digits(row[key]) for key in ("stock", "patched", "graphs")),
            f"{saved(row):.0f}%",
        ]
        for row in document["rows"]
    ]
    command = "python examples/benchmark/first_token.py"
    return grid(head, rows) + f"\n{conditions(document, 'first_token.json', command)}\n"


def captioning() -> str:
    """Images a second of the batch captioner: of each way the median and all runs."""
    document = load("captioning.json")
    rows = [
        [
            str(row["tokens"]),
            *(f"{digits(row[way])} ({', '.join(map(digits, row['all'][way]))})" for way in ("stock", "patched")),
            f"{row['patched'] / row['stock']:.1f}x",
        ]
        for row in document["rows"]
    ]
    head = ["new tokens", "stock, images/s, median (each run)", "patched", "times as fast"]
    return grid(head, rows) + f"\n{conditions(document, 'captioning.json')}\n"


def captioning_processes() -> str:
    """Images a second of the batch captioner by how many processes it has, a GPU each."""
    document, rows = load("captioning_processes.json"), []
    for tokens in dict.fromkeys(row["tokens"] for row in document["rows"]):
        found = {row["processes"]: row for row in document["rows"] if row["tokens"] == tokens}
        one = found[1]["per_second"]
        rows.append(
            [str(tokens), *(f"{digits(r['per_second'])} ({r['per_second'] / one:.2f}x)" for r in found.values())]
        )
    head = ["new tokens, images/s", *(f"{count} process{'es' * (count > 1)}" for count in found)]
    command = "accelerate launch --num_processes N examples/benchmark/captioning_benchmark.py build/captioning"
    return grid(head, rows) + f"\n{conditions(document, 'captioning_processes.json', command)}\n"


def ways(file: str = "ways.json") -> str:
    """Ways to train a tower: stock, patched, and how many times as fast that is."""
    document = load(file)
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for stock, ours in zip(document["rows"][::2], document["rows"][1::2], strict=True):
        if any(stock[key] != ours[key] for key in ("model", "size", "way")) or ours["calls"]["stock"]:
            raise ValueError(f"{file}: not a pair of stock and patched: {stock} and {ours}")
        ratio = stock["ms"] / ours["ms"]
        told = f"{digits(stock['ms'])} / {digits(ours['ms'])} ({ratio:.{1 + (ratio < 1)}f}x)"
        cells.setdefault((stock["model"], stock["size"]), {})[stock["way"]] = told
    head = ["ms, stock sdpa / patched", *(f"{title(model)}, {size}" for model, size in cells)]
    rows = [[way, *(found[way] for found in cells.values())] for way in next(iter(cells.values()))]
    return grid(head, rows) + f"\n{conditions(document, file)}\n"


def hosts() -> str:
    """What the CPU decides: one small image on several machines, median and range."""
    files = ["towers.json", *sorted(path.name for path in HERE.glob("hosts_*.json"))]
    documents = [load(file) for file in files]
    columns = {"stock sdpa": "stock sdpa", "auto": "`auto`", "auto+graph": "`auto`, CUDA graph"}
    found = [times(document) for document in documents]
    rows = [
        [title(model), size, *(_spread([each[model, size][name]["ms"] for each in found]) for name in columns)]
        for model, size in found[-1]
    ]
    head = [f"ms on {len(files)} machines, median (range)", "input", *columns.values()]
    told = (f"- {conditions(document, file)}\n" for document, file in zip(documents, files, strict=True))
    return grid(head, rows) + f"\n{''.join(told)}"


def checks() -> str:
    """What all checks of a steady call take on a host."""
    document, found = load("checks.json"), {}
    for row in document["rows"]:
        found.setdefault(row["model"], []).append(f"{digits(row['median'])} ({digits(row['least'])})")
    head = ["us, median (fastest tenth)", "without gradients", "frozen, gradients enabled"]
    table = grid(head, ([title(model), *cells] for model, cells in found.items()))
    return table + f"\n{conditions(document, 'checks.json')}\n"


def _spread(values: Sequence[float]) -> str:
    return f"{digits(statistics.median(values))} ({digits(min(values))} to {digits(max(values))})"


def training_step() -> str:
    """Seconds of a step of `Trainer`, the language model included."""
    document = load("training_step.json")
    rows = [
        [
            way,
            f"{found['stock']['step']:.2f}",
            f"{found['patched']['step']:.2f} ({found['stock']['step'] / found['patched']['step']:.1f}x)",
            *(f"{found[of]['tower']:.2f}" for of in ("stock", "patched")),
        ]
        for way, found in steps(document).items()
    ]
    command = "python examples/benchmark/training_step.py --json examples/benchmark/training_step.json"
    head = [f"seconds, {title(document['model'])}", "stock", "patched", "of it the tower, stock", "patched"]
    return grid(head, rows) + f"\n{conditions(document | {'dtype': 'bfloat16'}, 'training_step.json', command)}\n"


def steps(document: Mapping[str, Any]) -> dict[str, Any]:
    """Way to train to what it took."""
    return {way: found for way, found in document.items() if isinstance(found, dict) and "patched" in found}


def data_parallel() -> str:
    """One call shared by several GPUs, beside one of them."""
    document = load("data_parallel.json")
    ours: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for run in document["runs"]:
        for row in run["towers"]:
            if not row["graphs"] and "448" not in row["size"]:
                ours.setdefault((row["model"], row["size"]), {})[run["ranks"]] = row
    counts = [run["ranks"] for run in document["runs"]]
    told = any("balance_measured" in row for found in ours.values() for row in found.values())
    rows = [
        [
            title(model),
            size,
            digits(statistics.median(row["alone_ms"] for row in found.values())),
            *(cell for count in counts for cell in _shared(found.get(count), told)),
        ]
        for (model, size), found in ours.items()
    ]
    balances = ["slowest rank by mean (expected)"] * told
    head = ["ms", "input", "one GPU", *(cell for count in counts for cell in (f"{count} GPUs", *balances))]
    return grid(head, rows) + f"\n{conditions(document | {'gpus': counts[-1]}, 'data_parallel.json')}\n"


def _shared(row: Mapping[str, Any] | None, told: bool) -> list[str]:
    """told: whether there are cells of balance."""
    if row is None:
        return [""] * (1 + told)
    even = f"{row['balance_measured']:.2f} ({row['balance']:.2f})" if "balance_measured" in row else ""
    return [f"{digits(row['shared_ms'])} ({row['alone_ms'] / row['shared_ms']:.2f}x)", *[even] * told]


def reuse() -> str:
    """Calls with copies, with and without reuse."""
    document = load("reuse.json")
    rows = [
        [
            title(row["model"]),
            row["what"],
            *(digits(row["ms"][way]) for way in ("without", "reuse")),
            f"{row['ratio']:.2f}",
        ]
        for row in document["rows"]
    ]
    head = ["ms", "calls", "without", "with reuse", "share of the time"]
    return grid(head, rows) + f"\n{conditions(document, 'reuse.json')}\n"


def max_rows() -> str:
    """A long video in passes."""
    document = load("max_rows.json")
    whole = {row["model"]: row["ms"] for row in document["rows"] if row["max_rows"] is None}
    rows = [
        [
            title(row["model"]),
            "one pass" if row["max_rows"] is None else f"{row['max_rows']:,}",
            f"{row['beyond_gb']:.2f}",
            f"{digits(row['ms'])} ({row['ms'] / whole[row['model']]:.2f})",
        ]
        for row in document["rows"]
    ]
    head = [f"{document['rows_of_call']:,} patches", "`max_rows`", "GB beyond weights and outputs", "ms (of one pass)"]
    command = "python examples/benchmark/max_rows.py"
    return grid(head, rows) + f"\n{conditions(document, 'max_rows.json', command)}\n"


def long_video() -> str:
    """What a video's tower and its answer take within a budget, stock beside patched."""
    document = load("long_video.json")

    def cell(step: Any) -> str:
        return f"{step['peak_gb']:.1f} GB, {step['seconds']:.2f} s" if isinstance(step, dict) else step or ""

    rows = [
        [row["way"], f"{row['fps']:g}", f"{row['patches']:,}", cell(row["encode"]), cell(row.get("generate"))]
        for row in document["rows"]
    ]
    head = [f"within {document['rows'][0]['budget_gb']:g} GB", "frames a second", "patches", "encoding", "answering"]
    return grid(head, rows) + f"\n{conditions(document, 'long_video.json')}\n"


def fp8_errors() -> str:
    """How far FP8 is off."""
    columns = {"stock sdpa": "stock sdpa", "auto": "`auto`", "auto+fp8": "`auto` with `fp8=True`"}
    rows = [
        [title(model), size, *(f"{rows[name]['error']:.2%}" for name in columns)]
        for (model, size), rows in times(load("fp8.json")).items()
    ]
    return grid(["error", "input", *columns.values()], rows)


def headline() -> str:
    """What the README leads with: end to end, then the tower beside the fastest that is not ours."""
    tokens = {row["model"]: row["stock"] / row["graphs"] for row in load("first_token.json")["rows"]}
    trained, captions = load("training_step.json"), load("captioning.json")
    rows: list[list[str]] = [
        [
            "first token of one 1024² image, CUDA graphs",
            "stock sdpa",
            *(f"{tokens[model]:.1f}x" if model in tokens else "" for model in MODELS),
        ],
        *(
            [
                f"step of `Trainer`, {way}",
                "stock sdpa",
                *(
                    f"{found['stock']['step'] / found['patched']['step']:.1f}x" if model == trained["model"] else ""
                    for model in MODELS
                ),
            ]
            for way, found in steps(trained).items()
        ),
        *(
            [
                f"batch captioning, {row['tokens']} new tokens",
                "stock sdpa",
                *(f"{row['patched'] / row['stock']:.1f}x" if model == captions["model"] else "" for model in MODELS),
            ]
            for row in captions["rows"]
            if row["tokens"] > 1
        ),
        ["tower, forward", "stock with FlashAttention-3", *gains("towers.json", "auto", ("flash_attention_3",))],
        ["tower, forward, plain install", "stock sdpa", *gains("plain.json", "auto", ("sdpa",))],
        [
            "tower, forward, one small image (784 patches), CUDA graph",
            "stock, compiled and in a CUDA graph",
            *gains("small.json", "auto+graph", ("compile+graph",)),
        ],
        [
            "tower, forward and backward",
            "the fastest of stock sdpa, FlashAttention-2, compiled blocks",
            *gains("training.json", "auto", TRAINED),
        ],
        [
            "tower, forward and backward, CUDA graphs",
            "the fastest of stock sdpa, FlashAttention-2, compiled blocks",
            *gains("training.json", "auto+graph", TRAINED),
        ],
    ]
    rows = [[cell or "not timed" for cell in row] for row in rows]
    return grid(["what is timed", "compared with", *map(title, MODELS)], rows)


def gains(file: str, ours: str, stock: Sequence[str]) -> Iterable[str]:
    """For each model: how many times as fast as the fastest of some stock contenders, least and most over the sizes.

    Raises KeyError where one of them was not timed, or ours was not.
    """
    found = times(load(file))
    for model in MODELS:
        ratios = [
            min(rows[f"stock {name}"]["ms"] for name in stock) / rows[ours]["ms"]
            for (of, _), rows in found.items()
            if of == model
        ]
        low, high = (f"{ratio:.1f}" for ratio in (min(ratios, default=0), max(ratios, default=0)))
        yield "" if not ratios else f"{low}x" if low == high else f"{low} to {high}x"


def saved(row: Mapping[str, Any]) -> float:
    """Per cent of stock's time to the first token that patching with CUDA graphs saves."""
    return float(100 * (1 - row["graphs"] / row["stock"]))


def title(model: str) -> str:
    """qwen2.5-vl-7b as its makers write it."""
    return re.sub(r"\d+b$", lambda size: size[0].upper(), model.replace("qwen", "Qwen").replace("-vl-", "-VL-"))


def digits(number: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


TABLES: Mapping[str, Callable[[], str]] = {
    "headline": headline,
    "first_token": first_token,
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
    "towers_h100": Timings(
        file="towers_h100.json",
        columns={
            "stock sdpa": "stock sdpa",
            "stock flash_attention_3": "stock FlashAttention-3",
            "auto": "`auto`",
            "torch_varlen": "`torch_varlen`",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "flash_attention_4": "`flash_attention_4`",
            "flash_attention_3": "`flash_attention_3`",
        },
    ),
    "plain": Timings(file="plain.json", columns={"stock sdpa": "stock sdpa", "auto": "`auto`"}),
    "backends": Timings(
        file="towers.json",
        columns={
            "torch_varlen": "`torch_varlen`",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "flash_attention_4": "`flash_attention_4`",
            "flash_attention_3": "`flash_attention_3` (not from pip)",
            "auto": "`auto` (all installed)",
        },
    ),
    "families": Timings(
        file="families.json",
        command='hf-vit-accel bench --model NAME --sizes "16 x 512²,one 448²" --backends auto,auto+graph --rounds 2',
        columns={"stock sdpa": "stock sdpa", "auto": "`auto`", "auto+graph": "`auto`, CUDA graph"},
    ),
    "towers": Timings(
        file="towers.json",
        columns={
            "stock sdpa": "stock sdpa",
            "stock flash_attention_3": "stock FlashAttention-3",
            "auto": "`auto`",
            "auto+graph": "`auto`, CUDA graph",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "flash_attention_3": "`flash_attention_3`",
        },
    ),
    "small": Timings(
        file="small.json",
        columns={
            "stock sdpa": "stock sdpa",
            "stock flash_attention_3": "stock FlashAttention-3",
            "stock graph": "the same in a CUDA graph",
            "stock compile+graph": "and compiled",
            "auto+graph": "`auto`, CUDA graph",
            "flashinfer_cudnn+graph": "`flashinfer_cudnn`, CUDA graph",
        },
    ),
    "training": Timings(
        file="training.json",
        columns={
            "stock sdpa": "stock sdpa",
            "stock flash_attention_2": "stock FlashAttention-2",
            "stock compile_blocks": "stock, compiled blocks",
            "auto": "patched",
            "auto+graph": "patched, CUDA graphs",
        },
        memory=True,
    ),
    **{
        name: Timings(
            file=f"{name}.json",
            columns={"stock sdpa": "stock sdpa", "stock compile_blocks": "stock, compiled blocks", "auto": "patched"},
            memory=True,
        )
        for name in ("lora", "checkpointing", "families_training")
    },
    "flex": Timings(
        file="flex.json",
        command=f'hf-vit-accel bench --model qwen3-vl-8b,qwen2.5-vl-7b --sizes "{SIZE_448},16 x 512²" '
        "--backends flex,flex+graph,flashinfer_cudnn,flashinfer_cudnn+graph,auto",
        columns={
            "stock sdpa": "stock sdpa",
            "flex": "`flex`",
            "flex+graph": "`flex`, CUDA graph",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "flashinfer_cudnn+graph": "`flashinfer_cudnn`, CUDA graph",
        },
    ),
    "fp8": Timings(
        file="fp8.json",
        command='hf-vit-accel bench --model qwen3-vl-8b,qwen2-vl-7b --sizes "one page,1x72x72" '
        "--backends flashinfer_cudnn,auto,auto+fp8 --rounds 3",
        columns={
            "stock sdpa": "stock sdpa",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "auto": "`auto`",
            "auto+fp8": "`auto` with `fp8=True`",
        },
    ),
}
"""Every table that a page may hold."""


def filled(page: str) -> str:
    """A page's text with its tables written anew; KeyError for a table that there is none of."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place['name']]()}\n{place[3]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
