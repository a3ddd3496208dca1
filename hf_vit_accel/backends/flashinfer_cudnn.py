"""cuDNN's fused attention through FlashInfer (`flashinfer.cudnn`), for bf16 and fp16.

FlashInfer's public call resolves metadata, cache key and cuDNN plan every time: about 0.3 ms of Python. Here that
happens once per class of layouts and strides, and every layer only rebinds pointers. Segment offsets are in elements
and follow the strides. So q, k and v may be views of the packed projection.

`T` packed rows, `S` segments, `H` heads, `D` head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Backend, Plan, Request
from hf_vit_accel.layout import Segments

Tensors = tuple[Tensor, ...]

_REMEDY = "pip install flashinfer-python nvidia-cudnn-frontend"
FLASHINFER = machine.Package(module="flashinfer", distribution="flashinfer-python", install=_REMEDY)
CUDNN_FRONTEND = machine.Package(module="cudnn", distribution="nvidia-cudnn-frontend", install=_REMEDY)

_OLDEST_CUDNN = 91900
"""The oldest release that this backend was run with, as `cudnn.backend_version()` numbers them."""
INT32_END = 2**31
"""Offsets are int32, so every offset in elements must be below it."""
_OFFSETS = ("batch_offsets_q", "batch_offsets_k", "batch_offsets_v", "batch_offsets_o")
_UIDS = (
    *("Q_UID", "K_UID", "V_UID", "O_UID", "ACTUAL_SEQ_LENS_Q_UID", "ACTUAL_SEQ_LENS_KV_UID"),
    *("RAGGED_Q_UID", "RAGGED_K_UID", "RAGGED_V_UID", "RAGGED_O_UID"),
)
_SCALE_UIDS = (*("Q_SCALE_UID", "K_SCALE_UID", "V_SCALE_UID"), *("S_SCALE_UID", "S_DESCALE_UID", "O_SCALE_UID"))


def round_segments(count: int) -> int:
    """Return the number of segments to declare: at most 1/8 more, exact up to 8.

    Every new count needs a new cuDNN plan (about 50 ms), so counts are rounded. They are rounded finely because a
    declared segment costs time even if it is empty: 256 windows declared as 512 took 180 us instead of 137 on an H200.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def round_max_seqlen(length: int) -> int:
    """Return the max_seqlen to declare: the next power of two, at least 64. Declaring 16x too much cost no time."""
    return max(64, 1 << (length - 1).bit_length())


