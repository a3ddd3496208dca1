"""Faults put into everything that may fail, from tables: each ends in a fallback that is told and counted, or raises.

There is no GPU here. A FlashInfer made of plain torch follows offsets and lengths as cuDNN does, kernels' references
stand in for the kernels, and a recorder replays graphs by running again.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.cpu_graphs import SMALL
from support.kernel_table import KERNELS
from support.references import put
from tiny import FAMILIES, GRIDS, TINY, assert_close, outputs_of, pixels_for, run_tower, tower_of
from torch import nn
from torch._C import DispatchKey, DispatchKeySet

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, FallbackError, FlexConfig, machine
from hf_vit_accel.backends import BACKENDS, backend_named
from hf_vit_accel.backends import flash_attention_3 as fa3_backend
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.backends import flex as flex_backend
from hf_vit_accel.backends.base import Needs
from hf_vit_accel.engine import route
from hf_vit_accel.ops import add_norm, linear_activation, mlp
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]
PREFILL = "flashinfer.cudnn.prefill"
ANYWHERE = Needs(cuda=False, differentiable=True)


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """One model a family, and what its stock tower makes of GRID."""
    models = {name: tiny.build() for name, tiny in TINY.items()}
    return {name: (model, run_tower(tower_of(model), GRID)) for name, model in models.items()}


@pytest.fixture(autouse=True)
def afresh(built: Any) -> Iterator[None]:
    """Nothing is known of the machine before or after, and every model is stock again."""
    _forget()
    yield
    _forget()
    for model, _ in built.values():
        hf_vit_accel.unpatch(model)


def _forget() -> None:
    machine.reset()
    cudnn_backend.GRAPHS.clear()
    cudnn_backend.WORKSPACES.close()
    flex_backend.compiled.cache_clear()


def status_of(model: Any) -> Any:
    return hf_vit_accel.status(model).towers[0]


def faults_of(model: Any) -> set[str]:
    return set(state_of(tower_of(model)).faults)


def raises(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error.with_traceback(None)

    return call


# --- a FlashInfer of plain torch --------------------------------------------------------------------------------------


class Graph:
    """A built plan: reads and writes where offsets and lengths point to, in elements, as cuDNN does."""

    def __init__(self, owner: Any, scale: float, longest: int) -> None:
        self._owner, self._scale, self._longest = owner, scale, longest

    def get_workspace_size(self) -> int:
        return self._owner.workspace_bytes()

    def execute(self, tensors: Any, tensor_uids: Any, workspace: torch.Tensor, handle: Any) -> None:
        assert len(tensors) == len(set(tensor_uids)) == 10 and workspace.dtype == torch.uint8
        assert workspace.numel() >= self._owner.workspace_bytes() and handle == "handle"
        self._owner.run(*tensors[:4], tensors[4], tensors[6:], self._scale, self._longest)


class Uids:
    """Any name has one."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(value=name)


class Flashinfer(ModuleType):
    """What `flashinfer.cudnn.prefill` 0.7.2 offers, on the CPU."""

    CUDNN_AVAILABLE = True
    UIDs = Uids()

    class _PrefillMetadata(SimpleNamespace):
        pass

    def __init__(self) -> None:
        super().__init__(PREFILL)
        self.plans = self.runs = 0

    def workspace_bytes(self) -> int:
        return 4096

    def _create_cudnn_handle(self, stream: Any) -> str:
        return "handle"

    def prepare_cudnn_batch_prefill(self, q: Any, k: Any, v: Any, scale: float, lengths: Any, metadata: Any) -> Any:
        assert not metadata.causal and metadata.actual_seq_lens_q is lengths and metadata.batch_offsets_q.dim() == 4
        self.plans += 1
        return SimpleNamespace(graph=Graph(self, scale, metadata.max_token_per_sequence))

    def run(self, q: Any, k: Any, v: Any, out: Any, lengths: Any, offsets: Any, scale: float, longest: int) -> None:
        self.runs += 1
        shape, starts = q.shape[1:], torch.stack([x.flatten() for x in offsets], 1)
        for length, at in zip(lengths.flatten().tolist(), starts.tolist()[:-1], strict=True):
            assert length <= longest
            parts = [
                torch.as_strided(x, (length, *shape), x.stride(), x.storage_offset() + start)
                for x, start in zip((q, k, v, out), at, strict=True)
            ]
            q_HLD, k_HLD, v_HLD = (x.transpose(0, 1)[None] for x in parts[:3])
            done = nn.functional.scaled_dot_product_attention(q_HLD, k_HLD, v_HLD, scale=scale)
            parts[3].copy_(done[0].transpose(0, 1))


