"""Attention with gradients through packages that need a GPU: what we do around their calls, on a stand-in for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import relative_error

from hf_vit_accel import env
from hf_vit_accel.backends import Request, backend_named, flash_attention_4, plan_alone
from hf_vit_accel.backends.base import reasons_tried
from hf_vit_accel.metadata import Segments
from hf_vit_accel.ops import rope

LENGTHS, HEADS, DIM = (5, 1, 12), 2, 8


def attend(qkv_T3HD: torch.Tensor, lengths: tuple[int, ...] = LENGTHS, scale: float = DIM**-0.5) -> torch.Tensor:
    outs = []
    for segment in qkv_T3HD.split(list(lengths)):
        q, k, v = segment.permute(1, 2, 0, 3)
        outs.append(((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def lengths_of(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    return tuple(cu_seqlens.diff().tolist())


class Interface(ModuleType):
    """flash_attn.cute.interface as 4.0.0b36 is called; its dQ is wrong for head dims that are no multiple of 32."""

    wrong_dq = False

    def _flash_attn_fwd(self, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, ...]:
        assert given["cu_seqlens_q"] is given["cu_seqlens_k"] and given["cu_seqlens_q"].dtype == torch.int32
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == max(lengths_of(given["cu_seqlens_q"]))
        out = attend(torch.stack((q, k, v), 1), lengths_of(given["cu_seqlens_q"]), given["softmax_scale"])
        return out.detach(), torch.zeros(q.shape[1], len(q)) if given["return_lse"] else None, None, None, None

    def _flash_attn_bwd(
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, scale: float, **given: Any
    ) -> tuple[Any, ...]:
        assert lse is not None and out.shape == dout.shape == q.shape
        with torch.enable_grad():
            qkv = torch.stack((q, k, v), 1).detach().requires_grad_()
            (found,) = torch.autograd.grad(attend(qkv, lengths_of(given["cu_seqlens_q"]), scale), qkv, dout)
        for name, each in zip(("dq", "dk", "dv"), found.unbind(1), strict=True):
            given[name].copy_(each)
        if self.wrong_dq or q.shape[-1] % 32:
            given["dq"].neg_()
        return given["dq"], given["dk"], given["dv"]


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interface]:
    made = Interface("flash_attn.cute.interface")
    cute = ModuleType("flash_attn.cute")
    cute.interface = made  # type: ignore[attr-defined]
    for name, module in (("flash_attn", ModuleType("flash_attn")), (cute.__name__, cute), (made.__name__, made)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    env.reset()
    yield made
    env.reset()


def settings() -> tuple[torch.Tensor, int, float]:
    return torch.tensor((0, *LENGTHS)).cumsum(0).int(), max(LENGTHS), DIM**-0.5


def test_heads_are_filled_up_for_the_backward_and_cut_again(interface: Interface) -> None:
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found, wanted = flash_attention_4._Attention.apply(qkv, None, None, *settings()), attend(qkv)
    given = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    assert relative_error(found, wanted) < 1e-6
    gradients = [torch.autograd.grad(each, qkv, given)[0] for each in (found, wanted)]
    assert relative_error(*gradients) < 1e-6


def test_rotation_is_a_part_of_it(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    def back(dqkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
        with torch.enable_grad():
            zero = torch.zeros(*dqkv.shape[:3], dim, requires_grad=True)
            return torch.autograd.grad(rope.rope_reference(zero, cos, sin, dqkv.shape[-1]), zero, dqkv)[0]

    monkeypatch.setattr(flash_attention_4, "_rotate", rope.rope_reference)
    monkeypatch.setattr(flash_attention_4, "rope_back", back)
    monkeypatch.setattr(flash_attention_4, "_fill_up", rope.fill_up_reference)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, DIM, generator=generator).requires_grad_()
    angles = torch.randn(sum(LENGTHS), DIM // 2, generator=generator).repeat(1, 2)
    request = Request(
        device=torch.device("cpu"),
        dtype=torch.float32,
        heads=HEADS,
        head_dim=DIM,
        scale=DIM**-0.5,
        packed=True,
        grad=True,
    )
    backend = backend_named("flash_attention_4")
    plan = plan_alone(backend, Segments(lengths_S=torch.tensor(LENGTHS, dtype=torch.int32).numpy()), request)
    [trained, same] = backend.attend_layers(plan, 2, rope.rotate)
    assert trained is same
    found = trained(qkv, angles.cos(), angles.sin())
    wanted = attend(rope.rope_reference(qkv, angles.cos(), angles.sin()))
    assert relative_error(found, wanted) < 1e-6
    given = torch.randn(wanted.shape, generator=generator)
    gradients = [torch.autograd.grad(each, qkv, given)[0] for each in (found, wanted)]
    assert relative_error(*gradients) < 1e-6


def test_it_is_tried_before_it_is_used(interface: Interface) -> None:
    at = torch.device("cpu"), torch.float32, DIM
    assert flash_attention_4._proven(*at, True) == () == flash_attention_4._proven(*at, False)
    interface.wrong_dq = True
    env.reset()
    assert flash_attention_4._proven(*at, False) == ()
    [why] = flash_attention_4._proven(*at, True)
    assert why.startswith("its gradients are wrong here: relative error")


def test_what_fails_when_it_is_tried_is_a_reason(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(interface, "_flash_attn_fwd", fail, raising=False)
    [why] = flash_attention_4._proven(torch.device("cpu"), torch.float32, DIM, False)
    assert why == "its results fail here: RuntimeError: no compiler here"


def test_another_version_without_what_is_called() -> None:
    empty = ModuleType("flash_attn.cute.interface")
    with pytest.MonkeyPatch.context() as monkeypatch:
        cute = ModuleType("flash_attn.cute")
        cute.interface = empty  # type: ignore[attr-defined]
        for name, module in (("flash_attn", ModuleType("flash_attn")), (cute.__name__, cute)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        [why] = flash_attention_4.FlashAttention4().probe()
    assert why == "this flash-attn-4 has no _flash_attn_fwd, _flash_attn_bwd"


@pytest.mark.parametrize("broken", ["", "out", "dq", "dk", "dv"])
def test_a_wrong_result_or_gradient_is_told(broken: str) -> None:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, qkv: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(qkv)
            out = attend(qkv)
            return out * 1.1 if broken == "out" else out

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                qkv = ctx.saved_tensors[0].detach().requires_grad_()
                (found,) = torch.autograd.grad(attend(qkv), qkv, dout)
            if broken.startswith("d"):
                found[:, ["dq", "dk", "dv"].index(broken)] *= 0.9
            return found

    why = reasons_tried(Attention.apply, LENGTHS, torch.device("cpu"), torch.float32, DIM, grad=True)
    assert bool(why) == bool(broken)
