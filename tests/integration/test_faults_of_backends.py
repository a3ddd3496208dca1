"""Faults put into backends, from tables: each call falls back, is reported and counted, or raises under `strict`.

A FlashInfer of plain torch stands in for cuDNN.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.backends import add_spoiled
from support.changes import through_pickle
from support.faults import GRID, PREFILL, Flashinfer, StockModels, faults_of, install_flashinfer, raises
from support.fp8 import run_fp8_on_cpu
from support.patching import status_of
from support.towers import skip_without_metadata
from tiny import assert_close, outputs_of, pixels_for, run_tower, tower_of

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, FallbackError, Fp8Config, machine
from hf_vit_accel.backends import FP8, backend_named, cudnn_fp8
from hf_vit_accel.backends import flash_attention_3 as fa3_backend
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.backends import flex as flex_backend
from hf_vit_accel.backends.base import Needs
from hf_vit_accel.tower.state import state_of

pytestmark = pytest.mark.usefixtures("afresh")

FRONTEND = SimpleNamespace(execute=lambda tensors: None)
LACKING: dict[str, tuple[str, object, str]] = {
    "flashinfer does not import": (PREFILL, None, f"ModuleNotFoundError: import of {PREFILL} halted"),
    "cudnn is too old": ("cudnn", SimpleNamespace(backend_version=lambda: 91800), "cuDNN 91800 is older than 91900"),
    "the cudnn frontend takes tensors by name only": (
        "cudnn",
        SimpleNamespace(backend_version=lambda: 92000, pygraph=FRONTEND),
        "the cuDNN frontend is older than 1.31 (pip install",
    ),
}
"""What keeps cuDNN from running: a module, what stands in its place, and the reason."""


@pytest.mark.parametrize("name", LACKING)
def test_a_machine_without_cudnn(
    flashinfer: Flashinfer, stock_models: StockModels, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`auto` takes another backend, naming the backend raises at once."""
    module, found, reason = LACKING[name]
    model, expected = stock_models["qwen2_5_vl"]
    monkeypatch.setitem(sys.modules, module, found)
    machine.reset()
    with pytest.raises(BackendUnavailableError) as unavailable:
        hf_vit_accel.patch(model, attention="flashinfer_cudnn")
    assert reason in str(unavailable.value) and "attention='auto'" in str(unavailable.value)
    assert state_of(tower_of(model)) is None
    hf_vit_accel.patch(model, strict=True)
    assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    (rejection,) = status.rejected["full"]["flashinfer_cudnn"]
    assert reason in rejection and "flashinfer_cudnn" in str(status)
    assert status.backends == {"full": "sdpa", "window": "sdpa"} and not status.fallbacks


