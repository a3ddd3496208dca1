"""torch's FlexAttention, compiled once for every layout: gradients, and a user's own change of the scores.

FlexAttention skips what a block mask leaves out. Ours follows from the segments' offsets alone, so it is computed on
the host, block by block rather than element by element, and travels with the other metadata. `T` packed rows, `S`
segments, `H` heads, `D` head dim, `B` blocks of BLOCK rows, `C` columns of block numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from hf_vit_accel.backends.base import HALF, Backend, Needs, Plan, Request, ScoreMod
from hf_vit_accel.layout import Array, Segments

BLOCK = 128
"""Rows of a block of queries, and of keys: FlexAttention's own default, a multiple of every tile of its kernels."""

FEWEST = 2 * BLOCK
"""Rows below which a call is padded. torch.compile takes a size of 1 for a constant, which one block would be, and
FlexAttention has another kernel for fewer than 128 rows: each would be compiled on its own."""

TRITON = machine.Package(module="triton", distribution="triton", install="it comes with a CUDA build of torch")


class Flex(Backend):
    """One call for all segments: compiled on CUDA, by the plain reference below on other devices."""

    name = "flex"
    needs = Needs(cuda=False, differentiable=True, score_mods=True)
    needs_on_cuda = replace(
        HALF,
        packages=(TRITON,),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dim_max=256,
        differentiable=True,
        score_mods=True,
    )

    def needs_on(self, device: torch.device) -> Needs:
        return self.needs_on_cuda if device.type == "cuda" else self.needs

    def plan(self, segments: Segments, request: Request) -> Plan:
        return Plan(backend=self, segments=segments, request=request, arrays=block_mask(segments))

    def prepare(self, plan: Plan) -> None:
        # What layouts differ in: marked for the compiler here, once, and for q, k and v at every call.
        if compiles(plan.request.device) and not torch.compiler.is_compiling():
            for name, tensor in plan.tensors.items():
                for dim in (0,) if name == "segment_T" else range(2, tensor.dim()):
                    torch._dynamo.mark_dynamic(tensor, dim)

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        request, tensors = plan.request, plan.tensors
        if not compiles(q_THD.device):
            return reference(q_THD, k_THD, v_THD, tensors, request.scale, request.score_mod)
        rows, heads, head_dim = q_THD.shape
        # An enabled gradient mode would be compiled apart, and write what only a backward pass reads.
        with nullcontext() if request.grad else torch.no_grad():
            qkv_T3HD = _packed(q_THD, k_THD, v_THD, request.grad)
            if torch.compiler.is_compiling():  # someone else's graph takes it in
                attend: Callable[..., Tensor] = _flex(request.scale, request.score_mod)
            else:
                torch._dynamo.mark_dynamic(qkv_T3HD, 0)
                attend = compiled(q_THD.device, request.dtype, heads, head_dim, request.scale, request.score_mod)
            out_THD = attend(qkv_T3HD, *tensors.values())
        return out_THD[:rows] if rows < FEWEST else out_THD


