"""cuDNN's fused attention through FlashInfer (`flashinfer.cudnn`), for bf16 and fp16.

FlashInfer's public call resolves metadata, cache key and cuDNN plan each time, about 0.3 ms of Python; here that is
done once per (layout class, strides) and every layer only rebinds pointers. Segment offsets are in elements for the
strides at hand, so q, k and v may be views of the packed projection.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import HALF, Backend, Plan, Request, attention_op
from hf_vit_accel.layout import Segments

Tensors = tuple[Tensor, ...]

_REMEDY = 'pip install "hf-vit-accel[cuda]"'
FLASHINFER = machine.Package(module="flashinfer", distribution="flashinfer-python", install=_REMEDY)
CUDNN_FRONTEND = machine.Package(module="cudnn", distribution="nvidia-cudnn-frontend", install=_REMEDY)

_OLDEST_CUDNN = 91900  # the oldest release that this backend was run with
INT32_END = 2**31
_OFFSETS = ("batch_offsets_q", "batch_offsets_k", "batch_offsets_v", "batch_offsets_o")
_UIDS = (
    *("Q_UID", "K_UID", "V_UID", "O_UID", "ACTUAL_SEQ_LENS_Q_UID", "ACTUAL_SEQ_LENS_KV_UID"),
    *("RAGGED_Q_UID", "RAGGED_K_UID", "RAGGED_V_UID", "RAGGED_O_UID"),
)
_FP8_UIDS = (*("Q_SCALE_UID", "K_SCALE_UID", "V_SCALE_UID"), *("S_SCALE_UID", "S_DESCALE_UID", "O_SCALE_UID"))
_PIECES = "prepare_cudnn_batch_prefill", "_PrefillMetadata", "UIDs", "_create_cudnn_handle"
"""What is used of FlashInfer, most of it semi-private: 0.7.2 has all of it."""


def round_segments(count: int) -> int:
    """The segment count to declare: at most 1/8 more, exact up to 8.

    A new count is a new cuDNN plan (about 50 ms), and every declared segment costs time even when empty: 256 windows
    declared as 512 took 180 us instead of 137 on an H200. So counts are rounded, finely.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def round_max_seqlen(length: int) -> int:
    """The longest segment to declare: the next power of two, at least 64. Declaring 16x too much cost nothing."""
    return max(64, 1 << (length - 1).bit_length())


