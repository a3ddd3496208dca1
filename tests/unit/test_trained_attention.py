"""Attention with gradients through packages that need a GPU: what we do around their calls, on a stand-in for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import relative_error

from hf_vit_accel import machine
from hf_vit_accel.backends import Request, backend_named, flash_attention_4, plan_alone, torch_cudnn
from hf_vit_accel.backends.base import attention_op, reasons_from_trial
from hf_vit_accel.layout import Segments
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
    """flash_attn.cute.interface as 4.0.0b36 is called; its functions look each other up in it, as a module's do.

    dQ is right where those that fill and read its accumulator round the head dim as the main kernel does: to 16 on
    Hopper in that version, to `kernel` here.
    """

    kernel = 16

    def __init__(self, name: str) -> None:
        super().__init__(name)
        exec(compile(FUNCTIONS, name, "exec"), vars(self))
        self.attend, self.lengths_of = attend, lengths_of


FUNCTIONS = """
import torch

rounded = []

def _flash_attn_fwd(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, return_lse):
    assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
    lengths = lengths_of(cu_seqlens_q)
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    out = attend(torch.stack((q, k, v), 1), lengths, softmax_scale)
    return out.detach(), torch.zeros(q.shape[1], len(q)) if return_lse else None, None, None, None

def _bwd_preprocess(out, dout, hdim_multiple_of=32):
    assert out.shape == dout.shape
    rounded.append(-(-out.shape[-1] // hdim_multiple_of) * hdim_multiple_of)

def _bwd_postprocess_convert(dq, *, hdim_multiple_of=32):
    rounded.append(-(-dq.shape[-1] // hdim_multiple_of) * hdim_multiple_of)

def _flash_attn_bwd(
    q, k, v, out, dout, lse, scale=None, *rest,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None
):
    assert lse is not None and out.shape == dout.shape == q.shape
    rounded.clear()
    _bwd_preprocess(out, dout, hdim_multiple_of=32)
    with torch.enable_grad():
        qkv = torch.stack((q, k, v), 1).detach().requires_grad_()
        (found,) = torch.autograd.grad(attend(qkv, lengths_of(cu_seqlens_q), scale), qkv, dout)
    for into, each in zip((dq, dk, dv), found.unbind(1)):
        into.copy_(each)
    _bwd_postprocess_convert(dq, hdim_multiple_of=32)
    if set(rounded) != {-(-q.shape[-1] // kernel) * kernel}:
        dq.neg_()
    return dq, dk, dv
"""


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interface]:
    made = Interface("flash_attn.cute.interface")
    made.kernel = 16
    cute = ModuleType("flash_attn.cute")
    cute.interface = made  # type: ignore[attr-defined]
    for name, module in (("flash_attn", ModuleType("flash_attn")), (cute.__name__, cute), (made.__name__, made)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    machine.reset()
    yield made
    machine.reset()


def gradients_of(made: Any, dim: int = DIM) -> Any:
    """`_backward` of a head dim, and what it makes of a gradient, beside what it should."""
    backward = flash_attention_4._find_backward(torch.device("cpu"), torch.float32, dim)
    if backward.run is None:
        return backward.reasons
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = flash_attention_4._Attention.apply(qkv, None, None, offsets, max(LENGTHS), dim**-0.5, backward.run)
    wanted = attend(qkv, scale=dim**-0.5)
    given = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    assert relative_error(found, wanted) < 1e-6
    gradients = [torch.autograd.grad(each, qkv, given)[0] for each in (found, wanted)]
    assert relative_error(*gradients) < 1e-6
    return backward.run is made._flash_attn_bwd


@pytest.mark.parametrize("kernel", [16, 32])
def test_what_rounds_the_head_dim_is_made_to_agree_where_it_does_not(interface: Interface, kernel: int) -> None:
    """As in 4.0.0b36, and as in a version whose kernel rounds to 32: then its own backward is taken."""
    interface.kernel = kernel
    own = {dim: gradients_of(interface, dim) for dim in (8, 32, 40, 72, 96)}
    assert own == {8: kernel == 32, 32: True, 40: kernel == 32, 72: kernel == 32, 96: True}
    assert interface.rounded, "the package's own functions are what they were"
    interface._bwd_preprocess(torch.zeros(1, 72), torch.zeros(1, 72))
    assert interface.rounded[-1] == 96


@pytest.mark.parametrize("missing", ["_bwd_preprocess", "_bwd_postprocess_convert"])
def test_another_version_s_backward_is_taken_as_it_is_or_not_at_all(interface: Interface, missing: str) -> None:
    setattr(interface, f"{missing}_of_another_name", getattr(interface, missing))
    source = FUNCTIONS.replace(missing, f"{missing}_of_another_name")
    exec(compile(source, "another", "exec"), vars(interface))
    delattr(interface, missing)
    assert gradients_of(interface, 32) is True
    [why] = gradients_of(interface, 72)
    assert why.startswith("its gradients are wrong here: relative error")


def test_rotation_is_a_part_of_it(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    def back_(dqkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        with torch.enable_grad():
            zero = torch.zeros_like(dqkv, requires_grad=True)
            dqkv.copy_(torch.autograd.grad(rope.rope_reference(zero, cos, sin), zero, dqkv)[0])

    monkeypatch.setattr(flash_attention_4, "_rotate_", lambda qkv, *given: qkv.copy_(rope.rope_reference(qkv, *given)))
    monkeypatch.setattr(flash_attention_4, "rope_back_", back_)
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
    found = trained(qkv + 0.0, angles.cos(), angles.sin())
    wanted = attend(rope.rope_reference(qkv, angles.cos(), angles.sin()))
    assert relative_error(found, wanted) < 1e-6
    given = torch.randn(wanted.shape, generator=generator)
    gradients = [torch.autograd.grad(each, qkv, given)[0] for each in (found, wanted)]
    assert relative_error(*gradients) < 1e-6


@pytest.mark.parametrize("packed", [True, False])
def test_cudnn_takes_runs_of_equal_lengths(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As views of the projection, or of q, k and v: one run or several, and rows that attend to themselves alone."""

    def forward(q: Any, k: Any, v: Any, bias: None, keep: bool, *rest: Any, scale: float) -> Any:
        assert {x.stride(3) for x in (q, k, v)} == {1} and rest == (0.0, False, False)
        out = ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).contiguous().transpose(1, 2).detach()
        return out, torch.zeros(1), None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any, scale: float) -> Any:
        assert out.shape == dout.shape == q.shape and rest[4:6] == (None, None)
        assert rest[6:] == (q.shape[2], k.shape[2], 0.0, False)
        with torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad((qkv[0] @ qkv[1].mT * scale).softmax(-1) @ qkv[2], qkv, dout)

    def gather(parts: Any, cos: Any, sin: Any, out: Any) -> None:
        packed = torch.stack([part.transpose(1, 2).flatten(0, 1) for part in parts], 1)
        with torch.enable_grad():
            zero = torch.zeros_like(packed, requires_grad=True)
            out.copy_(torch.autograd.grad(rope.rope_reference(zero, cos, sin), zero, packed)[0])

    monkeypatch.setattr(torch_cudnn, "_sdpa", forward)
    monkeypatch.setattr(torch_cudnn, "_sdpa_backward", backward)
    monkeypatch.setattr(torch_cudnn, "_rotate_", lambda qkv, *given: qkv.copy_(rope.rope_reference(qkv, *given)))
    monkeypatch.setattr(torch_cudnn, "rope_gather_back", gather)
    backend, generator = backend_named("torch_cudnn"), torch.Generator().manual_seed(0)
    for lengths in ((5, 5, 5), (5, 5, 1, 1, 3, 5), (9,)):
        wanted_from = torch.randn(sum(lengths), 3, HEADS, DIM, generator=generator).requires_grad_()
        angles = torch.randn(sum(lengths), DIM // 2, generator=generator).repeat(1, 2)
        tables = angles.cos(), angles.sin()
        at = dict(device=torch.device("cpu"), dtype=torch.float32, heads=HEADS, head_dim=DIM, scale=DIM**-0.5)
        segments = Segments(lengths_S=torch.tensor(lengths, dtype=torch.int32).numpy())
        served, trained = (plan_alone(backend, segments, Request(**at, grad=grad)) for grad in (False, True))
        rotated = wanted_from if not packed else rope.rope_reference(wanted_from, *tables)
        wanted = attend(rotated, lengths)
        given = torch.randn(wanted.shape, generator=generator)
        expected = torch.autograd.grad(wanted, wanted_from, given)[0]
        mine = wanted_from.detach().clone()
        with torch.no_grad():
            if packed:
                [run] = backend.attend_layers(served, 1, rope.rope_reference)
                assert relative_error(run(mine, *tables), wanted) < 1e-6
            else:
                assert relative_error(backend.attend(*mine.unbind(1), served), wanted) < 1e-6
        leaf = mine.requires_grad_()
        if packed:
            [run] = backend.attend_layers(trained, 1, rope.rotate)
            found = run(leaf + 0.0, *tables)
        else:
            found = backend.attend(*leaf.unbind(1), trained)
        assert relative_error(found, wanted) < 1e-6
        assert relative_error(torch.autograd.grad(found, leaf, given)[0], expected) < 1e-6


def test_it_is_tried_before_it_is_used(interface: Interface) -> None:
    at = torch.device("cpu"), torch.float32, DIM
    assert flash_attention_4._reasons_from_results(*at) == () == flash_attention_4._find_backward(*at).reasons
    interface.kernel = 7
    machine.reset()
    assert flash_attention_4._reasons_from_results(*at) == ()
    backward = flash_attention_4._find_backward(*at)
    [why] = backward.reasons
    assert backward.run is None and why.startswith("its gradients are wrong here: relative error")


def test_what_fails_when_it_is_tried_is_a_reason(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(interface, "_flash_attn_fwd", fail, raising=False)
    [why] = flash_attention_4._reasons_from_results(torch.device("cpu"), torch.float32, DIM)
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


def test_an_operator_is_what_torch_compile_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def function(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        called.append(rest)
        return 2 * q

    run = attention_op("of_this_test", function)
    q, offsets = torch.ones(3, HEADS, DIM), torch.tensor([0, 3], dtype=torch.int32)
    assert torch.equal(run(q, q, q, offsets, 3, 0.5), 2 * q) and len(called) == 1
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return lambda *given: (torch.zeros_like(q),)

    compiled = torch.compile(lambda q: run(q, q, q, offsets, 3, 0.5), backend=backend, fullgraph=True)
    assert torch.equal(compiled(q), torch.zeros_like(q)) and len(called) == 1
    assert seen == [torch.ops.hf_vit_accel.of_this_test.default]


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

    why = reasons_from_trial(Attention.apply, LENGTHS, torch.device("cpu"), torch.float32, DIM, grad=True)
    assert bool(why) == bool(broken)
