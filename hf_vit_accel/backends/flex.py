"""torch's FlexAttention with gradients and a user's `score_mod`, compiled once for every layout.

FlexAttention skips the blocks that a block mask leaves out. Our mask follows from the segments' offsets alone. So it
is computed on the host, by blocks rather than elements, and sent with the other metadata.

`T` packed rows, `S` segments, `H` heads, `D` head dim, `B` blocks of BLOCK rows, `C` columns of block numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Backend, Plan, Request, ScoreMod
from hf_vit_accel.layout import Array, Segments

BLOCK = 128
"""Rows of a block of queries or keys: FlexAttention's default, a multiple of every tile of its kernels."""

FEWEST = 2 * BLOCK
"""Shorter calls are padded to so many rows, or they would be compiled separately: torch.compile treats a size of 1 (one
block) as a constant, and FlexAttention has another kernel below 128 rows."""

TRITON = machine.Package(module="triton", distribution="triton", install="it comes with a CUDA build of torch")


class Flex(Backend):
    """Attend all segments in one call: compiled on CUDA, by the plain-torch reference on other devices."""

    name = "flex"
    needs = replace(
        HALF,
        packages=(TRITON,),
        cuda=False,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dim_max=256,
        differentiable=True,
        score_mods=True,
    )
    by_name_only = True  # it compiles for seconds before its first result

    def plan(self, segments: Segments, request: Request) -> Plan:
        return Plan(backend=self, request=request, arrays=block_mask(segments))

    def prepare(self, plan: Plan) -> None:
        # Layouts differ in these sizes, so the compiler must not take them for constants. q, k and v are marked in
        # `attend`, at every call.
        if not compiles(plan.request.device):
            return
        for name, tensor in plan.tensors.items():
            dynamic_dims = (0,) if name == "segment_T" else range(2, tensor.dim())
            for dim in dynamic_dims:
                torch._dynamo.mark_dynamic(tensor, dim)

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        request = plan.request
        if not compiles(q_THD.device):
            return reference(q_THD, k_THD, v_THD, plan.tensors["segment_T"], request.scale, request.score_mod)
        rows, heads, head_dim = q_THD.shape
        # With gradient mode enabled, torch would compile again and write tensors that only a backward reads.
        with nullcontext() if request.grad else torch.no_grad():
            qkv_T3HD = _packed(q_THD, k_THD, v_THD, request.grad)
            torch._dynamo.mark_dynamic(qkv_T3HD, 0)
            attend = compiled(q_THD.device, request.dtype, heads, head_dim, request.scale, request.score_mod)
            out_THD = attend(qkv_T3HD, *plan.tensors.values())
        return out_THD[:rows] if rows < FEWEST else out_THD


