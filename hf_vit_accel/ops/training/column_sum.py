"""Sums over all rows, as gradients of biases and of norms' weights are: in fp32 and in a fixed order, without atomics.

Each program adds up a run of rows and writes one partial sum per column; a second, small launch adds those up.
`T` rows, `F` columns, `N` sums made by one launch, `P` partial sums of each.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.launch import jit, tl

BLOCK_T, BLOCK_F = 32, 128
"""A tile of a kernel that walks over rows and sums up columns: 256 bytes of a row are whole lines of memory."""


FEW_ROWS = 8192
"""Below, launching takes longer than summing."""


def column_sum_reference(dy_TF: Tensor) -> Tensor:
    """The sum over the rows, (F,), made in fp32 and rounded to the rows' dtype."""
    return dy_TF.sum(0, dtype=torch.promote_types(dy_TF.dtype, torch.float32)).to(dy_TF.dtype)


@lru_cache(maxsize=1024)
def runs(rows: int, columns: int, device: torch.device, *, block_t: int = BLOCK_T, each_sm: int = 8) -> tuple[int, int]:
    """Rows of a run, whole tiles of them, and how many runs: as many as fill the GPU beside `columns` of programs."""
    wanted = max(1, each_sm * machine.multiprocessors(device) // columns)
    length = -(-rows // (wanted * block_t)) * block_t
    return length, -(-rows // length)


@jit
def _column_sum_kernel(
    x, partial, rows, length, row_stride, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr
):
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    first = tl.program_id(1) * length
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for at in tl.range(0, length, BLOCK_T):
        t = (first + at + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        total += tl.load(x + t.to(tl.int64) * row_stride + f, mask=inside, other=0.0).to(tl.float32)
    store_sum(partial, total, f, tl.program_id(1), WIDTH)


@jit
def store_sum(partial, total_TF, f, run, WIDTH: tl.constexpr):
    """Write a run's sums: total_TF (BLOCK_T, BLOCK_F) in fp32 over its rows, to row `run` of partial (P, WIDTH)."""
    sums = tl.sum(total_TF, 0)[None, :]
    tl.store(partial + run * WIDTH + f, sums, mask=f < WIDTH)


@jit
def _add_up_kernel(partial, out, count, width, STRIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr):
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_F), tl.float32)
    for at in tl.range(0, count, BLOCK_P):
        run = (at + tl.arange(0, BLOCK_P))[:, None]
        cell = (tl.program_id(1) * count + run) * STRIDE + f
        total += tl.load(partial + cell, mask=(run < count) & (f < width), other=0.0)
    sums = tl.sum(total, 0)[None, :]
    tl.store(out + tl.program_id(1) * width + f, sums.to(out.dtype.element_ty), mask=f < width)


def add_up(partial_NPF: Tensor, dtype: torch.dtype, width: int | None = None) -> tuple[Tensor, ...]:
    """The sums of sets of partial sums in fp32: N tensors (width,) of a dtype, of the first columns."""
    sets, count, partial_width = partial_NPF.shape
    width = width or partial_width
    out_NF = torch.empty(sets, width, dtype=dtype, device=partial_NPF.device)
    _add_up_kernel[(-(-width // 32), sets)](
        partial_NPF, out_NF, count, width, STRIDE=partial_width, BLOCK_P=256, BLOCK_F=32, num_warps=8
    )
    return out_NF.unbind(0)


def remember_sum(dy: Tensor, sums: Tensor) -> None:
    """Let `column_sum` know the sum of these very rows, which who wrote them has added up; until they are changed.

    sums: (F,), or what is still to be added up, (1, P, F).
    """
    dy._hf_vit_accel_sum = dy._version, sums  # type: ignore[attr-defined]


def flattened(dy: Tensor) -> Tensor:
    """Contiguous rows (T, F) of a gradient of more dimensions, of which the same is remembered."""
    dy_TF = dy.flatten(1)
    if (known := getattr(dy, "_hf_vit_accel_sum", None)) is not None:
        dy_TF._hf_vit_accel_sum = known  # type: ignore[attr-defined]
    return dy_TF


def column_sum(dy_TF: Tensor) -> Tensor:
    """`column_sum_reference`; by a kernel for many rows, of which 16384 take aten 55 us (H200). See `remember_sum`."""
    rows, width = dy_TF.shape
    version, sums = getattr(dy_TF, "_hf_vit_accel_sum", (None, None))
    if version == dy_TF._version and isinstance(sums, Tensor):
        return sums.to(dy_TF.dtype) if sums.ndim == 1 else add_up(sums, dy_TF.dtype)[0]
    if rows < FEW_ROWS:
        return dy_TF.sum(0)  # rows are summed in fp32, whatever their dtype
    dy_TF = dy_TF if dy_TF.stride(1) == 1 else dy_TF.contiguous()
    columns = -(-width // BLOCK_F)
    length, count = runs(rows, columns, dy_TF.device, block_t=BLOCK_T)
    partial_1PF = torch.empty(1, count, width, dtype=torch.float32, device=dy_TF.device)
    _column_sum_kernel[(columns, count)](
        dy_TF, partial_1PF, rows, length, dy_TF.stride(0), WIDTH=width, BLOCK_T=BLOCK_T, BLOCK_F=BLOCK_F, num_warps=4
    )
    return add_up(partial_1PF, dy_TF.dtype)[0]