@pytest.fixture(scope="module")
def operator_on_cpu() -> Iterator[None]:
    """cuDNN's operator for CPU tensors too, as long as this file runs."""
    library = torch.library.Library("hf_vit_accel", "FRAGMENT")
    operator, keys = torch.ops.hf_vit_accel.cudnn_attention.default, DispatchKeySet(DispatchKey.CUDA)
    library.impl("cudnn_attention", lambda *arguments: operator.redispatch(keys, *arguments), "CPU")
    yield
    library._destroy()


@pytest.fixture
def flashinfer(operator_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Flashinfer:
    """The real cuDNN backend in front of the one above, taken for one that runs on this machine in any dtype."""
    fake, kind = Flashinfer(), cudnn_backend.FlashinferCudnn
    for name in ("flashinfer", "flashinfer.cudnn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, PREFILL, fake)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=lambda: 92000, pygraph=Graph))
    monkeypatch.setattr(kind, "needs", Needs(cuda=False, head_dim_multiple=8, head_dim_max=128))
    stream = SimpleNamespace(device=torch.device("cpu"), cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


# --- faults of FlashInfer and cuDNN -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault of FlashInfer or cuDNN. arrange: puts it in. reason: what of it status tells.

    early: it shows before anything runs, so that naming the backend raises at once; else it shows at the first call.
    served: the backend has another way, and nothing is lost.
    """

    arrange: Callable[[Any, Any], None]
    reason: str = ""
    early: bool = False
    served: bool = False


def _frontend(module: Any) -> Callable[[Any, Any], None]:
    return lambda fake, monkeypatch: monkeypatch.setitem(sys.modules, "cudnn", module)


def _without(*names: str) -> Callable[[Any, Any], None]:
    """A FlashInfer in which these pieces are missing."""

    def arrange(fake: Any, monkeypatch: Any) -> None:
        module, pieces = ModuleType(PREFILL), {name for name in dir(type(fake)) if not name.startswith("__")}
        vars(module).update({name: getattr(fake, name) for name in pieces.difference(names)})
        monkeypatch.setitem(sys.modules, PREFILL, module)

    return arrange


def _with(**pieces: Any) -> Callable[[Any, Any], None]:
    """A FlashInfer in which these pieces are other ones."""

    def arrange(fake: Any, monkeypatch: Any) -> None:
        for name, piece in pieces.items():
            monkeypatch.setattr(fake, name, piece)

    return arrange


def _workspace(error: Exception) -> Callable[[Any, Any], None]:
    """Allocating scratch memory fails, and nothing else."""

    def arrange(fake: Any, monkeypatch: Any) -> None:
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("dtype") is torch.uint8:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(torch, "empty", empty)

    return arrange


FAULTS = {
    "flashinfer does not import": Fault(
        lambda fake, monkeypatch: monkeypatch.setitem(sys.modules, PREFILL, None),
        f"ModuleNotFoundError: import of {PREFILL} halted",
        early=True,
    ),
    "the cudnn frontend does not import": Fault(_frontend(None), "ModuleNotFoundError", early=True),
    "the cudnn frontend tells no version": Fault(_frontend(SimpleNamespace()), "AttributeError", early=True),
    "flashinfer is without cudnn": Fault(_with(CUDNN_AVAILABLE=False), "cannot import the cuDNN frontend", early=True),
    "cudnn is too old": Fault(
        _frontend(SimpleNamespace(backend_version=lambda: 91800)), "cuDNN 91800 is older than 91900", early=True
    ),
    "the cudnn frontend takes tensors by name only": Fault(
        _frontend(
            SimpleNamespace(backend_version=lambda: 92000, pygraph=SimpleNamespace(execute=lambda tensors: None))
        ),
        "the cuDNN frontend is older than 1.31 (pip install",
        early=True,
    ),
    "an untested version does not tell of cudnn": Fault(_without("CUDNN_AVAILABLE"), served=True),
    "an untested version prepares no plans": Fault(
        _without("prepare_cudnn_batch_prefill", "UIDs"),
        "this FlashInfer has no prepare_cudnn_batch_prefill, UIDs (pip install",
        early=True,
    ),
    "no plan can be built": Fault(
        _with(prepare_cudnn_batch_prefill=raises(RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nno engine"))),
        "failed when it ran: RuntimeError: CUDNN_STATUS_NOT_SUPPORTED no engine",
    ),
    "the workspace's size is not told": Fault(_with(workspace_bytes=raises(RuntimeError("no size"))), "no size"),
    "the workspace cannot be allocated": Fault(_workspace(RuntimeError("CUDA driver error")), "CUDA driver error"),
    "there is no memory for the workspace": Fault(
        _workspace(torch.OutOfMemoryError("Tried to allocate")), "no memory for a workspace of"
    ),
    "there is no handle": Fault(_with(_create_cudnn_handle=raises(RuntimeError("NOT_INITIALIZED"))), "NOT_INITIALIZED"),
    "the operator fails when it runs": Fault(_with(run=raises(RuntimeError("EXECUTION_FAILED"))), "EXECUTION_FAILED"),
}


@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_cudnn(flashinfer: Any, built: Any, monkeypatch: Any, name: str, attention: str) -> None:
    fault, (model, expected) = FAULTS[name], built["qwen2_5_vl"]
    tower = tower_of(model)
    with monkeypatch.context() as broken:
        fault.arrange(flashinfer, broken)
        machine.reset()
        if fault.early and attention != "auto":
            with pytest.raises(BackendUnavailableError) as unavailable:
                hf_vit_accel.patch(model, attention=attention)
            assert fault.reason in str(unavailable.value) and "attention='auto'" in str(unavailable.value)
            assert state_of(tower) is None
            return
        hf_vit_accel.patch(model, attention=attention)
        for _ in range(3):
            assert_close(run_tower(tower, GRID), expected)
        status = status_of(model)
        assert (status.calls, status.stock_calls) == (3, 0)
        if fault.served:
            assert status.backends["full"] == "flashinfer_cudnn" and not status.fallbacks
            return
        assert status.backends == {"full": "sdpa", "window": "sdpa"}
        (why,) = status.rejected["full"]["flashinfer_cudnn"]
        assert fault.reason in why and "flashinfer_cudnn" in str(status)
        counted = {reason: count for reason, count in status.fallbacks.items() if why in reason}
        assert list(counted.values()) == ([] if fault.early else [3]) and len(counted) == len(status.fallbacks)
        hf_vit_accel.patch(model, attention=attention, strict=True)
        if fault.early:  # "auto" asked for nothing that it does not get
            assert_close(run_tower(tower, GRID), expected)
        else:
            for _ in range(2):
                with pytest.raises(FallbackError, match="flashinfer_cudnn failed when it ran") as strict:
                    run_tower(tower, GRID)
                assert fault.reason in str(strict.value)
            assert not faults_of(model) and status_of(model).calls == 0
        hf_vit_accel.patch(model, attention=attention)
        run_tower(tower, GRID)
    # It is not forgotten while the tower stays as it is, and tried anew once it is patched anew.
    machine.reset()
    assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "sdpa"
    hf_vit_accel.patch(model, attention=attention, strict=True)
    assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "flashinfer_cudnn" and not status_of(model).fallbacks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flashinfer_serves_a_tower(flashinfer: Any, built: Any, family: str) -> None:
    model, expected = built[family]
    hf_vit_accel.patch(model, attention="flashinfer_cudnn", strict=True)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), GRID), expected)
    assert set(status_of(model).backends.values()) == {"flashinfer_cudnn"} and not status_of(model).fallbacks
    assert flashinfer.runs == 2 * len(tower_of(model).blocks) and 0 < flashinfer.plans <= 2


@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn"])
def test_a_call_that_is_too_long_for_a_backend_goes_to_the_next(
    flashinfer: Any, built: Any, monkeypatch: Any, attention: str
) -> None:
    """Known before the call, so that calls of other sizes keep the backend."""
    model, _ = built["qwen2_vl"]
    tower, small, large = tower_of(model), [(2, 4, 4), (1, 6, 8)], [(2, 4, 4), (1, 10, 10)]
    wanted = [run_tower(tower, grid) for grid in (small, large)]
    monkeypatch.setattr(cudnn_backend, "INT32_END", 3 * 160 * 99)
    hf_vit_accel.patch(model, attention=attention)
    for _ in range(2):
        for grid, outputs, backend in zip((small, large), wanted, ("flashinfer_cudnn", "sdpa"), strict=True):
            assert_close(run_tower(tower, grid), outputs)
            assert status_of(model).backends["full"] == backend
    why = "flashinfer_cudnn cannot serve the call: 132 rows, its int32 offsets reach 98"
    assert status_of(model).fallbacks == ({why: 2} if attention != "auto" else {}) and not faults_of(model)
    offsets = torch.tensor([0, 32, 132], dtype=torch.int32)  # the caller's own: no plan comes with them
    tower.config._attn_implementation_internal = "flashinfer_cudnn"
    found = run_tower(tower, large, cu_seqlens=offsets)
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower, large, cu_seqlens=offsets))


# --- the seam of backends ---------------------------------------------------------------------------------------------


def _fa3(monkeypatch: Any, error: Exception) -> None:
    monkeypatch.setattr(fa3_backend.FlashAttention3, "needs", Needs(cuda=False))
    monkeypatch.setattr(fa3_backend.FlashAttention3, "probe", lambda self: [])
    monkeypatch.setattr(fa3_backend.FlashAttention3, "attend", raises(error))


def _varlen(monkeypatch: Any, error: Exception) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(type(backend_named("torch_varlen")), "needs", ANYWHERE)
    monkeypatch.setattr(varlen, "varlen_attn", raises(error))


def _flex(monkeypatch: Any, error: Exception) -> None:
    monkeypatch.setattr(flex_backend, "compiles", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: raises(error))


def _planning(method: str) -> Callable[[Any, Exception], None]:
    def arrange(monkeypatch: Any, error: Exception) -> None:
        monkeypatch.setattr(type(backend_named("torch_varlen")), "needs", ANYWHERE)
        monkeypatch.setattr(type(backend_named("torch_varlen")), method, raises(error))

    return arrange


BROKEN: dict[str, tuple[str, Callable[[Any, Exception], None], Exception]] = {
    "flash_attention_3": ("flash_attention_3", _fa3, ImportError("undefined symbol: _ZN2at4_ops5zeros4callE")),
    "flex": ("flex", _flex, NotImplementedError("no lowering for this graph")),
    "varlen's attend": ("torch_varlen", _varlen, TypeError("varlen_attn() got an unexpected argument 'scale'")),
    "varlen's plan": ("torch_varlen", _planning("plan"), RuntimeError("no such layout")),
    "varlen's prepare": ("torch_varlen", _planning("prepare"), RuntimeError("no kernel image")),
    "varlen's layers": ("torch_varlen", _planning("attend_layers"), RuntimeError("CUDA error")),
}


@pytest.mark.parametrize("way", ["fast", "hooked", "gradients"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_backend_that_fails_when_it_runs(built: Any, request: Any, monkeypatch: Any, case: str, way: str) -> None:
    """On the fast path, and where the stock forward calls the registered attention function with our plans."""
    model, expected = built["qwen2_vl"]
    tower, (name, arrange, error) = tower_of(model), BROKEN[case]
    arrange(monkeypatch, error)
    if case == "varlen's layers" and way == "hooked":
        pytest.skip("asked for on the fast path only")
    inputs = pixels_for(tower, GRID), torch.tensor(GRID)
    why = f"failed when it ran: {type(error).__name__}: {error}"
    runs = way != "gradients" or backend_named(name).needs.differentiable
    if way == "hooked":
        request.addfinalizer(tower.blocks[1].register_forward_hook(lambda *_: None).remove)
    hf_vit_accel.patch(model, attention=name)
    with torch.set_grad_enabled(way == "gradients"):
        for _ in range(3):
            assert_close([x.detach() for x in outputs_of(tower(*inputs))], expected)
        status = status_of(model)
        assert status.fallbacks.get(f"{name} cannot serve the call: {why}", 0) == 3 * runs
        assert (status.calls, status.stock_calls) == ((0, 3) if way == "hooked" else (3, 0))
        assert status.backends["full"] == "sdpa"
        assert faults_of(model) == ({name} if runs else set())
        if way != "hooked":
            hf_vit_accel.patch(model, attention=name, strict=True)
            with pytest.raises(FallbackError, match="failed when it ran" if runs else "gradients are required"):
                tower(*inputs)
            assert not faults_of(model)


def test_the_last_backend_has_nothing_to_go_to(built: Any, monkeypatch: Any) -> None:
    model, expected = built["qwen2_vl"]
    hf_vit_accel.patch(model)
    error = RuntimeError("no attention at all")
    with monkeypatch.context() as broken:
        broken.setattr(nn.functional, "scaled_dot_product_attention", raises(error))
        with pytest.raises(RuntimeError, match="no attention at all") as raised:
            run_tower(tower_of(model), GRID)
    assert raised.value is error and not getattr(error, "__notes__", ()) and not faults_of(model)
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert status_of(model).calls == 1 and not status_of(model).fallbacks


def test_errors_of_a_score_mod_reach_its_author(built: Any) -> None:
    def score_mod(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        if broken:
            raise KeyError("mine")
        return score

    model, expected = built["qwen2_vl"]
    broken = True
    hf_vit_accel.patch(model, attention=FlexConfig(score_mod=score_mod))
    with pytest.raises(KeyError, match="mine"):
        run_tower(tower_of(model), GRID)
    broken = False
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert status_of(model).backends["full"] == "flex" and not status_of(model).fallbacks


def test_a_gpu_that_cannot_be_asked_does_not_stop_a_cpu_tower(built: Any, monkeypatch: Any) -> None:
    model, expected = built["qwen2_vl"]
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "why_missing", lambda package: None)
    monkeypatch.setattr(machine, "cuda_capability", raises(RuntimeError("CUDA error: all devices are busy")))
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), GRID), expected)
    (first, *_) = status_of(model).rejected["full"]["torch_varlen"]
    assert first == "the GPU cannot be used: CUDA error: all devices are busy"
    with pytest.raises(BackendUnavailableError, match="all devices are busy"):
        hf_vit_accel.patch(model, attention="torch_varlen")


# --- the seam of kernels ----------------------------------------------------------------------------------------------


class Launches:
    """What `kernel[grid](...)` does where Triton cannot compile or launch it."""

    def __init__(self, error: Exception) -> None:
        self.error, self.tried = error, 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.tried += 1
            raise self.error.with_traceback(None)

        return launch


@pytest.fixture
def kernels(references: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], Launches]:
    """Breaks one kernel at its launch; the others run by their references."""

    def fail(name: str, error: Exception) -> Launches:
        kernel, launches = KERNELS[name], Launches(error)
        put(monkeypatch, vars(sys.modules[kernel.function.__module__])[kernel.name], kernel.function)
        for module, launched in kernel.launched:
            monkeypatch.setattr(module, launched, launches)
        descriptor = SimpleNamespace(from_tensor=lambda tensor, block: tensor)
        monkeypatch.setattr(linear_activation, "TensorDescriptor", descriptor, raising=False)
        if not name.startswith("linear"):  # else the product's kernel would activate as well
            monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: "not this GPU")
        return launches

    return fail


class CompilationError(Exception):
    """Stands for Triton's own, whose message shows the source first."""


LAUNCH = {
    "no C compiler": RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    "the compiler fails": subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    "the cache cannot be written": PermissionError(13, "Permission denied", ".triton/cache"),
    "the kernel does not compile": CompilationError("at 3:4:\n    x = tl.load(x)\n        ^\nunsupported"),
    "the GPU is not known": KeyError("sm_999"),
}


@pytest.fixture(scope="module")
def called() -> dict[bool, dict[tuple[str, bool], set[str]]]:
    """Filled by `callers`: whether products activate as well -> family, with gradients -> the kernels' functions."""
    return {}


def callers(name: str, called: Any, references: list[str], built: Any) -> list[tuple[str, bool]]:
    """The families that call a kernel's function, and whether with gradients."""
    activates = name.startswith("linear")
    if activates not in called:
        called[activates] = {}
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not activates:
                monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: "not this GPU")
            for family, trains in product(built, (True, False)):
                tower = tower_of(hf_vit_accel.patch(built[family][0]))
                references.clear()
                with torch.set_grad_enabled(trains):
                    tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID))
                called[activates][family, trains] = set(references)
    return [way for way, names in called[activates].items() if name in names]