class FlashinferCudnn(Backend):
    """Attend all segments in one call. Offsets in elements must fit into int32, which bounds the rows."""

    name = "flashinfer_cudnn"
    needs = replace(HALF, packages=(FLASHINFER, CUDNN_FRONTEND))

    def lacks(self) -> tuple[str, ...]:
        import cudnn
        from flashinfer.cudnn.prefill import (  # noqa: F401  (most are semi-private; 0.7.2 has all, 0.6.12 only half)
            UIDs,
            _create_cudnn_handle,
            _PrefillMetadata,
            prepare_cudnn_batch_prefill,
        )

        version = int(cudnn.backend_version())
        if version < _OLDEST_CUDNN:
            return (f"cuDNN {version} is older than {_OLDEST_CUDNN} (upgrade nvidia-cudnn or torch)",)
        if "tensor_uids" not in inspect.signature(cudnn.pygraph.execute).parameters:
            return (f"the cuDNN frontend is older than 1.31 ({_REMEDY})",)
        return ()

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        largest = (INT32_END - 1) // (3 * request.heads * request.head_dim)
        return [] if segments.rows <= largest else [f"{segments.rows} rows, its int32 offsets reach {largest}"]

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        return round_segments(segments), rows

    def plan(self, segments: Segments, request: Request) -> Plan:
        width = request.heads * request.head_dim
        spare = round_segments(segments.count) - segments.count
        # The spare segments have length zero and start at the end of the rows, so they address no row.
        padded_S1 = np.pad(segments.cu_seqlens_S1, (0, spare), mode="edge").reshape(-1, 1, 1, 1)
        arrays = {
            "lengths": np.pad(segments.lengths_S, (0, spare)).reshape(-1, 1, 1, 1),
            "dense": padded_S1 * np.int32(width),
            "packed": padded_S1 * np.int32(3 * width),
        }
        host = {"max_seqlen": round_max_seqlen(segments.max_seqlen)}
        return Plan(backend=self, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:
        request = plan.request
        if request.packed:
            row_T3HD = torch.empty(1, 3, request.heads, request.head_dim, dtype=request.dtype, device=request.device)
            sequences = _sequences(plan, (True, True, True))
            cudnn_plan_for(row_T3HD.unbind(1), sequences, plan.host["max_seqlen"], request.scale)

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        heads, head_dim = q_THD.shape[1:]
        packed_strides = (3 * heads * head_dim, head_dim, 1)
        packed = [x_THD.stride() == packed_strides for x_THD in (q_THD, k_THD, v_THD)]
        pairs = zip((q_THD, k_THD, v_THD), packed, strict=True)
        qkv = tuple(x_THD if is_packed else x_THD.contiguous() for x_THD, is_packed in pairs)
        sequences = _sequences(plan, packed)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        cudnn_plan_for(qkv, sequences, plan.host["max_seqlen"], plan.request.scale).run(qkv, sequences, out_THD)
        return out_THD


def _sequences(plan: Plan, packed: Sequence[bool]) -> Tensors:
    """Return the lengths, and the offsets in elements of q, k and v, packed or not, and of the dense output."""
    dense_offsets = plan.tensors["dense"]
    offsets = [plan.tensors["packed"] if is_packed else dense_offsets for is_packed in packed]
    return plan.tensors["lengths"], *offsets, dense_offsets


@machine.probe
def _prefill_module() -> ModuleType:
    import flashinfer.cudnn.prefill as prefill  # the import takes 3 to 4 s, so it waits for the first use

    return prefill


class CudnnPlan:
    """One built cuDNN plan, which cuDNN calls a graph: neither a `Plan` of a backend nor a CUDA graph.

    Strides and the declared max_seqlen are built into it. `sequences` are lengths, and offsets of q, k, v and output.
    """

    def __init__(self, qkv: Tensors, sequences: Tensors, max_seqlen: int, scale: float, out_dtype: torch.dtype) -> None:
        prefill = _prefill_module()
        lengths_S, *offsets = sequences
        metadata = prefill._PrefillMetadata(
            max_token_per_sequence=max_seqlen,
            max_sequence_kv=max_seqlen,
            causal=False,
            return_lse=False,
            o_data_type=out_dtype,
            actual_seq_lens_q=lengths_S,
            actual_seq_lens_kv=lengths_S,
            **dict(zip(_OFFSETS, offsets, strict=True)),
        )
        self._graph = prefill.prepare_cudnn_batch_prefill(*qkv, scale, lengths_S, metadata=metadata).graph
        names = _UIDS + (_SCALE_UIDS if qkv[0].dtype == torch.float8_e4m3fn else ())
        self._uids = tuple(getattr(prefill.UIDs, name).value for name in names)
        self._workspace_bytes = max(int(self._graph.get_workspace_size()), 1)

    def run(self, qkv: Tensors, sequences: Tensors, out_THD: Tensor, scales: Tensors = ()) -> None:
        """Launch on the current stream, with the scales of quantised q, k and v, in the order of `_SCALE_UIDS`."""
        stream = torch.cuda.current_stream(out_THD.device)
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=out_THD.device)
        handle = _prefill_module()._create_cudnn_handle(stream)
        # Tensors in the order of the uids: the frontend would search a dict at every call. The first of `sequences` are
        # the lengths, which are those of q and those of kv.
        tensors = *qkv, out_THD, sequences[0], *sequences, *scales
        self._graph.execute(tensors, tensor_uids=self._uids, workspace=workspace, handle=handle)


CUDNN_PLANS: machine.LRU[CudnnPlan] = machine.LRU(entries=256, cost=256)
"""The built cuDNN plans; `CUDNN_PLANS.misses` counts builds."""


def cudnn_plan_for(
    qkv: Tensors, sequences: Tensors, max_seqlen: int, scale: float, out_dtype: torch.dtype | None = None
) -> CudnnPlan:
    """Return the cuDNN plan for these strides; build it if it is not cached, which no capture of a graph allows."""
    q_THD = qkv[0]
    out_dtype = out_dtype or q_THD.dtype
    strides = tuple(x_THD.stride() for x_THD in qkv)
    count = sequences[0].shape[0]
    key = (q_THD.device, q_THD.dtype, out_dtype, q_THD.shape[1:], strides, count, max_seqlen, scale)

    def make() -> tuple[CudnnPlan, int]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a cuDNN plan must be built before a CUDA graph is captured; run the same sizes once")
        return CudnnPlan(qkv, sequences, max_seqlen, scale, out_dtype), 1

    return CUDNN_PLANS.get(key, make)
