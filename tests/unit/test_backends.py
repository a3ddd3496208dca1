"""Compare every backend with exact attention, generated from the declarations, and test how each of them plans.

`T` rows, `S` segments, `H` heads, `D` head dim.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention import LAYOUTS, draw, exact, request, segments_of
from support.backends import skip_for
from support.faults import Flashinfer
from support.towers import alike
from tiny import relative_error
from torch import nn

from hf_vit_accel import backends, machine
from hf_vit_accel.backends import BACKENDS, FP8, Backend, backend_named
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.backends.base import missing_requirements, plan_alone
from hf_vit_accel.backends.flash_attention_3 import FlashAttention3, causal_attention
from hf_vit_accel.backends.flashinfer_cudnn import FlashinferCudnn
from hf_vit_accel.backends.torch_cudnn import TorchCudnn
from hf_vit_accel.decoding.layers import CausalAttention


def stock(qkv: list[torch.Tensor], lengths: list[int], scale: float) -> torch.Tensor:
    """Compute attention as stock transformers does: one SDPA per segment, in the inputs' dtype."""
    outs = []
    for q, k, v in zip(*(x.split(lengths) for x in qkv), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        outs.append(nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1))
    return torch.cat(outs)


def check(backend: Backend, lengths: list[int], head_dim: int, dtype: torch.dtype, device: str, packed: bool) -> None:
    call = request(device, dtype, head_dim, packed=packed)
    assert backend.reasons_against(call) == []
    plan = plan_alone(backend, segments_of(lengths), call)
    for seed in range(5 if device == "cuda" else 2):
        qkv = draw(sum(lengths), head_dim, dtype, device, seed, packed)
        expected = exact(qkv, lengths, call.scale)
        bound = max(1.1 * relative_error(stock(qkv, lengths, call.scale), expected), torch.finfo(dtype).eps)
        # NaN in memory that is freed at once: an output row that is never written would show it.
        torch.full_like(qkv[0], float("nan"), memory_format=torch.contiguous_format)
        out = plan.attend(*qkv)
        assert (out.shape, out.dtype) == (qkv[0].shape, dtype)
        assert relative_error(out, expected) <= bound


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [*((torch.float32, layout) for layout in LAYOUTS), *alike(*((torch.bfloat16, layout) for layout in LAYOUTS))],
)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.needs.cuda], ids=lambda b: b.name)
def test_cpu_backend_is_exact(backend: Backend, dtype: torch.dtype, layout: str) -> None:
    """Test every layout packed and not packed, one in each of the two dtypes."""
    packed = (list(LAYOUTS).index(layout) + (dtype == torch.float32)) % 2 == 0
    check(backend, LAYOUTS[layout], 80, dtype, "cpu", packed)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_gpu_backend_is_exact(backend: Backend, layout: str, dtype: torch.dtype, head_dim: int) -> None:
    skip_for(backend.reasons_against_machine())
    for packed in (True, False):
        check(backend, LAYOUTS[layout], head_dim, dtype, "cuda", packed)


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        pytest.param(backend, device, id=f"{backend.name} on {device}", marks=[pytest.mark.gpu] * (device == "cuda"))
        for backend in BACKENDS
        for device in (["cuda"] if backend.needs.cuda else ["cpu", "cuda"])
        if backend.needs.differentiable
    ],
)
def test_gradients(backend: Backend, device: str) -> None:
    lengths = LAYOUTS["ragged"]
    dtype = torch.bfloat16
    call = request(device, dtype, 72, grad=True)
    skip_for(backend.reasons_against(call))
    plan = plan_alone(backend, segments_of(lengths), call)
    qkv = [x.detach().requires_grad_() for x in draw(sum(lengths), 72, dtype, device, 0, False)]
    weights = torch.randn_like(qkv[0])
    gradients = torch.autograd.grad((plan.attend(*qkv) * weights).sum(), qkv)
    expected = torch.autograd.grad((exact(qkv, lengths, call.scale) * weights).sum(), qkv)
    stock_gradients = torch.autograd.grad((stock(qkv, lengths, call.scale) * weights).sum(), qkv)
    for gradient, exact_gradient, stock_gradient in zip(gradients, expected, stock_gradients, strict=True):
        bound = max(1.1 * relative_error(stock_gradient, exact_gradient), torch.finfo(dtype).eps)
        assert relative_error(gradient, exact_gradient) <= bound