@pytest.mark.parametrize(
    ("name", "error"), [*((name, "no C compiler") for name in KERNELS), *(("add_norm_", error) for error in LAUNCH)]
)
def test_a_kernel_that_cannot_be_launched(
    called: Any, references: Any, kernels: Any, built: Any, name: str, error: str
) -> None:
    """With gradients and without: in the first family that launches it then."""
    met: set[bool] = set()
    for family, trains in callers(name, called, references, built):
        if trains in met:
            continue
        (model, expected), launches = built[family], kernels(name, LAUNCH[error])
        tower = tower_of(hf_vit_accel.patch(model))
        assert "norms" in status_of(model).fused
        for _ in range(2):
            with torch.set_grad_enabled(trains):
                found = outputs_of(tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID)))
            assert_close([x.detach() for x in found], expected)
        status = status_of(model)
        assert (status.calls, status.stock_calls) == (2, 0)
        if not launches.tried:
            assert not faults_of(model)
            continue
        assert launches.tried == 1, "it is not tried again"
        met.add(trains)
        message = " ".join(str(LAUNCH[error]).split())
        why = f"failed when it ran: {type(LAUNCH[error]).__name__}: {message}"
        assert status.fused == ("patch_embed",) and status.unfused["norms"] == status.unfused["rope"] == why
        assert status.fallbacks == {f"no fused kernel can serve the call: one {why}": 2} and message in str(status)
        fails_again_where_it_is_asked_again(model, trains, LAUNCH[error])
    if not met:
        pytest.skip("it runs in the backward pass only")