@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn"])
def test_a_call_that_is_too_long_for_a_backend_goes_to_the_next(
    flashinfer: Flashinfer, stock_models: StockModels, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """The limit is known before the call, so that calls of other sizes keep the backend."""
    model, _ = stock_models["qwen2_vl"]
    tower = tower_of(model)
    small = [(2, 4, 4), (1, 6, 8)]
    large = [(2, 4, 4), (1, 10, 10)]
    expected = [run_tower(tower, grid) for grid in (small, large)]
    monkeypatch.setattr(cudnn_backend, "INT32_END", 3 * 160 * 99)
    hf_vit_accel.patch(model, attention=attention)
    for _ in range(2):
        for grid, outputs, backend in zip((small, large), expected, ("flashinfer_cudnn", "sdpa"), strict=True):
            assert_close(run_tower(tower, grid), outputs)
            assert status_of(model).backends["full"] == backend
    reason = "flashinfer_cudnn cannot serve the call: 132 rows, its int32 offsets reach 98"
    assert status_of(model).fallbacks == ({reason: 2} if attention != "auto" else {}) and not faults_of(model)
    offsets = torch.tensor([0, 32, 132], dtype=torch.int32)  # offsets of the caller come without a plan
    tower.config._attn_implementation_internal = "flashinfer_cudnn"
    outputs = run_tower(tower, large, cu_seqlens=offsets)
    hf_vit_accel.unpatch(model)
    assert_close(outputs, run_tower(tower, large, cu_seqlens=offsets))


# --- any backend ------------------------------------------------------------------------------------------------------


def _break_fa3(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(fa3_backend.FlashAttention3, "needs", Needs(cuda=False))
    monkeypatch.setattr(fa3_backend.FlashAttention3, "probe", lambda self: [])
    monkeypatch.setattr(fa3_backend.FlashAttention3, "attend", raises(error))


def _break_flex(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(flex_backend, "compiles", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: raises(error))


def _break_fp8(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run_fp8_on_cpu(monkeypatch)
    monkeypatch.setattr(cudnn_fp8, "cudnn_plan_for", lambda *args: SimpleNamespace(run=raises(error)))


def _break_cudnn(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(install_flashinfer(monkeypatch), "plan", raises(error))


def _break_cudnn_at_run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(install_flashinfer(monkeypatch), "run", raises(error))


@dataclass(frozen=True)
class Broken:
    backend: str
    break_backend: Callable[[pytest.MonkeyPatch, Exception], None]
    error: Exception
    ways: tuple[str, ...] = ("fast", "hooked", "gradients")  # the ways of calling that use the broken part
    is_named: bool = True  # or `auto` chooses it

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `patch` that request the backend."""
        if self.backend == FP8.name:
            return {"fp8": Fp8Config(min_seqlen=0)}
        return {"attention": self.backend} if self.is_named else {}

    @property
    def is_differentiable(self) -> bool:
        """Whether calls with gradients use the backend."""
        return self.backend != FP8.name and backend_named(self.backend).needs.differentiable


BROKEN: dict[str, Broken] = {
    "flash_attention_3": Broken(
        "flash_attention_3", _break_fa3, ImportError("undefined symbol: _ZN2at4_ops5zeros4callE")
    ),
    "flex": Broken("flex", _break_flex, NotImplementedError("no lowering for this graph")),
    "cuDNN, without a plan": Broken(
        "flashinfer_cudnn", _break_cudnn, RuntimeError("CUDNN_STATUS_NOT_SUPPORTED no engine"), ("fast",)
    ),
    "cuDNN, chosen by auto": Broken(
        "flashinfer_cudnn", _break_cudnn_at_run, RuntimeError("EXECUTION_FAILED"), ("fast", "hooked"), is_named=False
    ),
    "FP8's attention": Broken(FP8.name, _break_fp8, RuntimeError("EXECUTION_FAILED"), ("fast",)),
}
"""By the part that is broken."""


def run_on_metadata_of_the_caller(tower: torch.nn.Module, offsets: torch.Tensor) -> list[torch.Tensor]:
    """Run a call that goes `stock_way.Way.STOCK`."""
    skip_without_metadata(tower)
    with torch.no_grad():
        return outputs_of(tower(pixels_for(tower, GRID), torch.tensor(GRID), cu_seqlens=offsets))


def offsets_of_frames() -> torch.Tensor:
    lengths = [height * width for frames, height, width in GRID for _ in range(frames)]
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("case", ["flash_attention_3", "flex"])
def test_a_backend_that_fails_where_stock_runs_on_what_it_was_called_with(
    stock_models: StockModels, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    broken = BROKEN[case]
    model, expected = stock_models["qwen2_vl"]
    tower = tower_of(model)
    broken.break_backend(monkeypatch, broken.error)
    offsets = offsets_of_frames()
    hf_vit_accel.patch(model, **broken.options)
    for _ in range(3):
        assert_close(run_on_metadata_of_the_caller(tower, offsets), expected)
    assert (status_of(model).stock_calls, faults_of(model)) == (3, {broken.backend})
    hf_vit_accel.patch(model, **broken.options)
    assert not faults_of(model)
    assert_close(run_on_metadata_of_the_caller(tower, offsets), expected)
    assert faults_of(model) == {broken.backend}


def test_the_named_backend_attends_where_stock_runs_on_what_it_was_called_with(
    stock_models: StockModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[torch.Tensor] = []

    def keep(out_THD: torch.Tensor) -> torch.Tensor:
        attended.append(out_THD)
        return out_THD

    model, expected = stock_models["qwen2_vl"]
    tower = tower_of(model)
    add_spoiled(monkeypatch, keep, name="named")
    offsets = offsets_of_frames()
    for attention in ("named", "auto", "named"):
        attended.clear()
        hf_vit_accel.patch(model, attention=attention)
        assert_close(run_on_metadata_of_the_caller(tower, offsets), expected)
        assert len(attended) == (len(tower.blocks) if attention == "named" else 0)


@pytest.mark.parametrize(("case", "way"), [(case, way) for case, broken in BROKEN.items() for way in broken.ways])
def test_a_backend_that_fails_when_it_runs(
    stock_models: StockModels,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    way: str,
) -> None:
    """On the fast path, and where the stock forward calls the registered attention function with our plans."""
    broken = BROKEN[case]
    model, expected = stock_models["qwen2_vl"]
    tower = tower_of(model)
    broken.break_backend(monkeypatch, broken.error)
    reason = f"failed when it ran: {type(broken.error).__name__}: {broken.error}"
    is_used = way != "gradients" or broken.is_differentiable
    if way == "hooked":
        request.addfinalizer(tower.rotary_pos_emb.register_forward_hook(lambda *_: None).remove)

    def run() -> list[torch.Tensor]:
        with torch.set_grad_enabled(way == "gradients"):
            return [output.detach() for output in outputs_of(tower(pixels_for(tower, GRID), torch.tensor(GRID)))]

    hf_vit_accel.patch(model, **broken.options)
    for _ in range(3):
        assert_close(run(), expected)
    status = status_of(model)
    assert status.fallbacks.get(f"{broken.backend} cannot serve the call: {reason}", 0) == 3 * is_used
    assert (status.calls, status.stock_calls) == ((0, 3) if way == "hooked" else (3, 0))
    assert status.backends["full"] == "sdpa"
    assert faults_of(model) == ({broken.backend} if is_used else set())
    if way == "hooked":
        return
    for twin in (copy.deepcopy(model), through_pickle(model)):
        assert not faults_of(twin), "a copy tries for itself"
    hf_vit_accel.patch(model, strict=True, **broken.options)
    for _ in range(2):
        with pytest.raises(FallbackError, match="failed when it ran" if is_used else "gradients are required"):
            run()
        assert not faults_of(model)
    hf_vit_accel.patch(model, **broken.options)
    run()
    monkeypatch.undo()
    run()
    assert faults_of(model) == ({broken.backend} if is_used else set()), "remembered until it is patched again"
    hf_vit_accel.patch(model)
    assert not faults_of(model)


def test_a_gpu_that_cannot_be_asked_does_not_stop_a_cpu_tower(
    stock_models: StockModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = stock_models["qwen2_vl"]
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "why_missing", lambda package: None)
    monkeypatch.setattr(machine, "cuda_capability", raises(RuntimeError("CUDA error: all devices are busy")))
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), GRID), expected)
    (first, *_) = status_of(model).rejected["full"]["torch_varlen"]
    assert first == "the GPU cannot be used: CUDA error: all devices are busy"
    with pytest.raises(BackendUnavailableError, match="all devices are busy"):
        hf_vit_accel.patch(model, attention="torch_varlen")