@pytest.mark.gpu
def test_cudnn_plans_are_built_once_per_class_of_layouts() -> None:
    backend = backend_named("flashinfer_cudnn")
    skip_for(backend.reasons_against_machine())
    call = request("cuda", torch.bfloat16, 72, packed=True)
    before = cudnn_backend.CUDNN_PLANS.misses
    for lengths in ([333] * 16, [400] * 15 + [257], [512] * 16):  # same count, same power of two
        plan = plan_alone(backend, segments_of(lengths), call)
        qkv = draw(sum(lengths), 72, torch.bfloat16, "cuda", 0, True)
        assert relative_error(plan.attend(*qkv), exact(qkv, lengths, call.scale)) < 1e-2
        plan.attend(*qkv)
    assert cudnn_backend.CUDNN_PLANS.misses == before + 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cudnn_reads_and_writes_every_row_of_every_layout(flashinfer: Flashinfer, layout: str) -> None:
    """The stand-in attends by offsets and lengths, as cuDNN does."""
    for packed in (True, False):
        check(FlashinferCudnn(), LAYOUTS[layout], 80, torch.float32, "cpu", packed)


def fake_machine(
    monkeypatch: pytest.MonkeyPatch, *, missing: tuple[str, ...] = (), capability: tuple[int, int] = (9, 0)
) -> None:
    """Pretend to be a machine with a GPU, every package but the missing ones, and a torch without cuDNN."""
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "cuda_capability", lambda index=None: capability)
    monkeypatch.setattr(machine, "why_missing", lambda package: "missing" if package.module in missing else None)
    for backend in (FlashinferCudnn, FlashAttention3):
        monkeypatch.setattr(backend, "probe", lambda self: [])
    monkeypatch.setattr(TorchCudnn, "lacks", lambda self: ("this torch has no cuDNN",))


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (10, 3), (12, 0)])
def test_capabilities_on_paper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """With everything installed, Blackwell rules out FlashAttention-3 alone, whose kernels are Hopper's."""
    fake_machine(monkeypatch, capability=capability)
    refused = {}
    for backend in (*BACKENDS, FP8):
        reasons = missing_requirements(backend.needs)
        if backend.needs.cuda and reasons:
            refused[backend.name] = reasons
    major, minor = capability
    assert all(f"compute capability is {major}.{minor}" in " ".join(reasons) for reasons in refused.values())
    too_old = {backend.name for backend in (*BACKENDS, FP8) if backend.needs.cuda}
    assert refused.keys() == (too_old if major < 8 else {"flash_attention_3"})


def test_every_gpu_is_asked_for_its_own_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with two kinds of GPUs, the current device says nothing about that of a request."""
    monkeypatch.setattr(machine, "why_missing", lambda package: None)
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(7, 5), (9, 0)][index])
    for backend in (FlashinferCudnn, FlashAttention3):
        monkeypatch.setattr(backend, "probe", lambda self: [])
    machine.reset()
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        for backend in (FlashinferCudnn(), FlashAttention3()):
            reasons = [backend.reasons_against(request(f"cuda:{index}", torch.bfloat16)) for index in (0, 1)]
            assert "compute capability is 7.5" in reasons[0][0] and not reasons[1], (backend.name, reasons)
            assert bool(missing_requirements(backend.needs)) == (current == 0)
    machine.reset()


def test_rules_of_auto_name_backends_and_cite_a_measurement() -> None:
    ranked = {backend.name for backend in BACKENDS if not backend.by_name_only}
    for rule in backends.AUTO:
        assert set(rule.order) <= ranked
        assert len(set(rule.order)) == len(rule.order) and rule.order.count("sdpa") == 1, "sdpa can run every request"
        assert any(char.isdigit() for char in rule.measured)
    assert {rule.kind for rule in backends.AUTO} == {"full", "window"}
    assert {name for rule in backends.AUTO for name in rule.order} == ranked


def test_another_version_without_the_functions_that_we_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cute: Any = ModuleType("flash_attn.cute")
    cute.interface = ModuleType("flash_attn.cute.interface")
    for module in (ModuleType("flash_attn"), cute, cute.interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    [why] = backend_named("flash_attention_4").probe()
    assert why == "this flash-attn-4 has no _flash_attn_fwd, _flash_attn_bwd"


def test_prompts_attend_by_flash_attention_3_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causally, within rows, with groups of queries. The package is a stand-in by torch."""

    def attend(q: Any, k: Any, v: Any, *bounds: Any, softmax_scale: float, causal: bool) -> Any:
        of_queries, of_keys, *longest = bounds
        assert of_queries is of_keys and longest == [4, 4]
        outs = []
        for row in zip(*(x.split(of_queries.diff().tolist()) for x in (q, k, v)), strict=True):
            heads = [x.transpose(0, 1)[None] for x in row]
            options: Any = dict(is_causal=causal, scale=softmax_scale, enable_gqa=True)
            outs.append(nn.functional.scaled_dot_product_attention(*heads, **options)[0].transpose(0, 1))
        return torch.cat(outs), None  # early releases return the log-sum-exp, too

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=attend))
    lengths = [4, 1, 3]
    q, k, v = (torch.randn(8, heads, 16) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 4, 5, 8], dtype=torch.int32)
    expected = CausalAttention(lengths, q.device)(0, q, k, v, 0.3)
    assert relative_error(causal_attention(q, k, v, cu_seqlens, 4, 0.3), expected) < 1e-6