def fails_again_where_it_is_asked_again(model: Any, trains: bool, error: BaseException) -> None:
    """In copies, and under `strict`, which raises."""
    tower = tower_of(hf_vit_accel.patch(model))
    with torch.set_grad_enabled(trains):
        tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID))
    assert status_of(copy.deepcopy(model)).fused != status_of(model).fused, "a copy tries for itself"
    assert not faults_of(pickle.loads(pickle.dumps(model)))
    hf_vit_accel.patch(model, strict=True)
    for _ in range(2):
        with (
            torch.set_grad_enabled(trains),
            pytest.raises(FallbackError, match=r"strict=True .*: kernels failed when it ran") as strict,
        ):
            tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID))
        assert strict.value.__context__.__cause__ is error
    hf_vit_accel.patch(model, fuse={"patch_embed"}, strict=True)
    run_tower(tower, GRID)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_and_the_backend_may_both_fail(
    kernels: Any, flashinfer: Any, built: Any, monkeypatch: Any, family: str
) -> None:
    """Two faults in one call."""
    model, expected = built[family]
    kernels("add_norm_", LAUNCH["the GPU is not known"])
    monkeypatch.setattr(flashinfer, "run", raises(RuntimeError("EXECUTION_FAILED")))
    hf_vit_accel.patch(model)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), GRID), expected)
    assert faults_of(model) == {machine.KERNELS, "flashinfer_cudnn"}
    assert sorted(status_of(model).fallbacks.values()) == [2, 2] and status_of(model).calls == 2


