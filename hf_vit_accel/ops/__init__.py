"""The operations of a tower, each in a file of its own, and the table from which they are chosen.

A new operation is one file and its line in `TABLE`; `fuse`, status and tests pick it up. A reference in plain torch
says what each computes: kernels are held to it, and `upstream` holds it to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops import linear, merger, mlp, norm, patch_embed, positions, rope, window_attention
from hf_vit_accel.ops.base import Context, Operation, Reads, copied, own_forward, placed_by_accelerate, reasons_replaced
from hf_vit_accel.ops.launch import why_not_triton

__all__ = [
    "PARTS",
    "TABLE",
    "Context",
    "LayerOps",
    "Operation",
    "Ops",
    "Reads",
    "build",
    "copied",
    "own_forward",
    "placed_by_accelerate",
    "reasons_replaced",
    "why_not_triton",
]

TABLE: tuple[Operation, ...] = (
    patch_embed.OPERATION,
    positions.OPERATION,
    norm.OPERATION,
    rope.OPERATION,
    merger.OPERATION,
    mlp.OPERATION,
    window_attention.OPERATION,
)
PARTS: Mapping[str, str] = {operation.name: operation.summary for operation in TABLE}
"""What `fuse` may name."""

Rows = torch.Tensor
AddNorm = Callable[[Rows, Rows | None], tuple[Rows, Rows]]


@dataclass(frozen=True, kw_only=True)
class LayerOps:
    """One layer. norm1, norm2: (x, delta) -> (x + delta, norm of it), x possibly in place. mlp: rows to their delta."""

    norm1: AddNorm
    qkv: Callable[[Rows], Rows]
    proj: Callable[[Rows], Rows]
    norm2: AddNorm
    mlp: Callable[[Rows], Rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ops:
    """The operations of one tower on one device in one dtype. fused: parts that are; unfused: the others, and why.

    tables: rows and positions (T, 2) to cos and sin (T, D). rotate: see `ops.rope`. merge, deepstack: (x, delta) ->
    (x + delta, what the merger makes of it), x possibly in place. attend_window: see `ops.window_attention`.
    """

    embed: Callable[[Rows], Rows]
    add_positions: Callable[[Rows, torch.Tensor, torch.Tensor], Rows] | None
    tables: Callable[[Rows, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    attend_window: Callable[..., torch.Tensor] | None
    layers: tuple[LayerOps, ...]
    merge: AddNorm
    deepstack: Mapping[int, AddNorm]
    fused: frozenset[str]
    unfused: Mapping[str, str]


def build(parts: Parts, context: Context, wanted: frozenset[str] | None = None) -> Ops:
    """Choose a tower's operations: those of `wanted` (None: all) that fit fused, others as its modules do them."""
    made: dict[str, list[Any]] = {}
    unfused: dict[str, str] = {}
    for operation in TABLE:
        made[operation.name], why = operation.build(parts, context, wanted=wanted is None or operation.name in wanted)
        if why is not None:
            unfused[operation.name] = why
    norms, mergers = made["norms"], made["mergers"]
    return Ops(
        embed=made["patch_embed"][0],
        add_positions=next(iter(made["positions"]), None),
        tables=rope.tables(parts.rotary, context),
        rotate=made["rope"][0],
        attend_window=next(iter(made["window_attention"]), None),
        layers=tuple(
            LayerOps(
                norm1=norm1,
                qkv=linear.build(block.qkv, context),
                proj=linear.build(block.proj, context),
                norm2=norm2,
                mlp=mlp,
            )
            for block, norm1, norm2, mlp in zip(parts.blocks, norms[::2], norms[1::2], made["mlp"], strict=True)
        ),
        merge=mergers[0],
        deepstack=dict(zip(parts.deepstack, mergers[1:], strict=True)),
        fused=frozenset(context.fused),
        unfused=unfused,
    )
