"""The operations of a tower, one file each, and the table from which they are chosen.

A plain-torch reference defines what each computes: tests compare kernels with it, and `tower.proof` compares it with
transformers. Projections have no name in `status`, so `TABLE` has no line for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import Tensor

from hf_vit_accel.families.base import Block, Parts
from hf_vit_accel.ops import (
    embedding,
    heads,
    merger,
    mlp,
    norm,
    product,
)
from hf_vit_accel.ops import window_attention as window
from hf_vit_accel.ops.base import AddThen, Apply, BuiltOperation, Context, Operation, Rotate
from hf_vit_accel.ops.launch import why_not_triton

__all__ = ["PARTS", "TABLE", "Context", "LayerOps", "Operation", "Ops", "build", "why_not_triton"]

TABLE: tuple[Operation, ...] = (
    embedding.PATCH_EMBED,
    embedding.POSITIONS,
    norm.OPERATION,
    heads.OPERATION,
    embedding.ROPE,
    merger.DOWNSAMPLE,
    merger.OPERATION,
    mlp.OPERATION,
    window.OPERATION,
)
PARTS: Mapping[str, str] = {operation.name: operation.summary for operation in TABLE}
"""The names of operations in `status`, with a summary of each."""

Rows = Tensor
Table = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerOps:
    """The operations of one layer.

    Attributes:
        norm1: (x, delta) to (x + delta, norm of it); may write the sum to x.
        qkv: rows to packed queries, keys and values, (T, 3 * heads * head dim).
        proj, mlp: rows to what the residual stream receives.
    """

    norm1: AddThen
    qkv: Apply
    proj: Apply
    norm2: AddThen
    mlp: Apply


@dataclass(frozen=True, kw_only=True, eq=False)
class Ops:
    """The operations of one tower, on one device in one dtype.

    Attributes:
        embed: pixels to rows.
        add_positions: adds interpolated position embeddings to rows; None for a tower without.
        tables: rows and positions (T, 2) to cos and sin, (T, D) each.
        attend_window: attention within windows; None where a backend attends in them.
        merge: the merger of the last layer, as `deepstack`; None for a tower that does not merge.
        finish: the last layer's (x, delta) to the rows that the tower returns, and to features if it has a merger.
        finish_by: the same with another function in the place of `merge`.
        deepstack: by layer, (x, delta) to (x + delta, the merger's result); may write the sum to x.
        unfused: names of parts that are not fused, with the reason.
    """

    parts: Parts
    embed: Apply
    add_positions: Callable[[Rows, Tensor, Tensor], Rows] | None
    tables: Callable[[Rows, Tensor], Table]
    rotate: Rotate
    attend_window: window.AttendWindows | None
    layers: tuple[LayerOps, ...]
    merge: AddThen | None
    finish: merger.Finish
    finish_by: Callable[[AddThen | None], merger.Finish]
    deepstack: Mapping[int, AddThen]
    fused: frozenset[str]
    unfused: Mapping[str, str]


def build(parts: Parts, context: Context, why_plain: Mapping[str, str] = MappingProxyType({})) -> Ops:
    """Build a tower's operations: fused where that is possible and `why_plain` has no reason, else by its modules."""
    built: dict[str, dict[int, BuiltOperation]] = {}
    unfused: dict[str, str] = {}
    for operation in TABLE:
        built[operation.name], reason = operation.build(parts, context, why_plain.get(operation.name))
        if reason is not None:
            unfused[operation.name] = reason
    downsampled = None if parts.downsample is None else built["downsample"][id(parts.downsample)]
    deepstack = {layer: built["mergers"][id(module)] for layer, module in parts.deepstack.items()}
    merge = None if parts.merger is None else built["mergers"][id(parts.merger)]
    finish_by = partial(merger.finish, _final_norm(parts, built, context), downsampled, grad=context.grad)
    return Ops(
        parts=parts,
        embed=_embed(parts, built, context),
        add_positions=None if parts.table is None else built["positions"][id(parts.table)],
        tables=embedding.tables(parts.rotary, context),
        rotate=built["rope"][id(parts)],
        attend_window=built["window_attention"].get(id(parts)),
        layers=tuple(_layer(block, built, context) for block in parts.blocks),
        merge=merge,
        finish=finish_by(merge),
        finish_by=finish_by,
        deepstack=MappingProxyType(deepstack),
        fused=frozenset(context.fused),
        unfused=MappingProxyType(unfused),
    )


BuiltOperations = Mapping[str, Mapping[int, BuiltOperation]]
"""The operations that were built, by the name of the part and the `id` of the module."""


def _embed(parts: Parts, built: BuiltOperations, context: Context) -> Apply:
    embed: Apply = built["patch_embed"][id(parts)]
    if parts.embed_norm is None:
        return embed
    norm_rows: AddThen = built["norms"][id(parts.embed_norm)]
    if context.casts_weights:  # the norm's weights are fp32: its result starts the residual stream, which stays fp32
        norm_rows = norm.plain(parts.embed_norm, context, in_rows_dtype=False)
    return lambda pixels_TP: norm_rows(embed(pixels_TP), None)[1]


def _final_norm(parts: Parts, built: BuiltOperations, context: Context) -> AddThen | None:
    if parts.final_norm is None:
        return None
    if context.rows_dtype is not None:  # the tower returns it, in the dtype that autocast chooses for norms
        return norm.plain(parts.final_norm, context, in_rows_dtype=False)
    final_norm: AddThen = built["norms"][id(parts.final_norm)]
    return final_norm


def _layer(block: Block, built: BuiltOperations, context: Context) -> LayerOps:
    norm1: AddThen = built["norms"][id(block.norm1)]
    norm2: AddThen = built["norms"][id(block.norm2)]
    if not mlp.is_mixture_of_experts(block.mlp):
        mlp_op: Apply = built["mlp"][id(block.mlp)]
    else:
        mlp_op = context.called(block.mlp)
    if product.is_foreign(block.mlp, context):
        norm2 = norm.before_foreign(block.norm2, context)
    if any(product.is_foreign(module, context) for module in block.qkv):
        norm1 = norm.before_foreign(block.norm1, context)
    return LayerOps(
        norm1=norm1,
        qkv=product.build_qkv(block, context, built["heads"][id(block)] if block.shapes_heads else None),
        proj=product.build_linear(block.proj, context),
        norm2=norm2,
        mlp=mlp_op,
    )