def test_where_nothing_helps_the_error_is_raised_and_nothing_remembered(
    kernels: Any, built: Any, monkeypatch: Any
) -> None:
    model, expected = built["qwen2_vl"]
    tower, last = tower_of(model), RuntimeError("and again")
    hf_vit_accel.patch(model)
    with monkeypatch.context() as broken:
        put(broken, vars(add_norm)["add_norm_"], raises(RuntimeError("an illegal memory access was encountered")))
        broken.setattr(nn.functional, "scaled_dot_product_attention", raises(last))
        with pytest.raises(RuntimeError, match="and again") as raised:
            run_tower(tower, GRID)
        assert raised.value is last and "illegal memory access" in " ".join(last.__notes__)
    assert not faults_of(model) and not status_of(model).fallbacks
    assert_close(run_tower(tower, GRID), expected)
    assert "norms" in status_of(model).fused


def test_two_threads_meet_a_fault_at_once(kernels: Any, built: Any, monkeypatch: Any) -> None:
    model, expected = built["qwen2_vl"]
    tower, together, wrong = tower_of(model), threading.Barrier(3), []
    launches = kernels("add_norm_", LAUNCH["the GPU is not known"])
    launch = KERNELS["add_norm_"].function

    def slow(*args: Any, **kwargs: Any) -> Any:
        together.wait(20)
        return launch(*args, **kwargs)

    put(monkeypatch, launch, slow)
    hf_vit_accel.patch(model)

    def work() -> None:
        try:
            for _ in range(3):
                assert_close(run_tower(tower, GRID), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and launches.tried == 3 and faults_of(model) == {machine.KERNELS}


class Failing(nn.Module):
    """A module of the user's that raises."""

    def __init__(self, inner: nn.Module, error: Exception) -> None:
        super().__init__()
        self.inner, self.error, self.calls = inner, error, 0

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("name", ["blocks.1.attn.proj", "blocks.2.mlp", "blocks.0.norm1", "merger", "merger.mlp.0"])
def test_errors_of_a_users_module_are_the_users(references: Any, name: str) -> None:
    model = TINY["qwen2_5_vl"].build()
    tower, error = tower_of(model), RuntimeError("mine")
    parent, _, child = name.rpartition(".")
    failing = Failing(tower.get_submodule(name), error)
    setattr(tower.get_submodule(parent), child, failing)
    hf_vit_accel.patch(model)
    with pytest.raises(RuntimeError, match="mine") as raised:
        run_tower(tower, GRID)
    assert raised.value is error and failing.calls == 1 and not faults_of(model)


# --- faults with CUDA graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_that_fails_in_a_capture(on_cpu: Any, kernels: Any, built: Any, family: str) -> None:
    """Captured anew without kernels, and replayed from then on."""
    model, expected = built[family]
    launches = kernels("add_norm_", LAUNCH["no C compiler"])
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    for _ in range(3):
        assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert status.graphs.replays >= 3 and status.graphs.off is None and status.calls == 3
    assert launches.tried == 2, "in the capture and in the eager run after it"
    assert [count for why, count in status.fallbacks.items() if "fused kernel" in why] == [3]
    hf_vit_accel.patch(model, cuda_graphs=SMALL, strict=True)
    with pytest.raises(FallbackError, match=r"capture failed: .*Failed to find C compiler"):
        run_tower(tower_of(model), GRID)


def test_a_backend_that_fails_in_a_capture_or_later(on_cpu: Any, flashinfer: Any, built: Any) -> None:
    model, expected = built["qwen3_vl"]
    tower, run = tower_of(model), flashinfer.run
    for captured in (False, True):
        flashinfer.run = run if captured else raises(RuntimeError("EXECUTION_FAILED"))
        hf_vit_accel.patch(model, cuda_graphs=SMALL)
        if captured:  # then it fails the stock way, and the graphs that hold it go
            assert_close(run_tower(tower, GRID), expected)
            assert status_of(model).backends["full"] == "flashinfer_cudnn" and status_of(model).graphs.captures
            flashinfer.run = raises(RuntimeError("EXECUTION_FAILED"))
            handle = tower.blocks[0].register_forward_hook(lambda *_: None)
            assert_close(run_tower(tower, GRID), expected)
            handle.remove()
        for _ in range(3):
            assert_close(run_tower(tower, GRID), expected)
        status = status_of(model)
        assert status.graphs.replays >= 3 and status.backends["full"] == "sdpa"
        assert [count for why, count in status.fallbacks.items() if "EXECUTION_FAILED" in why] == [3 + captured]


def test_captures_that_fail_now_and_then_are_not_remembered_without_end(on_cpu: Any, built: Any) -> None:
    """Each with a message of its own, as memory that runs out has, and others that succeed between them."""
    model, _ = built["qwen2_vl"]
    hf_vit_accel.patch(model, cuda_graphs=hf_vit_accel.GraphConfig(max_tokens=128, exact_after=1, max_graphs=4))
    for width in range(1, 60):
        on_cpu.fail = torch.OutOfMemoryError(f"Tried to allocate {width} MiB") if width % 3 else None
        run_tower(tower_of(model), [(1, 2, 2 * width)])
    status = status_of(model).graphs
    assert len(status.eager) == 33 and "32 captures failed, the last: capture failed: OutOfMemoryError" in status.off


# --- memory that runs out, and our own invariants ---------------------------------------------------------------------


def once(monkeypatch: Any, owner: Any, name: str, error: Exception, after: int = 0) -> None:
    """Let one call of a function raise, the first or a later one; the calls after it are real."""
    real, calls = getattr(owner, name), iter(range(1 << 30))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise error.with_traceback(None)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


PLACES: dict[str, tuple[Any, str, int]] = {  # whose function, its name, which of its calls; the first three only once
    "metadata": (route, "build", 0),
    "the host's plan": (type(BACKENDS[-1]), "plan", 0),
    "the copy to the device": (route, "send", 0),
    "a product of the second layer": (nn.functional, "linear", 6),
    "attention in the second such layer": (type(BACKENDS[-1]), "attend", 1),
    "a kernel": (add_norm, "add_norm_reference", 3),  # what stands in for it calls that
}


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, AssertionError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_fault_reaches_the_user(
    references: Any, built: Any, monkeypatch: Any, place: str, strict: bool, kind: Any
) -> None:
    """The very error, with nothing added; nothing is broken, counted or remembered."""
    model, expected = built["qwen2_5_vl"]
    tower, error = tower_of(model), kind("CUDA out of memory. Tried to allocate 20.00 GiB.")
    hf_vit_accel.patch(model, strict=strict)
    for _ in range(1 if place in list(PLACES)[:3] else 2):  # with a layout that is new, and one that is held
        with monkeypatch.context() as broken:
            owner, name, after = PLACES[place]
            once(broken, owner, name, error, after)
            with pytest.raises(kind) as raised:
                run_tower(tower, GRID)
        assert raised.value is error and error.args == ("CUDA out of memory. Tried to allocate 20.00 GiB.",)
        assert error.__cause__ is None and error.__context__ is None and not getattr(error, "__notes__", ())
        assert not faults_of(model) and not status_of(model).fallbacks
        assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).stock_calls == 0 and "norms" in status_of(model).fused


