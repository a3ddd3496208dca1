"""cuDNN's fused attention through FlashInfer (`flashinfer.cudnn`), for bf16 and fp16.

FlashInfer's public call resolves metadata, cache key and cuDNN plan each time, about 0.3 ms of Python; here that is
done once per (layout class, strides) and every layer only rebinds pointers. Segment offsets are in elements for the
strides at hand, so q, k and v may be views of the packed projection. What was measured and why it is so is told where
it is decided.
"""

from __future__ import annotations

from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hf_vit_accel import env
from hf_vit_accel.backends.base import Backend, Needs, Plan, Request, attention_op
from hf_vit_accel.metadata import LRU, Segments

Tensors = tuple[torch.Tensor, ...]

_REMEDY = 'pip install "hf-vit-accel[cuda]"'
FLASHINFER = env.Package(module="flashinfer", distribution="flashinfer-python", install=_REMEDY)
CUDNN_FRONTEND = env.Package(module="cudnn", distribution="nvidia-cudnn-frontend", install=_REMEDY)

_OLDEST_CUDNN = 91900  # the oldest release that this backend was run with
_INT32_END = 2**31
_OFFSETS = ("batch_offsets_q", "batch_offsets_k", "batch_offsets_v", "batch_offsets_o")
_SPARE_WORKSPACE = 128 << 20  # bytes; FlashInfer's own advice, where the plan's need cannot be asked