class FlashinferCudnn(Backend):
    """One call for all segments, of rows whose element offsets fit into int32."""

    name = "flashinfer_cudnn"
    needs = replace(HALF, packages=(FLASHINFER, CUDNN_FRONTEND))

    def lacks(self) -> tuple[str, ...]:
        prefill = _prefill_module()
        import cudnn

        found = int(cudnn.backend_version())
        if not getattr(prefill, "CUDNN_AVAILABLE", True):  # its name in 0.7.2
            return (f"FlashInfer cannot import the cuDNN frontend ({_REMEDY})",)
        if found < _OLDEST_CUDNN:
            return (f"cuDNN {found} is older than {_OLDEST_CUDNN} (upgrade nvidia-cudnn or torch)",)
        if "tensor_uids" not in inspect.signature(cudnn.pygraph.execute).parameters:
            return (f"the cuDNN frontend is older than 1.31 ({_REMEDY})",)
        missing = [name for name in _PIECES if not hasattr(prefill, name)]
        return (f"this FlashInfer has no {', '.join(missing)} ({_REMEDY})",) if missing else ()

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        most = (INT32_END - 1) // (3 * request.heads * request.head_dim)
        return [] if segments.rows <= most else [f"{segments.rows} rows, its int32 offsets reach {most}"]

    def close(self) -> None:
        WORKSPACES.close()

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        return round_segments(segments), rows

    def plan(self, segments: Segments, request: Request) -> Plan:
        width, spare = request.heads * request.head_dim, round_segments(segments.count) - segments.count
        # Empty segments at the end: length zero, offset at the end of the rows, so that they address nothing.
        padded_S1 = np.pad(segments.cu_seqlens_S1, (0, spare), mode="edge").reshape(-1, 1, 1, 1)
        arrays = {
            "lengths": np.pad(segments.lengths_S, (0, spare)).reshape(-1, 1, 1, 1),
            "dense": padded_S1 * np.int32(width),
            "packed": padded_S1 * np.int32(3 * width),
        }
        host = {"max_seqlen": round_max_seqlen(segments.max_seqlen)}
        return Plan(backend=self, segments=segments, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:
        request = plan.request
        if request.packed:
            row_T3HD = torch.empty(1, 3, request.heads, request.head_dim, dtype=request.dtype, device=request.device)
            sequences = _sequences(plan, (True, True, True))
            graph_for(row_T3HD.unbind(1), sequences, plan.host["max_seqlen"], request.scale)

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        heads, head_dim = q_THD.shape[1:]
        packed_strides = 3 * heads * head_dim, head_dim, 1
        packed = tuple(x_THD.stride() == packed_strides for x_THD in (q_THD, k_THD, v_THD))
        qkv = [
            x_THD if is_packed else x_THD.contiguous()
            for x_THD, is_packed in zip((q_THD, k_THD, v_THD), packed, strict=True)
        ]
        return _attend(*qkv, *_sequences(plan, packed), plan.host["max_seqlen"], plan.request.scale)


def _sequences(plan: Plan, packed: tuple[bool, ...]) -> Tensors:
    """lengths, and element offsets of q, k, v and of the output (always dense)."""
    offsets = {True: plan.tensors["packed"], False: plan.tensors["dense"]}
    return plan.tensors["lengths"], *(offsets[layout] for layout in packed), offsets[False]


@machine.probe
def _prefill_module() -> Any:
    import flashinfer.cudnn.prefill as prefill  # 3 to 4 s, so only when used

    return prefill


class Workspaces:
    """cuDNN's scratch memory: one buffer per (device, stream), since calls on one stream run one after the other.

    A buffer only grows. `close` drops them all (kernels still queued keep theirs: the allocator is stream-ordered).
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], Tensor] = {}
        self._lock = Lock()

    def get(self, stream: torch.cuda.Stream, nbytes: int) -> Tensor:
        """At least nbytes of uint8 on the stream's device, for calls on that stream."""
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(nbytes, dtype=torch.uint8, device=stream.device)  # of the graph's own pool
        key = stream.device, stream.cuda_stream
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < nbytes:
                try:
                    buffer = torch.empty(max(nbytes, 1 << 20), dtype=torch.uint8, device=stream.device)
                except torch.OutOfMemoryError as error:  # not the user's to mend: other backends need no workspace
                    raise RuntimeError(f"no memory for a workspace of {nbytes} bytes") from error
                self._buffers[key] = buffer
        return buffer

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._buffers.clear()


WORKSPACES = Workspaces()


class Graph:
    """One built cuDNN plan: its graph, the tensors that it takes in order, and the workspace that it needs."""

    def __init__(self, qkv: Tensors, sequences: Tensors, max_seqlen: int, scale: float, out_dtype: torch.dtype) -> None:
        prefill, (lengths_S, *offsets) = _prefill_module(), sequences
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
        names = _UIDS + (_FP8_UIDS if qkv[0].dtype == torch.float8_e4m3fn else ())
        self._uids = tuple(getattr(prefill.UIDs, name).value for name in names)
        self._workspace_bytes = int(self._graph.get_workspace_size())

    def run(self, qkv: Tensors, sequences: Tensors, out_THD: Tensor, fp8: Tensors = ()) -> None:
        """Launch on the current stream; pointers are bound for this call only. fp8: for `_FP8_UIDS`."""
        stream = torch.cuda.current_stream(out_THD.device)
        workspace = WORKSPACES.get(stream, self._workspace_bytes)
        handle = _prefill_module()._create_cudnn_handle(stream)
        tensors = *qkv, out_THD, sequences[0], *sequences, *fp8  # in order: a dict would be looked through every time
        self._graph.execute(tensors, tensor_uids=self._uids, workspace=workspace, handle=handle)


GRAPHS: machine.LRU[Graph] = machine.LRU(entries=256, cost=256)
"""The cuDNN plans built so far; `GRAPHS.misses` counts builds."""


def graph_for(
    qkv: Tensors, sequences: Tensors, max_seqlen: int, scale: float, out_dtype: torch.dtype | None = None
) -> Graph:
    """The plan for these shapes and strides. qkv: (T, H, D) each. sequences: lengths, offsets of q, k, v, out.

    out_dtype: of the output, if it is not q's.
    """
    shape, strides = qkv[0].shape[1:], tuple(x_THD.stride() for x_THD in qkv)
    out_dtype = out_dtype or qkv[0].dtype
    key = qkv[0].device, qkv[0].dtype, out_dtype, shape, strides, sequences[0].shape[0], max_seqlen, scale

    def make() -> tuple[Graph, int]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a cuDNN plan must be built before a CUDA graph is captured; run the same sizes once")
        return Graph(qkv, sequences, max_seqlen, scale, out_dtype), 1

    return GRAPHS.get(key, make)


def _attend_cuda(*arguments: Any) -> Tensor:
    qkv, sequences, (max_seqlen, scale) = arguments[:3], arguments[3:8], arguments[8:]
    out_THD = torch.empty(qkv[0].shape, dtype=qkv[0].dtype, device=qkv[0].device)
    graph_for(qkv, sequences, max_seqlen, scale).run(qkv, sequences, out_THD)
    return out_THD


_attend = attention_op(
    "cudnn_attention",
    _attend_cuda,
    "Tensor lengths, Tensor q_offsets, Tensor k_offsets, Tensor v_offsets, Tensor out_offsets, int max_seqlen, "
    "float scale",
)