@pytest.mark.parametrize(("piece", "after"), [("prepare_cudnn_batch_prefill", 0), ("run", 2)])
def test_out_of_memory_in_a_library(flashinfer: Any, built: Any, monkeypatch: Any, piece: str, after: int) -> None:
    model, expected = built["qwen3_vl"]
    error = torch.OutOfMemoryError("Tried to allocate")
    hf_vit_accel.patch(model)
    with monkeypatch.context() as broken:
        once(broken, flashinfer, piece, error, after)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            run_tower(tower_of(model), GRID)
    assert raised.value is error and not faults_of(model)
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert status_of(model).backends["full"] == "flashinfer_cudnn" and not status_of(model).fallbacks


@pytest.mark.parametrize("family", FAMILIES)
def test_out_of_memory_with_graphs(on_cpu: Any, built: Any, monkeypatch: Any, family: str) -> None:
    """In a capture: this call runs eagerly. In a replay: it reaches the user, and the next call is replayed."""
    model, expected = built[family]
    tower, error = tower_of(model), torch.OutOfMemoryError("Tried to allocate")
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    with monkeypatch.context() as broken:
        once(broken, nn.functional, "linear", error, 5)
        assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).graphs.eager == {"capture failed: OutOfMemoryError: Tried to allocate": 1}
    assert status_of(model).graphs.replays == 0 and not faults_of(model)
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    assert_close(run_tower(tower, GRID), expected)
    for owner, name in ((route, "send"), (torch.Tensor, "new_empty")):
        state_of(tower).routes.cache.clear()
        with monkeypatch.context() as broken:
            once(broken, owner, name, error)
            with pytest.raises(torch.OutOfMemoryError) as raised:
                run_tower(tower, GRID)
        assert raised.value is error
        assert_close(run_tower(tower, GRID), expected)
    assert not faults_of(model) and not status_of(model).fallbacks and not status_of(model).graphs.eager


