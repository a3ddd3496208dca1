"""A FlashInfer in plain torch, which follows offsets and lengths as cuDNN does: the cuDNN backend runs on a CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.backends.base import Needs

PREFILL = "flashinfer.cudnn.prefill"
Tensors = list[torch.Tensor]


class Graph:
    """A built plan, which runs on pointers, offsets and lengths."""

    def __init__(self, owner: Flashinfer, scale: float, max_seqlen: int) -> None:
        self._owner = owner
        self._scale = scale
        self._max_seqlen = max_seqlen

    def get_workspace_size(self) -> int:
        """Return the bytes of scratch memory that the plan needs."""
        return self._owner.workspace_bytes()

    def execute(self, tensors: Tensors, tensor_uids: list[str], workspace: torch.Tensor, handle: str) -> None:
        """Check the arguments, and attend."""
        assert len(tensors) == len(set(tensor_uids)) == 10 and workspace.dtype == torch.uint8
        assert workspace.numel() >= self._owner.workspace_bytes() and handle == "handle"
        q, k, v, out, lengths, _, *offsets = tensors
        self._owner.run(q, k, v, out, lengths, offsets, self._scale, self._max_seqlen)


class Uids:
    """An enumeration that has every name."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(value=name)


class Flashinfer(ModuleType):
    """The parts of `flashinfer.cudnn.prefill` 0.7.2 that the backend uses, on the CPU. It counts plans and runs."""

    UIDs = Uids()

    class _PrefillMetadata(SimpleNamespace):
        pass

    def __init__(self) -> None:
        super().__init__(PREFILL)
        self.plans = 0
        self.runs = 0

    def workspace_bytes(self) -> int:
        """Return the size of scratch memory."""
        return 4096

    def _create_cudnn_handle(self, stream: object) -> str:
        return "handle"

    def prepare_cudnn_batch_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        lengths: torch.Tensor,
        metadata: _PrefillMetadata,
    ) -> SimpleNamespace:
        """Build a plan."""
        assert not metadata.causal and metadata.actual_seq_lens_q is lengths and metadata.batch_offsets_q.dim() == 4
        self.plans += 1
        return SimpleNamespace(graph=Graph(self, scale, metadata.max_token_per_sequence))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lengths: torch.Tensor,
        offsets: Tensors,
        scale: float,
        max_seqlen: int,
    ) -> None:
        """Attend within segments; offsets count elements from the pointers of q, k, v and out."""
        self.runs += 1
        shape = q.shape[1:]
        starts_S4 = torch.stack([x.flatten() for x in offsets], 1).tolist()[:-1]
        for length, starts in zip(lengths.flatten().tolist(), starts_S4, strict=True):
            assert length <= max_seqlen
            parts = [
                torch.as_strided(x, (length, *shape), x.stride(), x.storage_offset() + start)
                for x, start in zip((q, k, v, out), starts, strict=True)
            ]
            q_HLD, k_HLD, v_HLD = (x.transpose(0, 1)[None] for x in parts[:3])
            out_HLD = nn.functional.scaled_dot_product_attention(q_HLD, k_HLD, v_HLD, scale=scale)
            parts[3].copy_(out_HLD[0].transpose(0, 1))


def install_flashinfer(monkeypatch: pytest.MonkeyPatch) -> Flashinfer:
    """Let the real cuDNN backend find this FlashInfer, and run on this machine in any dtype."""
    flashinfer = Flashinfer()
    for name in ("flashinfer", "flashinfer.cudnn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, PREFILL, flashinfer)
    frontend = SimpleNamespace(backend_version=lambda: 92000, pygraph=Graph)
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    needs = Needs(cuda=False, head_dim_multiple=8, head_dim_max=128)
    monkeypatch.setattr(cudnn_backend.FlashinferCudnn, "needs", needs)
    stream = SimpleNamespace(device=torch.device("cpu"), cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return flashinfer
