"""Declare the tables of files that `hf-vit-accel bench --json` writes: which contenders stand in which columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from documents import Document, Row, digits, grid, times, title


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Describe one table of a file that `bench` wrote.

    Args:
        file: the name of the JSON file
        columns: heading by contender; all cells are compared with the first contender
        memory: show the peak memory in GB instead of the speed-up
    """

    file: str
    columns: Mapping[str, str]
    memory: bool = False

    def table(self, document: Document) -> str:
        """Write the table."""
        head = ["ms (peak GB)" if self.memory else "ms", "input", "patches", *self.columns.values()]
        rows = []
        for (model, size), by_contender in times(document).items():
            patches = next(iter(by_contender.values()))["patches"]
            cells = [self._cell(by_contender, contender) for contender in self.columns]
            rows.append([title(model), size, str(patches), *cells])
        return grid(head, rows)

    def _cell(self, by_contender: Mapping[str, Row], contender: str) -> str:
        row = by_contender.get(contender)
        if row is None:
            return ""
        if self.memory:
            # The memory of a CUDA graph is allocated at its capture: the peak of a replay would leave it out.
            shows_peak = row["peak_gb"] is not None and not contender.endswith("+graph")
            return digits(row["ms"]) + (f" ({row['peak_gb']:.1f})" if shows_peak else "")
        base = next(iter(self.columns))
        if contender == base or base not in by_contender:
            return digits(row["ms"])
        return f"{digits(row['ms'])} ({by_contender[base]['ms'] / row['ms']:.1f}x)"


TIMINGS: Mapping[str, Timings] = {
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
        for name in ("lora", "checkpointing")
    },
    "flex": Timings(
        file="flex.json",
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
        columns={
            "stock sdpa": "stock sdpa",
            "flashinfer_cudnn": "`flashinfer_cudnn`",
            "auto": "`auto`",
            "auto+fp8": "`auto` with `fp8=True`",
        },
    ),
}
"""The tables by the name that a page gives them."""