# --- on a GPU ---------------------------------------------------------------------------------------------------------

WITHOUT = """
import torch
from tiny import GRIDS, TINY, assert_close, run_tower, tower_of
import hf_vit_accel
model = TINY["qwen2_5_vl"].build().to("cuda", torch.bfloat16)
expected = run_tower(tower_of(model), GRIDS["mixed"])
hf_vit_accel.patch(model, cuda_graphs=GRAPHS)
for _ in range(3):
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected, 3e-2)
status = hf_vit_accel.status(model).towers[0]
assert status.calls == 3 and status.fused == ("patch_embed",), status
assert any("no fused kernel can serve the call" in why for why in status.fallbacks), status.fallbacks
print("served")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_a_cache_folder_that_cannot_be_written(tmp_path: Path, graphs: bool) -> None:
    """In a process of its own: what was compiled before would serve."""
    (tmp_path / "file").touch()
    folder = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(tmp_path / "file" / "below"),
    }
    code = WITHOUT.replace("GRAPHS)", f"{graphs})")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "served" in done.stdout, done.stderr[-3000:]


@pytest.mark.gpu
def test_gpu_out_of_memory_reaches_the_user(monkeypatch: Any) -> None:
    model = TINY["qwen3_vl"].build().to("cuda", torch.bfloat16)
    tower = tower_of(model)
    hf_vit_accel.patch(model)
    expected = run_tower(tower, GRID)
    with monkeypatch.context() as broken:
        real = add_norm.add_norm_rows
        put(broken, real, lambda *args, **kwargs: (torch.empty(1 << 50, device="cuda"), real(*args, **kwargs))[1])
        with pytest.raises(torch.OutOfMemoryError):
            run_tower(tower, GRID)
    assert_close(run_tower(tower, GRID), expected, 0.0)
    assert not status_of(model).fallbacks
