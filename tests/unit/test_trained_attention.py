"""Attention with gradients through packages that need a GPU: our code around their calls, run on stand-ins for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import relative_error

from hf_vit_accel.backends import Plan, Request, backend_named, flash_attention_4, plan_alone, torch_cudnn
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops import embedding

HEADS = 2
DIM = 8


def rotate_back(dqkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Return the gradient before the rotation, by autograd through the plain-torch reference."""
    with torch.enable_grad():
        zeros_T3HD = torch.zeros_like(dqkv_T3HD, requires_grad=True)
        rotated_T3HD = embedding.rope_reference(zeros_T3HD, cos_TD, sin_TD)
        return torch.autograd.grad(rotated_T3HD, zeros_T3HD, dqkv_T3HD)[0]


def attend(qkv_T3HD: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    outs = []
    for segment in qkv_T3HD.split(list(lengths)):
        q, k, v = segment.permute(1, 2, 0, 3)
        outs.append(((q @ k.mT * DIM**-0.5).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def check(out: torch.Tensor, expected: torch.Tensor, qkv: torch.Tensor, generator: torch.Generator) -> None:
    """Check an output and the gradient of qkv, with a random gradient of the output."""
    assert relative_error(out, expected) < 1e-6
    dout = torch.randn(expected.shape, generator=generator)
    (gradient,) = torch.autograd.grad(out, qkv, dout)
    (expected_gradient,) = torch.autograd.grad(expected, qkv, dout)
    assert relative_error(gradient, expected_gradient) < 1e-6


class CudnnStandIn:
    """A stand-in for torch's cuDNN operators, as `torch_cudnn` calls them on batches (B, H, L, D)."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: None, needs_lse: bool, *options: object, scale: float
    ) -> tuple[torch.Tensor | int | None, ...]:
        assert {x.stride(3) for x in (q, k, v)} == {1} and options == (0.0, False, False)
        out = ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).contiguous().transpose(1, 2).detach()
        return out, torch.zeros(1), None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None

    @staticmethod
    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        seed: torch.Tensor,
        offset: torch.Tensor,
        bias: None,
        *options: object,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        assert out.shape == dout.shape == q.shape
        assert options == (None, None, q.shape[2], k.shape[2], 0.0, False)
        with torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad((qkv[0] @ qkv[1].mT * scale).softmax(-1) @ qkv[2], qkv, dout)

    @staticmethod
    def gather_back(parts: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        packed = torch.stack([part.transpose(1, 2).flatten(0, 1) for part in parts], 1)
        out.copy_(rotate_back(packed, cos, sin))


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 5, 1, 1, 3, 5), (9,)], ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_cudnn_attends_runs_of_equal_lengths(
    packed: bool, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test views of the projection and separate q, k and v: one run or several, and rows that attend to themselves."""
    monkeypatch.setattr(torch_cudnn, "_cudnn_attention", CudnnStandIn.forward)
    monkeypatch.setattr(torch_cudnn, "_cudnn_attention_backward", CudnnStandIn.backward)
    monkeypatch.setattr(torch_cudnn, "_rotate_", lambda qkv, *tables: qkv.copy_(embedding.rope_reference(qkv, *tables)))
    monkeypatch.setattr(torch_cudnn, "rope_gather_back", CudnnStandIn.gather_back)
    backend = backend_named("torch_cudnn")
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, HEADS, DIM, generator=generator).requires_grad_()
    angles = torch.randn(sum(lengths), DIM // 2, generator=generator).repeat(1, 2)
    tables = angles.cos(), angles.sin()
    expected = attend(embedding.rope_reference(qkv, *tables) if packed else qkv, lengths)

    def plan(grad: bool) -> Plan:
        segments = Segments(lengths_S=torch.tensor(lengths, dtype=torch.int32).numpy())
        device = torch.device("cpu")
        request = Request(device=device, dtype=torch.float32, heads=HEADS, head_dim=DIM, scale=DIM**-0.5, grad=grad)
        return plan_alone(backend, segments, request)

    with torch.no_grad():
        if packed:
            [run] = backend.attend_layers(plan(grad=False), 1, embedding.rope_reference)
            out = run(qkv.detach().clone(), *tables)
        else:
            out = backend.attend(*qkv.detach().clone().unbind(1), plan(grad=False))
        assert relative_error(out, expected) < 1e-6
    if packed:
        [run] = backend.attend_layers(plan(grad=True), 1, embedding.rotate)
        out = run(qkv + 0.0, *tables)
    else:
        out = backend.attend(*qkv.unbind(1), plan(grad=True))
    check(out, expected, qkv, generator)


def test_another_version_without_the_functions_that_we_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cute: Any = ModuleType("flash_attn.cute")
    cute.interface = ModuleType("flash_attn.cute.interface")
    for module in (ModuleType("flash_attn"), cute, cute.interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    [why] = flash_attention_4.FlashAttention4().probe()
    assert why == "this flash-attn-4 has no _flash_attn_fwd, _flash_attn_bwd"