def block_mask(segments: Segments) -> dict[str, Array]:
    """Compute which blocks of keys every block of queries attends to, and the segment of every row. All int32.

    A partial block of keys shares a segment with some row of the block of queries. In a full block, all pairs of rows
    share one segment, so that no mask need be evaluated. Segments are symmetric: every array equals its own transpose,
    along which the backward walks.

    Array shapes depend only on the rows and on the declared longest segment, not on the layout. A block of queries
    meets at most its own block and ceil((longest - 1) / BLOCK) on either side. One column is spare, because kernels
    prefetch. Both kinds have equally many columns, because torch 2.11 uses the stride of the partial blocks for the
    full ones.

    For every block of queries, counts are those of its blocks of keys, which bound the kernels' loops. The blocks'
    numbers rise; those after the count are valid but unused.
    """
    lengths_S = segments.lengths_S[segments.lengths_S > 0]
    longest = segments.max_seqlen
    spare = max(FEWEST - segments.rows, 0)
    if spare:  # the rows that pad a short call are a segment of their own
        lengths_S = np.append(lengths_S, spare)
        longest = max(longest, spare)
    cu_seqlens_S1 = np.concatenate([[0], np.cumsum(lengths_S, dtype=np.int64)])
    segment_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    rows = int(cu_seqlens_S1[-1])

    # The rows and blocks of all segments that a block of queries meets.
    starts_B = np.arange(0, rows, BLOCK)
    blocks = len(starts_B)
    first_B = segment_T[starts_B]
    last_B = segment_T[np.minimum(starts_B + BLOCK, rows) - 1]
    start_B = cu_seqlens_S1[first_B]
    stop_B = cu_seqlens_S1[last_B + 1]
    low_B = start_B // BLOCK
    high_B = -(-stop_B // BLOCK)

    # The blocks inside a single segment are full. A short last block is full, too: kernels never read past its end.
    full_low_B = -(-start_B // BLOCK)
    full_high_B = np.where(stop_B == rows, blocks, stop_B // BLOCK)
    full_B = np.where(first_B == last_B, np.maximum(full_high_B - full_low_B, 0), 0)
    partial_B = high_B - low_B - full_B

    column_C = np.arange(min(blocks, 1 + 2 * -(-(longest - 1) // BLOCK)) + 1)
    is_after_full_BC = (full_B > 0)[:, None] & (low_B[:, None] + column_C >= full_low_B[:, None])
    gap_BC = np.where(is_after_full_BC, full_B[:, None], 0)
    partial_BC = low_B[:, None] + column_C + gap_BC
    full_BC = full_low_B[:, None] + column_C
    assert max(partial_B.max(), full_B.max()) < len(column_C)

    last_block = blocks - 1
    return {
        "segment_T": segment_T.astype(np.int32),
        "partial_counts_11B": partial_B.astype(np.int32)[None, None],
        "partial_blocks_11BC": np.minimum(partial_BC, last_block).astype(np.int32)[None, None],
        "full_counts_11B": full_B.astype(np.int32)[None, None],
        "full_blocks_11BC": np.minimum(full_BC, last_block).astype(np.int32)[None, None],
    }


def reference(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segment_T: Tensor, scale: float, score_mod: ScoreMod | None
) -> Tensor:
    """Compute the same in plain torch, segment by segment; for the CPU, where FlexAttention has no gradients."""
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    outs_LHD = []
    start = 0
    for length in torch.unique_consecutive(segment_T[: len(q_THD)], return_counts=True)[1].tolist():
        q_LHD, k_LHD, v_LHD = (x_THD[start : start + length].to(wide) for x_THD in (q_THD, k_THD, v_THD))
        scores_HLL = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scale
        if score_mod is not None:
            rows_L = torch.arange(start, start + length, device=q_THD.device)
            scores_HLL = _modified(score_mod, scores_HLL, rows_L, rows_L)
        # A score_mod may leave a row no score above -inf. The result of such a row is zero.
        is_empty_HL1 = scores_HLL.amax(-1, keepdim=True) == float("-inf")
        weights_HLL = scores_HLL.masked_fill(is_empty_HL1, 0.0).softmax(-1).masked_fill(is_empty_HL1, 0.0)
        outs_LHD.append(torch.einsum("hqk,khd->qhd", weights_HLL, v_LHD).to(q_THD.dtype))
        start += length
    return torch.cat(outs_LHD)


def _modified(score_mod: ScoreMod, scores_HTT: Tensor, q_T: Tensor, k_T: Tensor) -> Tensor:
    """Apply a score_mod to every score, as a scalar."""
    # FlexAttention uses this mode, too. Without it, a score_mod cannot index a tensor by a vmapped scalar.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    batch = q_T.new_zeros(())
    heads_H = torch.arange(len(scores_HTT), device=q_T.device)
    over_keys = torch.vmap(score_mod, in_dims=(0, None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(0, None, None, 0, None))
    over_heads = torch.vmap(over_queries, in_dims=(0, None, 0, None, None))
    with TransformGetItemToIndex():
        return over_heads(scores_HTT, batch, heads_H, q_T, k_T)


def compiles(device: torch.device) -> bool:
    """Return whether tensors on this device go through the compiled kernels."""
    return device.type == "cuda"


def _packed(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, grad: bool) -> Tensor:
    """Return q, k and v as one (T, 3, H, D) of at least FEWEST rows: the projection behind the views, or a copy.

    A single layout needs a single kernel. It must also be a complete projection. For a slice of unknown offset and row
    stride, the compiler knows no alignment, so its kernel would not load vectors.
    """
    rows, heads, head_dim = q_THD.shape
    width = heads * head_dim
    strides = (3 * width, head_dim, 1)
    bytes_between = width * q_THD.element_size()
    may_be_views = rows >= FEWEST and not grad and not q_THD.storage_offset()
    if may_be_views and all(
        x_THD.stride() == strides and x_THD.data_ptr() == q_THD.data_ptr() + index * bytes_between
        for index, x_THD in enumerate((q_THD, k_THD, v_THD))
    ):
        return q_THD.as_strided((rows, 3, heads, head_dim), (3 * width, width, head_dim, 1))
    qkv_T3HD = torch.stack((q_THD, k_THD, v_THD), dim=1)
    return F.pad(qkv_T3HD, (0, 0, 0, 0, 0, 0, 0, FEWEST - rows)) if rows < FEWEST else qkv_T3HD


@lru_cache(maxsize=32)  # bounded, because it also keeps the tensors that a score_mod captured
def compiled(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, scale: float, score_mod: ScoreMod | None
) -> Callable[..., Tensor]:
    """Return `_flex`, which is compiled at its first call, once for any number of rows and any layout.

    Each has a code object of its own, because torch.compile compiles a code object 8 times at most. A device needs 3 of
    them: tensors of `inference_mode`, other tensors, and gradients.
    """
    function = _flex(scale, score_mod)
    assert isinstance(function, FunctionType)
    name = f"flex_{heads}x{head_dim}_{dtype}".replace(".", "_")
    code = function.__code__.replace(co_name=name)
    named = FunctionType(code, function.__globals__, name, None, function.__closure__)
    # dynamic=False: heads, strides and scale are constants of the kernel; only marked sizes are dynamic.
    # fullgraph=True: otherwise uncompilable code would run as it is, with all T x T scores in memory.
    return torch.compile(named, dynamic=False, fullgraph=True)


def _flex(scale: float, score_mod: ScoreMod | None) -> Callable[..., Tensor]:
    """Return the function to compile: q, k, v (T, 3, H, D) and the arrays of `block_mask`, in order, to (T, H, D)."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def attend(
        qkv_T3HD: Tensor,
        segment_T: Tensor,
        partial_counts_11B: Tensor,
        partial_blocks_11BC: Tensor,
        full_counts_11B: Tensor,
        full_blocks_11BC: Tensor,
    ) -> Tensor:
        def same_segment(batch: object, head: object, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return segment_T[q_idx] == segment_T[kv_idx]

        rows = qkv_T3HD.shape[0]
        blocks = (partial_counts_11B, partial_blocks_11BC, full_counts_11B, full_blocks_11BC)
        mask = BlockMask(
            (rows, rows),
            *blocks,  # blocks of keys, for every block of queries
            *blocks,  # blocks of queries, for every block of keys: the transpose
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=same_segment,
        )
        options = _FLOAT32_OPTIONS if qkv_T3HD.dtype == torch.float32 else None
        q_1HTD, k_1HTD, v_1HTD = (x_THD.transpose(0, 1).unsqueeze(0) for x_THD in qkv_T3HD.unbind(1))
        out_1HTD = flex_attention(q_1HTD, k_1HTD, v_1HTD, score_mod, mask, scale, kernel_options=options)
        return out_1HTD[0].transpose(0, 1)

    return attend


_FLOAT32_OPTIONS: Any = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
"""Tiles of 53 KB. For head dims that are no power of two, torch's default tiles of float32 take 181 KB of shared
memory: more than any GPU but the largest has."""
