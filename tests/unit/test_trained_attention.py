"""Attention with gradients through packages that need a GPU: our code around their calls, run on stand-ins for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import relative_error

from hf_vit_accel import machine
from hf_vit_accel.backends import Plan, Request, backend_named, flash_attention_4, plan_alone, torch_cudnn
from hf_vit_accel.backends.base import attention_op, reasons_from_trial
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops import embedding

LENGTHS = (5, 1, 12)
HEADS = 2
DIM = 8


def rotate_(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """Rotate q and k in place, by the plain-torch reference."""
    qkv_T3HD.copy_(embedding.rope_reference(qkv_T3HD, cos_TD, sin_TD))


def rotate_back(dqkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Return the gradient before the rotation, by autograd through the plain-torch reference."""
    with torch.enable_grad():
        zeros_T3HD = torch.zeros_like(dqkv_T3HD, requires_grad=True)
        rotated_T3HD = embedding.rope_reference(zeros_T3HD, cos_TD, sin_TD)
        return torch.autograd.grad(rotated_T3HD, zeros_T3HD, dqkv_T3HD)[0]


def attend(qkv_T3HD: torch.Tensor, lengths: tuple[int, ...] = LENGTHS, scale: float = DIM**-0.5) -> torch.Tensor:
    outs = []
    for segment in qkv_T3HD.split(list(lengths)):
        q, k, v = segment.permute(1, 2, 0, 3)
        outs.append(((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def lengths_of(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    return tuple(cu_seqlens.diff().tolist())


class Interface(ModuleType):
    """A stand-in for flash_attn.cute.interface of 4.0.0b36. Its functions find each other in it, as in a module.

    dQ is right if the helpers of its accumulator round the head dim as the main kernel does: to `kernel`. On Hopper,
    that version rounds to 16.
    """

    kernel = 16

    def __init__(self, name: str) -> None:
        super().__init__(name)
        exec(compile(FUNCTIONS, name, "exec"), vars(self))
        self.attend = attend
        self.lengths_of = lengths_of


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
        (dqkv,) = torch.autograd.grad(attend(qkv, lengths_of(cu_seqlens_q), scale), qkv, dout)
    for out, gradient in zip((dq, dk, dv), dqkv.unbind(1)):
        out.copy_(gradient)
    _bwd_postprocess_convert(dq, hdim_multiple_of=32)
    if set(rounded) != {-(-q.shape[-1] // kernel) * kernel}:
        dq.neg_()
    return dq, dk, dv
"""


def install(monkeypatch: pytest.MonkeyPatch, interface: ModuleType) -> None:
    """Make a module importable as flash_attn.cute.interface."""
    cute = ModuleType("flash_attn.cute")
    cute.interface = interface  # type: ignore[attr-defined]
    for module in (ModuleType("flash_attn"), cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interface]:
    stand_in = Interface("flash_attn.cute.interface")
    stand_in.kernel = 16
    install(monkeypatch, stand_in)
    machine.reset()
    yield stand_in
    machine.reset()


def gradients_of(interface: Interface, dim: int = DIM) -> bool | tuple[str, ...]:
    """Find the backward of a head dim and check its gradients.

    Returns:
        Whether it is the package's own; the reasons if no backward is right.
    """
    backward = flash_attention_4._find_backward(torch.device("cpu"), torch.float32, dim)
    if isinstance(backward, tuple):
        return backward
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = flash_attention_4._Attention.apply(qkv, None, None, offsets, max(LENGTHS), dim**-0.5, backward)
    check(out, attend(qkv, scale=dim**-0.5), qkv, torch.Generator().manual_seed(1))
    return backward is interface._flash_attn_bwd


def check(out: torch.Tensor, expected: torch.Tensor, qkv: torch.Tensor, generator: torch.Generator) -> None:
    """Check an output and the gradient of qkv, with a random gradient of the output."""
    assert relative_error(out, expected) < 1e-6
    dout = torch.randn(expected.shape, generator=generator)
    (gradient,) = torch.autograd.grad(out, qkv, dout)
    (expected_gradient,) = torch.autograd.grad(expected, qkv, dout)
    assert relative_error(gradient, expected_gradient) < 1e-6


@pytest.mark.parametrize("kernel", [16, 32])
def test_helpers_round_the_head_dim_as_the_kernel_does(interface: Interface, kernel: int) -> None:
    """Test 4.0.0b36, and a version whose kernel rounds to 32: then the package's own backward runs."""
    interface.kernel = kernel
    is_own = {dim: gradients_of(interface, dim) for dim in (8, 32, 40, 72, 96)}
    assert is_own == {8: kernel == 32, 32: True, 40: kernel == 32, 72: kernel == 32, 96: True}
    assert interface.rounded, "the package's own functions are unchanged"
    interface._bwd_preprocess(torch.zeros(1, 72), torch.zeros(1, 72))
    assert interface.rounded[-1] == 96


@pytest.mark.parametrize("missing", ["_bwd_preprocess", "_bwd_postprocess_convert"])
def test_the_backward_of_another_version_runs_unchanged_or_not_at_all(interface: Interface, missing: str) -> None:
    setattr(interface, f"{missing}_of_another_name", getattr(interface, missing))
    source = FUNCTIONS.replace(missing, f"{missing}_of_another_name")
    exec(compile(source, "another", "exec"), vars(interface))
    delattr(interface, missing)
    assert gradients_of(interface, 32) is True
    [why] = gradients_of(interface, 72)
    assert why.startswith("its gradients are wrong here: relative error")


def test_the_rotation_is_fused(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_4, "_rotate_", rotate_)
    monkeypatch.setattr(flash_attention_4, "rope_back_", lambda dqkv, cos, sin: dqkv.copy_(rotate_back(dqkv, cos, sin)))
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
    [trained, same] = backend.attend_layers(plan, 2, embedding.rotate)
    assert trained is same
    out = trained(qkv + 0.0, angles.cos(), angles.sin())
    check(out, attend(embedding.rope_reference(qkv, angles.cos(), angles.sin())), qkv, generator)


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
    monkeypatch.setattr(torch_cudnn, "_rotate_", rotate_)
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


def test_a_trial_runs_before_the_backend_is_used(interface: Interface) -> None:
    case = (torch.device("cpu"), torch.float32, DIM)
    assert flash_attention_4._reasons_from_results(*case) == ()
    assert callable(flash_attention_4._find_backward(*case))
    interface.kernel = 7
    machine.reset()
    assert flash_attention_4._reasons_from_results(*case) == ()
    [why] = flash_attention_4._find_backward(*case)  # type: ignore[misc]
    assert why.startswith("its gradients are wrong here: relative error")


def test_an_error_in_the_trial_is_a_reason(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(interface, "_flash_attn_fwd", fail, raising=False)
    [why] = flash_attention_4._reasons_from_results(torch.device("cpu"), torch.float32, DIM)
    assert why == "its results fail here: RuntimeError: no compiler here"


def test_another_version_without_the_functions_that_we_call(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ModuleType("flash_attn.cute.interface"))
    [why] = flash_attention_4.FlashAttention4().probe()
    assert why == "this flash-attn-4 has no _flash_attn_fwd, _flash_attn_bwd"


def test_torch_compile_sees_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def function(q: torch.Tensor, *settings: object) -> torch.Tensor:
        called.append(settings)
        return 2 * q

    run = attention_op("of_this_test", function)
    q = torch.ones(3, HEADS, DIM)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    assert torch.equal(run(q, q, q, offsets, 3, 0.5), 2 * q) and len(called) == 1
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., tuple[torch.Tensor]]:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return lambda *inputs: (torch.zeros_like(q),)

    compiled = torch.compile(lambda q: run(q, q, q, offsets, 3, 0.5), backend=backend, fullgraph=True)
    assert torch.equal(compiled(q), torch.zeros_like(q)) and len(called) == 1
    assert seen == [torch.ops.hf_vit_accel.of_this_test.default]


@pytest.mark.parametrize("broken", ["", "out", "dq", "dk", "dv"])
def test_a_wrong_result_or_gradient_is_a_reason(broken: str) -> None:
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
                (dqkv,) = torch.autograd.grad(attend(qkv), qkv, dout)
            if broken.startswith("d"):
                dqkv[:, ["dq", "dk", "dv"].index(broken)] *= 0.9
            return dqkv

    why = reasons_from_trial(Attention.apply, LENGTHS, torch.device("cpu"), torch.float32, DIM, grad=True)
    assert bool(why) == bool(broken)
