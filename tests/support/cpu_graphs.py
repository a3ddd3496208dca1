"""Capture CUDA graphs on a CPU: a graph that runs again, and an attention that reads its offsets at every run."""

from typing import Any

import pytest
import torch
from torch import nn

import hf_vit_accel
from hf_vit_accel import GraphConfig, backends
from hf_vit_accel.backends import BACKENDS, Request
from hf_vit_accel.backends.base import Plan
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.graphs import called, recorder, store
from hf_vit_accel.layout import Segments
from hf_vit_accel.options import passes
from support.recorded_ops import OperationRecorder, Recorder

SMALL = GraphConfig(max_tokens=128, exact_after=0)
"""Graphs of few tokens, captured at the first call."""


class Masked(Sdpa):
    """Attend by the offsets on the device at the time of the run, like the kernels of the real backends."""

    replays_other_layouts = True

    def plan(self, segments: Segments, request: Request) -> Plan:
        """Keep the offsets as an array for the device, and the longest segment for the host."""
        return Plan(
            backend=self,
            request=request,
            host={"max_seqlen": segments.max_seqlen},
            arrays={"cu_seqlens_S1": segments.cu_seqlens_S1},
        )

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Attend with one mask over all rows: a row sees the rows of its segment."""
        offsets = plan.tensors["cu_seqlens_S1"]
        assert offsets[-1] == len(q_THD), "every row belongs to a segment"
        assert int(offsets.diff().max()) <= plan.host["max_seqlen"]
        rows = torch.arange(len(q_THD), dtype=offsets.dtype)
        segment_T = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
        q_1HTD, k_1HTD, v_1HTD = (tensor.transpose(0, 1)[None] for tensor in (q_THD, k_THD, v_THD))
        mask_TT = segment_T[:, None] == segment_T[None, :]
        out_1HTD = nn.functional.scaled_dot_product_attention(
            q_1HTD, k_1HTD, v_1HTD, attn_mask=mask_TT, scale=plan.request.scale
        )
        return out_1HTD[0].transpose(0, 1)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """Allow graphs on the CPU; return the class of their recorders, which only this test changes."""

    class RecorderOfTest(Recorder):
        pass

    masked = Masked()
    monkeypatch.setattr(store, "CudaRecorder", RecorderOfTest)
    monkeypatch.setattr(called, "CudaRecorder", RecorderOfTest)
    monkeypatch.setattr(store, "free_bytes", lambda device: RecorderOfTest.free_bytes)
    monkeypatch.setattr(recorder, "why_not_graphs", lambda device: None)
    monkeypatch.setattr(passes, "AUTOMATIC_ON", ("cpu",))
    all_backends = tuple(masked if backend.name == "sdpa" else backend for backend in BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", all_backends)
    return RecorderOfTest


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, on_cpu: type[Recorder]) -> type[OperationRecorder]:
    """Let graphs on the CPU replay recorded operations, which read the tensors of the capture, in exact shapes."""

    class RecorderOfTest(OperationRecorder):
        pass

    monkeypatch.setattr(store, "CudaRecorder", RecorderOfTest)
    monkeypatch.setattr(called, "CudaRecorder", RecorderOfTest)
    monkeypatch.setattr(backends, "BACKENDS", BACKENDS)  # the stand-in of `on_cpu` reads its offsets
    return RecorderOfTest


@pytest.fixture
def kept_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the recorder's class back after a test that poisons buffers."""
    monkeypatch.setattr(store, "CudaRecorder", store.CudaRecorder)


def status_of(model: Any) -> Any:
    """Return the status of the graphs of a model's only tower."""
    return hf_vit_accel.status(model).towers[0].graphs
