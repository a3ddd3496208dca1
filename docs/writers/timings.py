"""Declare the tables of files that `hf-vit-accel bench --json` writes: which contenders stand in which columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from documents import Document, Row, digits, grid, times, title

REPLAYED_PATCHES = 5120
"""Patches of the largest training step that `patch(model)` replays by itself."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Describe one table of a file that `bench` wrote.

    Args:
        file: the name of the JSON file
        columns: heading by contender; all cells are compared with the first contender. A contender that the file does
            not hold has no column.
        memory: show the peak memory in GB instead of the speed-up
    """

    file: str
    columns: Mapping[str, str]
    memory: bool = False

    def table(self, document: Document) -> str:
        """Write the table."""
        contenders = {row["contender"] for row in document["rows"]}
        columns = {contender: heading for contender, heading in self.columns.items() if contender in contenders}
        head = ["ms (peak GB)" if self.memory else "ms", "input", "patches", *columns.values()]
        rows = []
        for (model, size), by_contender in times(document).items():
            patches = next(iter(by_contender.values()))["patches"]
            cells = [self._cell(by_contender, contender) for contender in columns]
            rows.append([title(model), size, str(patches), *cells])
        return grid(head, rows)

    def _cell(self, by_contender: Mapping[str, Row], contender: str) -> str:
        row = by_contender.get(contender)
        if row is None:
            return ""
        if self.memory:
            shows_peak = row["peak_gb"] is not None and not _is_replayed(row)
            return digits(row["ms"]) + (f" ({row['peak_gb']:.1f})" if shows_peak else "")
        base = next(iter(self.columns))
        if contender == base or base not in by_contender:
            return digits(row["ms"])
        return f"{digits(row['ms'])} ({by_contender[base]['ms'] / row['ms']:.1f}x)"


def _is_replayed(row: Row) -> bool:
    """Say whether a training step may be a replay. Its peak leaves out the memory that the capture allocated."""
    contender = row["contender"]
    is_automatic = row["patches"] <= REPLAYED_PATCHES and not contender.startswith("stock ")
    return is_automatic or contender.endswith("+graph")


STOCK = {"stock sdpa": "stock sdpa"}
DEFAULT = {"auto": "`patch(model)`"}
BOTH = {**DEFAULT, "auto+graph": "`cuda_graphs=True`"}
"""Headings of the contenders that most tables have."""

TIMINGS: Mapping[str, Timings] = {
    "cuda_extra": Timings(file="cuda_extra.json", columns={**STOCK, **BOTH}),
    "plain": Timings(file="plain.json", columns={**STOCK, **BOTH}),
    "backends": Timings(
        file="towers.json",
        columns={
            "torch_varlen": "`torch_varlen`",
            "torch_cudnn": "`torch_cudnn`",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "flash_attention_4": "`flash_attention_4`",
            "flash_attention_3": "`flash_attention_3` (not from pip)",
            **DEFAULT,
        },
    ),
    "families": Timings(file="families.json", columns={**STOCK, **BOTH}),
    "towers": Timings(
        file="towers.json",
        columns={
            **STOCK,
            "stock flash_attention_2": "stock FlashAttention-2",
            "stock flash_attention_3": "stock FlashAttention-3",
            **BOTH,
        },
    ),
    "held_out": Timings(file="held_out.json", columns={**STOCK, **BOTH}),
    "slow_host": Timings(file="slow_host.json", columns={**STOCK, "auto+eager": "`cuda_graphs=False`", **BOTH}),
    "small": Timings(
        file="small.json",
        columns={
            **STOCK,
            "stock flash_attention_3": "stock FlashAttention-3",
            "stock graph": "the same in a CUDA graph",
            "stock compile+graph": "and compiled",
            **BOTH,
            "flashinfer_cudnn+graph": "`flashinfer_cudnn`, `cuda_graphs=True`",
        },
    ),
    "training": Timings(
        file="training.json",
        columns={
            **STOCK,
            "stock flash_attention_2": "stock FlashAttention-2",
            "stock compile_blocks": "stock, compiled blocks",
            **BOTH,
            "flash_attention_4": "`flash_attention_4`",
        },
        memory=True,
    ),
    "lora": Timings(
        file="lora.json",
        columns={**STOCK, "stock compile_blocks": "stock, compiled blocks", **DEFAULT},
        memory=True,
    ),
    "embedding": Timings(
        file="embedding.json",
        columns={
            "stock": "stock",
            "flash_attention_3": "stock, FlashAttention-3 in the tower",
            "patch(model)": "`patch(model)`",
            "text=True": "`text=True`",
        },
    ),
    "flex": Timings(
        file="flex.json",
        columns={
            **STOCK,
            "flex": "`flex`",
            "flex+graph": "`flex`, `cuda_graphs=True`",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "flashinfer_cudnn+graph": "`flashinfer_cudnn`, `cuda_graphs=True`",
        },
    ),
    "fp8": Timings(
        file="fp8.json",
        columns={**STOCK, "flashinfer_cudnn": "`flashinfer_cudnn`", **DEFAULT, "auto+fp8": "`fp8=True`"},
    ),
}
"""The tables by the name that a page gives them."""