def block_mask(segments: Segments) -> dict[str, Array]:
    """Which blocks of keys each block of queries attends to, and each row's segment, all int32.

    segment_T: the segment that a row belongs to. partial_counts_11B, partial_blocks_11BC: how many blocks of keys share
    a segment with some row, and their numbers in rising order; full_*: those where every row shares it with every row,
    so that no mask need be evaluated. Counts bound the kernels' loops; the numbers after them are valid but unused.
    Segments are symmetric, so each array serves as its own transpose, which the backward pass walks along.

    Shapes depend on the rows and on the longest length declared, never on the layout: a block of queries meets at most
    its own block and ceil((longest - 1) / BLOCK) on either side. One column is spare, for kernels that prefetch. Both
    kinds have equally many columns, as torch 2.11 steps through the full ones by the partial ones' stride.
    """
    lengths_S, longest = segments.lengths_S[segments.lengths_S > 0], segments.max_seqlen
    if spare := max(FEWEST - segments.rows, 0):  # the rows that a short call is padded with: a segment of their own
        lengths_S, longest = np.append(lengths_S, spare), max(longest, spare)
    cu_seqlens_S1 = np.concatenate([[0], np.cumsum(lengths_S, dtype=np.int64)])
    segment_T, rows = np.repeat(np.arange(len(lengths_S)), lengths_S), int(cu_seqlens_S1[-1])
    starts_B = np.arange(0, rows, BLOCK)
    blocks = len(starts_B)
    first_B, last_B = segment_T[starts_B], segment_T[np.minimum(starts_B + BLOCK, rows) - 1]
    start_B, stop_B = cu_seqlens_S1[first_B], cu_seqlens_S1[last_B + 1]  # the rows of all segments that a block meets
    low_B, high_B = start_B // BLOCK, -(-stop_B // BLOCK)
    # Within one segment, the blocks that it fills are full; so is a short last block, past whose end kernels look not.
    full_low_B, full_high_B = -(-start_B // BLOCK), np.where(stop_B == rows, blocks, stop_B // BLOCK)
    full_B = np.where(first_B == last_B, np.maximum(full_high_B - full_low_B, 0), 0)
    partial_B = high_B - low_B - full_B

    column_C = np.arange(min(blocks, 1 + 2 * -(-(longest - 1) // BLOCK)) + 1)
    gap_BC = np.where((full_B > 0)[:, None] & (low_B[:, None] + column_C >= full_low_B[:, None]), full_B[:, None], 0)
    numbers = {"partial": low_B[:, None] + column_C + gap_BC, "full": full_low_B[:, None] + column_C}
    counts = {"partial": partial_B, "full": full_B}
    assert max(partial_B.max(), full_B.max()) < len(column_C)
    arrays = {"segment_T": segment_T.astype(np.int32)}
    for kind in ("partial", "full"):
        arrays[f"{kind}_counts_11B"] = counts[kind].astype(np.int32)[None, None]
        arrays[f"{kind}_blocks_11BC"] = np.minimum(numbers[kind], blocks - 1).astype(np.int32)[None, None]
    return arrays


def reference(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, tensors: Mapping[str, Tensor], scale: float, score_mod: ScoreMod | None
) -> Tensor:
    """The same in plain torch, walking the same block mask. tensors: those of `block_mask`.

    For the CPU and for tests: FlexAttention's own uncompiled form holds all T x T scores and has no gradients there.
    """
    rows, segment_T, outs = q_THD.shape[0], tensors["segment_T"], []
    partial_B, full_B = (tensors[f"{kind}_counts_11B"][0, 0].tolist() for kind in ("partial", "full"))
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    inside_T = torch.arange(BLOCK, device=q_THD.device)
    for block in range(-(-rows // BLOCK)):
        partial = tensors["partial_blocks_11BC"][0, 0, block, : partial_B[block]]
        full = tensors["full_blocks_11BC"][0, 0, block, : full_B[block]]
        q_T = block * BLOCK + inside_T[: rows - block * BLOCK]
        k_T = (torch.cat([partial, full])[:, None] * BLOCK + inside_T).flatten()
        unmasked_T = torch.arange(len(k_T), device=k_T.device) >= len(partial) * BLOCK
        k_T, unmasked_T = k_T[k_T < rows], unmasked_T[k_T < rows]

        scores_HTT = torch.einsum("qhd,khd->hqk", q_THD[q_T].to(wide), k_THD[k_T].to(wide)) * scale
        if score_mod is not None:
            scores_HTT = _modified(score_mod, scores_HTT, q_T, k_T)
        mask_TT = unmasked_T | (segment_T[q_T][:, None] == segment_T[k_T])
        scores_HTT = scores_HTT.masked_fill(~mask_TT, float("-inf"))
        nothing_HT1 = scores_HTT.amax(-1, keepdim=True) == float("-inf")  # only a score_mod makes such rows: zeros
        weights_HTT = scores_HTT.masked_fill(nothing_HT1, 0.0).softmax(-1).masked_fill(nothing_HT1, 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights_HTT, v_THD[k_T].to(wide)).to(q_THD.dtype))
    return torch.cat(outs)


def _modified(score_mod: ScoreMod, scores_HTT: Tensor, q_T: Tensor, k_T: Tensor) -> Tensor:
    """What a score_mod makes of every score, each given to it as a scalar."""
    # As FlexAttention itself does it; without the mode, indexing by a scalar of a batch is an error.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    batch, heads_H = q_T.new_zeros(()), torch.arange(len(scores_HTT), device=q_T.device)
    each = torch.vmap(score_mod, in_dims=(0, None, None, None, 0))
    each = torch.vmap(each, in_dims=(0, None, None, 0, None))
    each = torch.vmap(each, in_dims=(0, None, 0, None, None))
    with TransformGetItemToIndex():
        return each(scores_HTT, batch, heads_H, q_T, k_T)


def compiles(device: torch.device) -> bool:
    """Whether tensors on this device go through the compiled kernels."""
    return device.type == "cuda"


def _packed(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, grad: bool) -> Tensor:
    """q, k and v as one (T, 3, H, D): the projection that they are views of, or a copy; of FEWEST rows at least.

    One layout, so that there is one kernel. And a whole one: a part's place in memory, and the stride of its rows,
    would be unknown to the compiler where the number of rows is, and the kernel would not load vectors.
    """
    rows, heads, head_dim = q_THD.shape
    strides, step = (3 * heads * head_dim, head_dim, 1), heads * head_dim * q_THD.element_size()
    if rows < FEWEST or grad or torch.compiler.is_compiling() or q_THD.storage_offset():
        together = False
    else:
        places = enumerate((q_THD, k_THD, v_THD))
        together = all(x.stride() == strides and x.data_ptr() == q_THD.data_ptr() + i * step for i, x in places)
    if together:
        return q_THD.as_strided((rows, 3, heads, head_dim), (strides[0], heads * head_dim, head_dim, 1))
    qkv_T3HD = torch.stack((q_THD, k_THD, v_THD), dim=1)
    return F.pad(qkv_T3HD, (0, 0, 0, 0, 0, 0, 0, FEWEST - rows)) if rows < FEWEST else qkv_T3HD


@lru_cache(maxsize=32)  # bounded, as it also holds what a score_mod captured
def compiled(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, scale: float, score_mod: ScoreMod | None
) -> Callable[..., Tensor]:
    """`_flex`, to be compiled at its first call, once for any number of rows and any layout.

    Each has a code object of its own: torch.compile bounds how often it compiles one, for whatever reason (8 times, of
    which a device takes 3: tensors of `inference_mode`, others, and gradients).
    """
    function, name = _flex(scale, score_mod), f"flex_{heads}x{head_dim}_{dtype}".replace(".", "_")
    code = function.__code__.replace(co_name=name)
    return _compile(FunctionType(code, function.__globals__, name, None, function.__closure__))


def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Static but for what is marked: heads, strides and scale are constants of the kernel. If it were not for the full
    # graph, what cannot be compiled would run as it is, with all T x T scores in memory.
    return torch.compile(function, dynamic=False, fullgraph=True)


def _flex(scale: float, score_mod: ScoreMod | None) -> Any:
    """What is compiled: from q, k, v (T, 3, H, D) and the tensors of `block_mask`, in their order, to (T, H, D)."""
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

        blocks = partial_counts_11B, partial_blocks_11BC, full_counts_11B, full_blocks_11BC
        mask = BlockMask(
            (qkv_T3HD.shape[0], qkv_T3HD.shape[0]),
            *blocks,
            *blocks,  # of keys by block of queries, and of queries by block of keys
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=same_segment,
        )
        options = _FLOAT32_OPTIONS if qkv_T3HD.dtype == torch.float32 else None
        q_1HTD, k_1HTD, v_1HTD = (x_THD.transpose(0, 1).unsqueeze(0) for x_THD in qkv_T3HD.unbind(1))
        out_1HTD = flex_attention(q_1HTD, k_1HTD, v_1HTD, score_mod, mask, scale, kernel_options=options)
        return out_1HTD[0].transpose(0, 1)

    return attend


_FLOAT32_OPTIONS: Any = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
"""Tiles of 53 KB. For head dims that are no power of two torch has one default for all dtypes, whose tiles of 181 KB of
float32 are more shared memory than any GPU but the largest has."""
