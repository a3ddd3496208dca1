"""The operations of a tower, each in a file of its own, and the table from which they are chosen.

A new operation is one file and its line in `TABLE`; `fuse`, status and tests pick it up. A reference in plain torch
says what each computes: kernels are held to it, and `tower.proof` holds it to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_vit_accel.families.base import Block, Parts
from hf_vit_accel.ops import (
    downsample,
    heads,
    linear,
    merger,
    mlp,
    norm,
    patch_embed,
    positions,
    project,
    rope,
)
from hf_vit_accel.ops import window_attention as window
from hf_vit_accel.ops.base import AddNorm, Apply, Context, Operation
from hf_vit_accel.ops.launch import why_not_triton

__all__ = ["PARTS", "TABLE", "Context", "LayerOps", "Operation", "Ops", "build", "why_not_triton"]

TABLE: tuple[Operation, ...] = (
    patch_embed.OPERATION,
    positions.OPERATION,
    norm.OPERATION,
    heads.OPERATION,
    rope.OPERATION,
    downsample.OPERATION,
    merger.OPERATION,
    mlp.OPERATION,
    window.OPERATION,
)
PARTS: Mapping[str, str] = {operation.name: operation.summary for operation in TABLE}
"""What `fuse` may name."""

Rows = Tensor
Finish = Callable[[Rows, Rows | None], tuple[Rows, ...]]


@dataclass(frozen=True, kw_only=True)
class LayerOps:
    """One layer. norm1, norm2: (x, delta) -> (x + delta, norm of it), x possibly in place. mlp: rows to their delta.

    qkv: rows to packed queries, keys and values, (T, 3 * heads * head dim).
    """

    norm1: AddNorm
    qkv: Apply
    proj: Apply
    norm2: AddNorm
    mlp: Apply


@dataclass(frozen=True, kw_only=True, eq=False)
class Ops:
    """The operations of one tower on one device in one dtype. fused: parts that are; unfused: the others, and why.

    tables: rows and positions (T, 2) to cos and sin (T, D). rotate: see `ops.rope`. deepstack: (x, delta) ->
    (x + delta, what the merger makes of it), x possibly in place. finish: the same of the last layer to the rows that
    the tower returns, and to features where it has a merger. attend_window: see `ops.window_attention`.
    """

    embed: Apply
    add_positions: Callable[[Rows, Tensor, Tensor], Rows] | None
    tables: Callable[[Rows, Tensor], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    attend_window: Callable[..., Tensor] | None
    layers: tuple[LayerOps, ...]
    finish: Finish
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
    each = {name: iter(operations) for name, operations in made.items()}
    shapes = [next(each["heads"]) if block.shaped else None for block in parts.blocks]
    layers = tuple(_layer(block, shape, each, context) for block, shape in zip(parts.blocks, shapes, strict=True))
    (embed,), embed_norm = made["patch_embed"], None if parts.embed_norm is None else next(each["norms"])
    if (
        embed_norm is not None and context.casts
    ):  # the residual stream starts with, and keeps, what a norm by weights of another dtype makes: fp32
        embed_norm = norm.plain(parts.embed_norm, context, rows=False)
    final_norm = None if parts.final_norm is None else next(each["norms"])
    if parts.final_norm is not None and context.rows_dtype is not None:
        final_norm = norm.plain(parts.final_norm, context, rows=False)  # it is returned: autocast may have it in fp32
    downsampled = next(each["downsample"], None)

    merge = None if parts.merger is None else next(each["mergers"])
    return Ops(
        embed=embed if embed_norm is None else lambda pixels_TP: embed_norm(embed(pixels_TP), None)[1],
        add_positions=next(each["positions"], None),
        tables=rope.tables(parts.rotary, context),
        rotate=made["rope"][0],
        attend_window=next(each["window_attention"], None),
        layers=layers,
        finish=_finish(final_norm, downsampled, merge, grad=context.grad),
        deepstack=dict(zip(parts.deepstack, each["mergers"], strict=True)),
        fused=frozenset(context.fused),
        unfused=unfused,
    )


def _layer(block: Block, shape: Any, each: Mapping[str, Iterator[Any]], context: Context) -> LayerOps:
    norm1, norm2, routed = next(each["norms"]), next(each["norms"]), mlp.routed(block.mlp)
    if routed and context.casts:  # experts are chosen by, and add up in, what autocast makes of the norm
        norm2 = norm.plain(block.norm2, context, rows=False)
    return LayerOps(
        norm1=norm1,
        qkv=project.build(block, context, shape),
        proj=linear.build(block.proj, context),
        norm2=norm2,
        mlp=context.called(block.mlp) if routed else next(each["mlp"]),
    )


def _finish(norm: AddNorm | None, downsample: Apply | None, merge: AddNorm | None, *, grad: bool) -> Finish:
    """grad: the rows that are returned are those that the merger is given, so that gradients of them, and hooks on
    them, see all that is made of them.
    """
    if norm is None and not grad:
        assert merge is not None
        return merge

    def finish(x_TE: Rows, delta_TE: Rows | None) -> tuple[Rows, ...]:
        if norm is not None:
            _, x_TE = norm(x_TE, delta_TE)
            x_TE, delta_TE = x_TE if downsample is None else downsample(x_TE), None
        if merge is None:
            return (x_TE,)
        if not grad:
            return merge(x_TE, None)
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        return x_TE, merge(x_TE, None)[1]

    return finish