def round_segments(count: int) -> int:
    """The segment count to declare: at most 1/8 more, exact up to 8.

    A new count is a new cuDNN plan (about 50 ms), and every declared segment costs time even when empty: 256 windows
    declared as 512 took 180 us instead of 137 on an H200. So counts are rounded, finely.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def round_max_length(length: int) -> int:
    """The longest segment to declare: the next power of two, at least 64. Declaring 16x too much cost nothing."""
    return max(64, 1 << (length - 1).bit_length())


class FlashinferCudnn(Backend):
    """One call for all segments, or one per chunk where int32 element offsets would overflow."""

    name = "flashinfer_cudnn"
    needs = Needs(
        packages=(FLASHINFER, CUDNN_FRONTEND),
        capability=((8, 0), (13, 0)),
        dtypes=(torch.bfloat16, torch.float16),
        head_dim_multiple=8,
        head_dim_max=128,
    )

    def probe(self) -> list[str]:
        return list(_probe())

    def close(self) -> None:
        WORKSPACES.close()

    def plan(self, segments: Segments, request: Request) -> Plan:
        width = request.heads * request.head_dim
        chunks, arrays = [], {}
        for index, (first, last) in enumerate(_chunks(segments, 3 * width)):
            lengths_S = segments.lengths_S[first:last]
            start, stop = int(segments.offsets_S1[first]), int(segments.offsets_S1[last])
            chunks.append((start, stop, round_max_length(int(lengths_S.max()))))
            spare = round_segments(last - first) - (last - first)
            offsets_S1 = segments.offsets_S1[first : last + 1] - start
            # Empty segments at the end: length zero, offset at the end of the rows, so that they address nothing.
            arrays[f"lengths_{index}"] = np.pad(lengths_S, (0, spare)).reshape(-1, 1, 1, 1)
            padded_S1 = np.pad(offsets_S1, (0, spare), mode="edge").reshape(-1, 1, 1, 1)
            arrays[f"dense_{index}"] = padded_S1 * np.int32(width)
            arrays[f"packed_{index}"] = padded_S1 * np.int32(3 * width)
        return Plan(backend=self, segments=segments, request=request, host={"chunks": tuple(chunks)}, arrays=arrays)

    def prepare(self, plan: Plan) -> None:
        request = plan.request
        if not request.packed:
            return
        row_T3HD = torch.empty(1, 3, request.heads, request.head_dim, dtype=request.dtype, device=request.device)
        for index, (_, _, max_length) in enumerate(plan.host["chunks"]):
            _graph(row_T3HD.unbind(1), _sequences(plan, index, (True, True, True)), max_length, request.scale)

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: Plan) -> torch.Tensor:
        heads, head_dim = q_THD.shape[1:]
        width = heads * head_dim
        layouts = []
        tensors = []
        for x_THD in (q_THD, k_THD, v_THD):
            packed = x_THD.stride() == (3 * width, head_dim, 1)
            tensors.append(x_THD if packed else x_THD.contiguous())
            layouts.append(packed)
        outputs = [
            _attend(
                *(x_THD[start:stop] for x_THD in tensors),
                *_sequences(plan, index, tuple(layouts)),
                max_length,
                plan.request.scale,
            )
            for index, (start, stop, max_length) in enumerate(plan.host["chunks"])
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _chunks(segments: Segments, row_elements: int) -> list[tuple[int, int]]:
    """Ranges of segments whose element offsets, row_elements apart per row, all stay below 2**31."""
    most = (_INT32_END - 1) // row_elements
    if segments.max_length > most:
        raise ValueError(
            f"expected segments of at most {most} rows, got {segments.max_length}; "
            "use attention='torch_varlen' for frames of that size"
        )
    ranges, first = [], 0
    while first < segments.count:
        end_row = int(segments.offsets_S1[first]) + most
        last = int(np.searchsorted(segments.offsets_S1, end_row, side="right")) - 1
        ranges.append((first, last))
        first = last
    return ranges


def _sequences(plan: Plan, index: int, packed: tuple[bool, ...]) -> Tensors:
    """lengths, and element offsets of q, k, v and of the output (always dense), of one chunk."""
    offsets = {True: plan.tensors[f"packed_{index}"], False: plan.tensors[f"dense_{index}"]}
    return plan.tensors[f"lengths_{index}"], *(offsets[layout] for layout in packed), offsets[False]


@env.probe
def _probe() -> tuple[str, ...]:
    try:
        prefill = _prefill_module()
        import cudnn

        found = int(cudnn.backend_version())
    except Exception as error:
        return (f"importing FlashInfer's cuDNN attention failed: {type(error).__name__}: {error} ({_REMEDY})",)
    if not prefill.CUDNN_AVAILABLE:
        return (f"FlashInfer cannot import the cuDNN frontend ({_REMEDY})",)
    if found < _OLDEST_CUDNN:
        return (f"cuDNN {found} is older than {_OLDEST_CUDNN} (upgrade nvidia-cudnn or torch)",)
    return ()


@env.probe
def _prefill_module() -> ModuleType:
    import flashinfer.cudnn.prefill as prefill  # 3 to 4 s, so only when used

    assert isinstance(prefill, ModuleType)
    return prefill


class Workspaces:
    """cuDNN's scratch memory: one buffer per (device, stream), since calls on one stream run one after the other.

    A buffer only grows. `close` drops them all (kernels still queued keep theirs: the allocator is stream-ordered).
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._lock = Lock()

    def get(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """At least nbytes of uint8 on the device, for its current stream."""
        key = device, torch.cuda.current_stream(device).cuda_stream
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < nbytes:
                buffer = self._buffers[key] = torch.empty(max(nbytes, 1 << 20), dtype=torch.uint8, device=device)
        return buffer

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._buffers.clear()


WORKSPACES = Workspaces()
GRAPHS: LRU[tuple[Any, int]] = LRU(entries=256, cost=256)
"""cuDNN plans built so far (a plan and the workspace it needs); `GRAPHS.misses` counts builds."""


def _graph(qkv: Tensors, sequences: Tensors, max_length: int, scale: float) -> tuple[Any, Any, int]:
    """FlashInfer's prepared graph for these shapes and strides, the call's metadata, and the workspace bytes.

    qkv: three (T, H, D). sequences: lengths, and the offsets of q, k, v and of the output.
    """
    prefill, (lengths_S, *offsets) = _prefill_module(), sequences
    metadata = prefill._PrefillMetadata(
        max_token_per_sequence=max_length,
        max_sequence_kv=max_length,
        causal=False,
        return_lse=False,
        o_data_type=qkv[0].dtype,
        actual_seq_lens_q=lengths_S,
        actual_seq_lens_kv=lengths_S,
        **dict(zip(_OFFSETS, offsets, strict=True)),
    )
    shape, strides = qkv[0].shape[1:], tuple(x_THD.stride() for x_THD in qkv)
    key = qkv[0].device, qkv[0].dtype, shape, strides, lengths_S.shape[0], max_length, scale

    def make() -> tuple[tuple[Any, int], int]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a cuDNN plan must be built before a CUDA graph is captured; run the same sizes once")
        prepared = prefill.prepare_cudnn_batch_prefill(*qkv, scale, lengths_S, metadata=metadata)
        return (prepared, int(prepared.graph.get_workspace_size())), 1

    prepared, nbytes = GRAPHS.get(key, make)
    return prepared, metadata, nbytes


@env.probe
def _can_prepare() -> bool:
    """Whether this FlashInfer has the semi-private pieces (0.7.2); else its slower public call is used."""
    prefill = _prefill_module()
    return hasattr(prefill, "prepare_cudnn_batch_prefill") and hasattr(prefill, "_PrefillMetadata")


def _attend_cuda(*arguments: Any) -> torch.Tensor:
    qkv, sequences, (max_length, scale) = arguments[:3], arguments[3:8], arguments[8:]
    out_THD = torch.empty(qkv[0].shape, dtype=qkv[0].dtype, device=qkv[0].device)
    if _can_prepare():
        prepared, metadata, nbytes = _graph(qkv, sequences, max_length, scale)
        prepared.run(*qkv, out_THD, None, WORKSPACES.get(out_THD.device, nbytes), metadata=metadata)
        return out_THD
    _prefill_module().cudnn_batch_prefill_with_kv_cache(
        *qkv,
        scale,
        WORKSPACES.get(out_THD.device, _SPARE_WORKSPACE),
        max_token_per_sequence=max_length,
        max_sequence_kv=max_length,
        actual_seq_lens_q=sequences[0],
        actual_seq_lens_kv=sequences[0],
        causal=False,
        return_lse=False,
        out=out_THD,
        **dict(zip(_OFFSETS, sequences[1:], strict=True)),
    )
    return out_THD


_attend = attention_op(
    "cudnn_attention(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor q_offsets, Tensor k_offsets, "
    "Tensor v_offsets, Tensor out_offsets, int max_length, float scale) -> Tensor",
    _attend_cuda,
)
