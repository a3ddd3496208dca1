"""Faults put into everything that may fail, from a table: each ends in a fallback that is told and counted, or raises.

There is no GPU here. A FlashInfer made of plain torch follows offsets and lengths as cuDNN does, kernels' references
stand in for the kernels, and a recorder replays graphs by running again.
"""

from __future__ import annotations

import copy
import enum
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_graphs import SMALL, Masked, Recorder
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, FallbackError, FlexConfig, backends, env, fusion, planning
from hf_vit_accel import tower as tower_module
from hf_vit_accel.backends import ORDER
from hf_vit_accel.backends import flash_attention_3 as fa3_backend
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.backends import flex as flex_backend
from hf_vit_accel.backends.base import Needs
from hf_vit_accel.faults import KERNELS, blame
from hf_vit_accel.graphs import runner as runner_module
from hf_vit_accel.ops import activation, linear_activation, norm, positions, rope, window_attention
from hf_vit_accel.ops import launch as launch_module
from hf_vit_accel.tower import state_of

Grid = list[tuple[int, int, int]]
GRID = GRIDS["mixed"]
FAMILIES = list(TINY)
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
    env.reset()
    cudnn_backend.GRAPHS.clear()
    cudnn_backend.WORKSPACES.close()


def status_of(model: Any) -> Any:
    return hf_vit_accel.status(model).towers[0]


def raises(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error.with_traceback(None)  # as if it were new: none of the frames that it once passed

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


class Flashinfer:
    """What `flashinfer.cudnn.prefill` 0.7.2 offers, on the CPU."""

    CUDNN_AVAILABLE = True
    UIDs = enum.Enum("UIDs", {name: index for index, name in enumerate(cudnn_backend._UIDS)})

    class _PrefillMetadata(SimpleNamespace):
        pass

    def __init__(self) -> None:
        self.plans = self.runs = self.public_calls = 0

    def workspace_bytes(self) -> int:
        return 4096

    def _create_cudnn_handle(self, stream: Any) -> str:
        return "handle"

    def prepare_cudnn_batch_prefill(self, q: Any, k: Any, v: Any, scale: float, lengths: Any, metadata: Any) -> Any:
        assert not metadata.causal and metadata.actual_seq_lens_q is lengths and metadata.batch_offsets_q.dim() == 4
        self.plans += 1
        return SimpleNamespace(graph=Graph(self, scale, metadata.max_token_per_sequence))

    def cudnn_batch_prefill_with_kv_cache(
        self, q: Any, k: Any, v: Any, scale: float, workspace: Any, *, out: torch.Tensor, **options: Any
    ) -> None:
        self.public_calls += 1
        offsets = [options[name] for name in cudnn_backend._OFFSETS]
        self.run(q, k, v, out, options["actual_seq_lens_q"], offsets, scale, options["max_token_per_sequence"])

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
    library.impl("cudnn_attention", lambda *arguments: cudnn_backend._attend_cuda(*arguments), "CPU")
    yield
    library._destroy()


@pytest.fixture
def flashinfer(operator_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Flashinfer:
    """The real cuDNN backend in front of the one above, taken for one that runs on this machine in any dtype."""
    fake, kind = Flashinfer(), cudnn_backend.FlashinferCudnn
    monkeypatch.setattr(cudnn_backend, "_prefill_module", lambda: fake)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=lambda: 92000))
    monkeypatch.setattr(kind, "needs", Needs(cuda=False, head_dim_multiple=8, head_dim_max=128))
    stream = SimpleNamespace(device=torch.device("cpu"), cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fake_flashinfer_serves_a_tower(flashinfer: Flashinfer, built: Any, family: str, attention: str) -> None:
    model, expected = built[family]
    hf_vit_accel.patch(model, attention=attention, strict=True)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert status.backends["full"] == "flashinfer_cudnn" and not status.fallbacks
    assert flashinfer.runs and flashinfer.plans <= 2 and not flashinfer.public_calls


# --- faults of backends -----------------------------------------------------------------------------------------------


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


def _import_fails(fake: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cudnn_backend, "_prefill_module", raises(ImportError("libcudart.so.13: cannot open")))


def _old_cudnn(fake: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=lambda: 91800))


def _without(*names: str) -> Callable[[Any, Any], None]:
    """A FlashInfer in which these pieces are missing."""

    def arrange(fake: Any, monkeypatch: Any) -> None:
        kept = {name: getattr(fake, name) for name in dir(fake) if not name.startswith("__") and name not in names}
        monkeypatch.setattr(cudnn_backend, "_prefill_module", lambda: SimpleNamespace(**kept))

    return arrange


def _with(**pieces: Any) -> Callable[[Any, Any], None]:
    """A FlashInfer in which these pieces are other ones."""

    def arrange(fake: Any, monkeypatch: Any) -> None:
        for name, piece in pieces.items():
            monkeypatch.setattr(fake, name, piece)

    return arrange


def _in_graph(**pieces: Any) -> Callable[[Any, Any], None]:
    def arrange(fake: Any, monkeypatch: Any) -> None:
        for name, piece in pieces.items():
            monkeypatch.setattr(Graph, name, piece)

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


def _frozen(*, max_tokens: int) -> None:
    """A metadata class that takes other arguments."""


FAULTS = {
    "flashinfer does not import": Fault(_import_fails, "libcudart.so.13: cannot open", early=True),
    "the cudnn frontend does not import": Fault(
        lambda fake, monkeypatch: monkeypatch.setitem(sys.modules, "cudnn", None), "ModuleNotFoundError", early=True
    ),
    "the cudnn frontend tells no version": Fault(
        lambda fake, monkeypatch: monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace()),
        "AttributeError",
        early=True,
    ),
    "flashinfer is without cudnn": Fault(_with(CUDNN_AVAILABLE=False), "cannot import the cuDNN frontend", early=True),
    "cudnn is too old": Fault(_old_cudnn, "cuDNN 91800 is older than 91900", early=True),
    "an untested version does not tell of cudnn": Fault(_without("CUDNN_AVAILABLE"), served=True),
    "an untested version prepares no plans": Fault(_without("prepare_cudnn_batch_prefill"), served=True),
    "an untested version has other metadata": Fault(_without("_PrefillMetadata"), served=True),
    "an untested version has no handles": Fault(_without("_create_cudnn_handle"), served=True),
    "an untested version has no names of tensors": Fault(_without("UIDs"), served=True),
    "an untested version has nothing that is known": Fault(
        _without("prepare_cudnn_batch_prefill", "cudnn_batch_prefill_with_kv_cache"), "AttributeError"
    ),
    "metadata takes other arguments": Fault(_with(_PrefillMetadata=_frozen), "TypeError: _frozen() got an unexpected"),
    "plans are prepared from other arguments": Fault(
        _with(prepare_cudnn_batch_prefill=lambda spec: None), "TypeError: <lambda>() "
    ),
    "plans have no graph": Fault(_with(prepare_cudnn_batch_prefill=lambda *_, **__: object()), "AttributeError"),
    "tensors have other names": Fault(_with(UIDs=enum.Enum("UIDs", ["QUERY"])), "AttributeError"),
    "a graph's arguments cannot be read": Fault(
        _in_graph(execute=type("Builtin", (), {"__signature__": 3, "__call__": print})()), "TypeError"
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
        env.reset()
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
                assert fault.reason in str(strict.value) and strict.value.__cause__ is not None
            assert not state_of(tower).faults and status_of(model).calls == 0
        hf_vit_accel.patch(model, attention=attention)
        run_tower(tower, GRID)
    # It is not forgotten while the tower stays as it is, and tried anew once it is patched anew.
    env.reset()
    assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "sdpa"
    hf_vit_accel.patch(model, attention=attention, strict=True)
    assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "flashinfer_cudnn" and not status_of(model).fallbacks


def test_a_flashinfer_without_known_pieces_is_called_by_its_public_function(
    flashinfer: Any, built: Any, monkeypatch: Any
) -> None:
    model, expected = built["qwen3_vl"]
    _without("prepare_cudnn_batch_prefill")(flashinfer, monkeypatch)
    hf_vit_accel.patch(model, strict=True)
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert flashinfer.public_calls == len(tower_of(model).blocks) and not flashinfer.plans


def _fa3(monkeypatch: Any, error: Exception) -> None:
    monkeypatch.setattr(fa3_backend.FlashAttention3, "needs", replace(ANYWHERE, differentiable=False))
    monkeypatch.setattr(fa3_backend.FlashAttention3, "probe", lambda self: [])
    monkeypatch.setattr(fa3_backend, "_attend", raises(error))


def _varlen(monkeypatch: Any, error: Exception) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(type(backends.backend_named("torch_varlen")), "needs", ANYWHERE)
    monkeypatch.setattr(varlen, "varlen_attn", raises(error))


def _flex(monkeypatch: Any, error: Exception) -> None:
    monkeypatch.setattr(flex_backend, "_compiles", lambda device: True)
    monkeypatch.setattr(flex_backend, "_compile", lambda function: raises(error))
    flex_backend._compiled.cache_clear()


BROKEN = {"flash_attention_3": _fa3, "torch_varlen": _varlen, "flex": _flex}
RUN_TIME = {
    "runtime": RuntimeError("CUDA error: invalid configuration argument"),
    "compile": NotImplementedError("no lowering for this graph"),
    "import": ImportError("undefined symbol: _ZN2at4_ops5zeros4callE"),
    "type": TypeError("varlen_attn() got an unexpected keyword argument 'scale'"),
}


def _late(*given: Any) -> None:
    raise TimeoutError("too late")


def _late_once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise TimeoutError("too late")


class Late:
    """A handler that is an object."""

    def __call__(self, number: int, frame: Any) -> None:
        raise TimeoutError("too late")


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the operating system has no such signal")
@pytest.mark.parametrize("late", [_late, _late_once, functools.partial(_late, "context"), Late()])
def test_a_timeout_is_no_fault(built: Any, flashinfer: Flashinfer, monkeypatch: Any, late: Any) -> None:
    """What a signal's handler raises while a backend runs reaches the user, who waits for it."""
    model, expected = built["qwen2_vl"]
    hf_vit_accel.patch(model)
    former = signal.signal(signal.SIGUSR1, late)
    try:
        with monkeypatch.context() as slow:
            slow.setattr(flashinfer, "run", lambda *args: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(TimeoutError, match="too late"):
                run_tower(tower_of(model), GRID)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert status.calls == 1 and status.backends["full"] == "flashinfer_cudnn" and not status.fallbacks


@pytest.mark.parametrize("way", ["fast", "hooked", "gradients"])
@pytest.mark.parametrize("error", RUN_TIME)
@pytest.mark.parametrize("name", BROKEN)
def test_a_backend_that_fails_when_it_runs(built: Any, monkeypatch: Any, name: str, error: str, way: str) -> None:
    """On the fast path, and where the stock forward calls the registered attention function with our plans."""
    model, expected = built["qwen2_vl"]
    tower = tower_of(model)
    BROKEN[name](monkeypatch, RUN_TIME[error])
    differentiable = backends.backend_named(name).needs.differentiable
    handle = tower.blocks[1].register_forward_hook(lambda *_: None) if way == "hooked" else None
    try:
        for strict in (False, True):
            hf_vit_accel.unpatch(model)
            if strict and way == "hooked":
                break
            hf_vit_accel.patch(model, attention=name, strict=strict)
            for _ in range(1 if strict else 3):
                with torch.set_grad_enabled(way == "gradients"):
                    inputs = pixels_for(tower, GRID), torch.tensor(GRID)
                    if strict:
                        with pytest.raises(FallbackError, match="gradients" if way == "gradients" else "failed when"):
                            tower(*inputs)
                    else:
                        assert_close([x.detach() for x in outputs_of(tower(*inputs))], expected)
            if strict:
                continue
            status = status_of(model)
            fails = f"failed when it ran: {type(RUN_TIME[error]).__name__}: {RUN_TIME[error]}"
            wanted = "gradients are required" if way == "gradients" and not differentiable else fails
            assert status.fallbacks[f"{name} cannot serve the call: {wanted}" if wanted == fails else wanted] == 3
            assert status.backends["full"] == "sdpa" and status.calls + status.stock_calls == 3
    finally:
        if handle is not None:
            handle.remove()
        flex_backend._compiled.cache_clear()


def test_the_last_backend_has_nothing_to_go_to(built: Any, monkeypatch: Any) -> None:
    model, expected = built["qwen2_vl"]
    hf_vit_accel.patch(model)
    error = RuntimeError("no attention at all")
    with monkeypatch.context() as broken:
        broken.setattr(nn.functional, "scaled_dot_product_attention", raises(error))
        with pytest.raises(RuntimeError, match="no attention at all") as raised:
            run_tower(tower_of(model), GRID)
    assert raised.value is error and not state_of(tower_of(model)).faults
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert status_of(model).calls == 1 and not status_of(model).fallbacks


def test_errors_of_a_score_mod_reach_its_author(built: Any, monkeypatch: Any) -> None:
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


@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn"])
def test_a_frame_that_is_too_long_for_a_backend_goes_to_the_next(
    flashinfer: Any, built: Any, monkeypatch: Any, attention: str
) -> None:
    """Known before the call, so that calls of other sizes keep the backend."""
    model, _ = built["qwen2_vl"]
    tower, small, large = tower_of(model), [(2, 4, 4), (1, 6, 8)], [(2, 4, 4), (1, 10, 10)]
    wanted = [run_tower(tower, grid) for grid in (small, large)]
    monkeypatch.setattr(cudnn_backend, "_INT32_END", 3 * 160 * 99)
    hf_vit_accel.patch(model, attention=attention)
    for _ in range(2):
        for grid, outputs, backend in zip((small, large), wanted, ("flashinfer_cudnn", "sdpa"), strict=True):
            assert_close(run_tower(tower, grid), outputs)
            assert status_of(model).backends["full"] == backend
    why = "a segment has more than 98 rows, past which offsets overflow"
    named = {f"flashinfer_cudnn cannot serve the call: {why}": 2}
    assert status_of(model).fallbacks == (named if attention != "auto" else {}) and not state_of(tower).faults
    if attention != "auto":
        hf_vit_accel.patch(model, attention=attention, strict=True)
        assert_close(run_tower(tower, small), wanted[0])
        with pytest.raises(FallbackError, match="a segment has more than 98 rows"):
            run_tower(tower, large)
    hf_vit_accel.patch(model, attention=attention)
    offsets = torch.tensor([0, 32, 132], dtype=torch.int32)  # the caller's own: no plan comes with them
    tower.config._attn_implementation_internal = "flashinfer_cudnn"
    found = run_tower(tower, large, cu_seqlens=offsets)
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower, large, cu_seqlens=offsets))


# --- faults of kernels ------------------------------------------------------------------------------------------------


def _gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(nn.functional.linear(x, weight, bias), approximate="tanh")


@dataclass(frozen=True)
class Kernel:
    """A kernel: the module and name of what is launched, the function that launches it where `fusion` or the encoder
    looks for it, what else stands in its place, and a family that uses it."""

    module: Any
    launched: str
    owner: Any
    function: str
    reference: Any
    family: str


KERNEL = {
    "rope": Kernel(rope, "_rope_kernel", fusion, "rope_", rope.rope_reference_, "qwen2_vl"),
    "norm": Kernel(norm, "_add_norm_kernel", fusion, "add_norm_", norm.add_norm_reference_, "qwen2_5_vl"),
    "positions": Kernel(
        positions, "_add_positions_kernel", fusion, "add_positions_", positions.add_positions_reference_, "qwen3_vl"
    ),
    "swiglu": Kernel(activation, "_swiglu_kernel", fusion, "swiglu", activation.swiglu_reference, "qwen2_5_vl"),
    "pad_swiglu": Kernel(
        activation, "_pad_swiglu_kernel", fusion, "pad_swiglu", activation.pad_swiglu_reference, "qwen2_5_vl"
    ),
    "quick_gelu": Kernel(
        activation, "_quick_gelu_kernel", fusion, "quick_gelu_", activation.quick_gelu_reference, "qwen2_vl"
    ),
    "linear_swiglu": Kernel(
        linear_activation,
        "_linear_activation_kernel",
        fusion,
        "linear_swiglu",
        linear_activation.linear_swiglu_reference,
        "qwen2_5_vl",
    ),
    "linear_quick_gelu": Kernel(
        linear_activation,
        "_linear_activation_kernel",
        fusion,
        "linear_quick_gelu",
        linear_activation.linear_quick_gelu_reference,
        "qwen2_vl",
    ),
    "window_attention": Kernel(
        window_attention,
        "_window_attention_kernel",
        window_attention,
        "window_attention",
        window_attention.window_attention_reference,
        "qwen2_5_vl",
    ),
}


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
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], Launches]:
    """Kernels are taken for runnable, by their references; the function breaks one of them at its launch."""
    real = {name: getattr(kernel.owner, kernel.function) for name, kernel in KERNEL.items()}
    monkeypatch.setattr(fusion, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(fusion, "why_not_descriptors", lambda device: None)
    monkeypatch.setattr(fusion, "linear_gelu_tanh", _gelu)
    for kernel in KERNEL.values():
        monkeypatch.setattr(kernel.owner, kernel.function, kernel.reference)

    def fail(name: str, error: Exception) -> Launches:
        kernel, launches = KERNEL[name], Launches(error)
        monkeypatch.setattr(kernel.owner, kernel.function, real[name])
        monkeypatch.setattr(kernel.module, kernel.launched, launches)
        if kernel.module is linear_activation:
            descriptor = SimpleNamespace(from_tensor=lambda tensor, block: tensor)
            monkeypatch.setattr(linear_activation, "TensorDescriptor", descriptor, raising=False)
        elif kernel.module is activation:
            monkeypatch.setattr(fusion, "why_not_descriptors", lambda device: "not this GPU")
        return launches

    return fail


class CompilationError(Exception):
    """Stands for Triton's own, whose message shows the source first."""


LAUNCH = {
    "no C compiler": RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    "the compiler fails": subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    "no ptxas": FileNotFoundError(2, "No such file or directory", "ptxas"),
    "the cache cannot be written": PermissionError(13, "Permission denied", ".triton/cache"),
    "the cache is full": OSError(28, "No space left on device"),
    "the kernel does not compile": CompilationError("at 3:4:\n    x = tl.load(x)\n        ^\nunsupported"),
    "the GPU is not known": KeyError("sm_999"),
    "too much shared memory": RuntimeError("out of resource: shared memory, Required: 300000, limit: 232448"),
    "the driver refuses": RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
}
CASES = [(kernel, "no C compiler") for kernel in KERNEL] + [("norm", error) for error in LAUNCH]


@pytest.mark.parametrize(("name", "error"), CASES)
def test_a_kernel_that_cannot_be_launched(kernels: Any, built: Any, name: str, error: str) -> None:
    model, expected = built[KERNEL[name].family]
    tower, launches = tower_of(model), kernels(name, LAUNCH[error])
    hf_vit_accel.patch(model)
    assert "norms" in status_of(model).fused
    for _ in range(3):
        assert_close(run_tower(tower, GRID), expected)
    status = status_of(model)
    assert launches.tried == 1, "not tried again"
    assert status.fused == ("patch_embed",) and (status.calls, status.stock_calls) == (3, 0)
    message = " ".join(str(LAUNCH[error]).split())
    why = f"failed when it ran: {type(LAUNCH[error]).__name__}: {message}"
    assert status.unfused["norms"] == status.unfused["rope"] == why
    assert status.fallbacks == {f"no fused kernel can serve the call: one {why}": 3}
    assert message in str(status)
    assert status_of(copy.deepcopy(model)).fused != status.fused, "a copy tries for itself"
    assert not state_of(tower_of(pickle.loads(pickle.dumps(model)))).faults
    hf_vit_accel.patch(model, strict=True)
    for _ in range(2):
        with pytest.raises(FallbackError, match=r"strict=True .*: kernels failed when it ran") as strict:
            run_tower(tower, GRID)
        assert strict.value.__cause__ is LAUNCH[error]
    hf_vit_accel.patch(model, fuse={"patch_embed"}, strict=True)
    assert_close(run_tower(tower, GRID), expected)


def test_every_kernel_is_in_the_table() -> None:
    folder = Path(launch_module.__file__).parent
    elsewhere = {"quantize", "e4m3"}  # of FP8: tests/test_fp8.py
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "launch", "patch_embed"} - elsewhere
    assert modules == {kernel.module.__name__.rpartition(".")[2] for kernel in KERNEL.values()}
    for module in modules:
        source = (folder / f"{module}.py").read_text()
        launched = {line.split("[")[0].strip() for line in source.splitlines() if "_kernel[" in line}
        here = [kernel for kernel in KERNEL.values() if kernel.module.__name__.endswith(f".{module}")]
        assert launched == {kernel.launched for kernel in here}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_and_the_backend_may_both_fail(
    kernels: Any, flashinfer: Any, built: Any, monkeypatch: Any, family: str
) -> None:
    model, expected = built[family]
    kernels("norm", LAUNCH["no ptxas"])
    monkeypatch.setattr(flashinfer, "run", raises(RuntimeError("EXECUTION_FAILED")))
    hf_vit_accel.patch(model)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), GRID), expected)
    assert set(state_of(tower_of(model)).faults) == {KERNELS, "flashinfer_cudnn"}
    assert sorted(status_of(model).fallbacks.values()) == [2, 2] and status_of(model).calls == 2


def test_two_threads_meet_a_fault_at_once(kernels: Any, built: Any) -> None:
    model, expected = built["qwen2_vl"]
    tower, together, wrong = tower_of(model), threading.Barrier(3), []
    launches = kernels("norm", LAUNCH["no ptxas"])
    launch = launches.__class__.__getitem__

    class Slow(Launches):
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            together.wait(20)
            return launch(self, grid)

    launches.__class__ = Slow
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
    assert not wrong and launches.tried == 3 and set(state_of(tower).faults) == {KERNELS}


# --- faults with CUDA graphs ------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    class Fresh(Recorder):
        pass

    masked = Masked()
    monkeypatch.setattr(runner_module, "CudaRecorder", Fresh)
    monkeypatch.setattr(tower_module, "why_not_graphs", lambda device: None)
    monkeypatch.setattr(backends, "ORDER", tuple(masked if b.name == "sdpa" else b for b in ORDER))
    return Fresh


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_that_fails_in_a_capture(graphs: Any, kernels: Any, built: Any, family: str) -> None:
    """Captured anew without kernels, and replayed from then on."""
    model, expected = built[family]
    launches = kernels("norm", LAUNCH["no C compiler"])
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    for _ in range(3):
        assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert status.graphs.replays >= 3 and status.graphs.off is None and status.calls == 3
    assert launches.tried == 2, "in the capture and in the eager run after it"
    assert [count for why, count in status.fallbacks.items() if "fused kernel" in why] == [3]
    hf_vit_accel.patch(model, cuda_graphs=SMALL, strict=True)
    with pytest.raises(FallbackError, match="capture failed: RuntimeError: Failed to find C compiler"):
        run_tower(tower_of(model), GRID)


def test_a_backend_that_fails_in_a_capture(graphs: Any, flashinfer: Any, built: Any, monkeypatch: Any) -> None:
    model, expected = built["qwen3_vl"]
    monkeypatch.setattr(flashinfer, "run", raises(RuntimeError("EXECUTION_FAILED")))
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    for _ in range(3):
        assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert status.graphs.replays >= 3 and status.backends["full"] == "sdpa"
    assert [count for why, count in status.fallbacks.items() if "EXECUTION_FAILED" in why] == [3]


def test_a_fault_after_graphs_were_captured_drops_them(graphs: Any, flashinfer: Any, built: Any) -> None:
    model, expected = built["qwen3_vl"]
    tower = tower_of(model)
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "flashinfer_cudnn" and status_of(model).graphs.captures
    flashinfer.run = raises(RuntimeError("EXECUTION_FAILED"))
    handle = tower.blocks[0].register_forward_hook(lambda *_: None)  # the stock way, eagerly
    assert_close(run_tower(tower, GRID), expected)
    handle.remove()
    for _ in range(2):
        assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).backends["full"] == "sdpa" and len(status_of(model).graphs.graphs) >= 1


# --- memory that runs out ---------------------------------------------------------------------------------------------


def once(monkeypatch: Any, owner: Any, name: str, error: Exception, after: int = 0) -> None:
    """Let one call of a function raise, the first or a later one; the calls after it are real."""
    real, calls = getattr(owner, name), iter(range(1 << 30))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise error.with_traceback(None)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


PLACES: dict[str, Callable[[Any, Exception], None]] = {
    "the embedding": lambda monkeypatch, error: once(monkeypatch, fusion, "patch_embed", error),
    "a product of the second layer": lambda monkeypatch, error: once(monkeypatch, nn.functional, "linear", error, 6),
    "attention in the third layer": lambda monkeypatch, error: once(monkeypatch, type(ORDER[-1]), "attend", error, 2),
    "the host's plan": lambda monkeypatch, error: once(monkeypatch, type(ORDER[-1]), "plan", error),
    "the copy to the device": lambda monkeypatch, error: once(monkeypatch, planning, "to_device", error),
    "metadata": lambda monkeypatch, error: once(monkeypatch, planning, "build", error),
}


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_reaches_the_user(built: Any, monkeypatch: Any, place: str, strict: bool, kind: Any) -> None:
    """The very error, with nothing added; nothing is broken, counted or remembered."""
    model, expected = built["qwen2_5_vl"]
    tower, error = tower_of(model), kind("CUDA out of memory. Tried to allocate 20.00 GiB.")
    hf_vit_accel.patch(model, strict=strict)
    for known in (False, True):  # with a layout that is new, and one that is held
        with monkeypatch.context() as broken:
            PLACES[place](broken, error)
            if known and place in ("the host's plan", "the copy to the device", "metadata"):
                break
            with pytest.raises(kind) as raised:
                run_tower(tower, GRID)
        assert raised.value is error and error.args == ("CUDA out of memory. Tried to allocate 20.00 GiB.",)
        assert error.__cause__ is None and error.__context__ is None and not getattr(error, "__notes__", ())
        assert not state_of(tower).faults and not status_of(model).fallbacks
        assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).stock_calls == 0 and "patch_embed" in status_of(model).fused


@pytest.mark.parametrize("place", ["plan", "operator", "kernel"])
def test_out_of_memory_in_a_library(flashinfer: Any, kernels: Any, built: Any, monkeypatch: Any, place: str) -> None:
    model, expected = built["qwen3_vl"]
    error = torch.OutOfMemoryError("Tried to allocate")
    with monkeypatch.context() as broken:
        if place == "plan":
            once(broken, flashinfer, "prepare_cudnn_batch_prefill", error)
        elif place == "operator":
            once(broken, flashinfer, "run", error, 2)
        else:
            once(broken, fusion, "add_norm_", error, 3)
        hf_vit_accel.patch(model)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            run_tower(tower_of(model), GRID)
    assert raised.value is error and not state_of(tower_of(model)).faults
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert status_of(model).backends["full"] == "flashinfer_cudnn" and not status_of(model).fallbacks


@pytest.mark.parametrize("family", FAMILIES)
def test_out_of_memory_with_graphs(graphs: Any, built: Any, monkeypatch: Any, family: str) -> None:
    """In a capture: this call runs eagerly. In a replay: it reaches the user, and the next call is replayed."""
    model, expected = built[family]
    tower, error = tower_of(model), torch.OutOfMemoryError("Tried to allocate")
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    with monkeypatch.context() as broken:
        once(broken, nn.functional, "linear", error, 5)
        assert_close(run_tower(tower, GRID), expected)
    assert status_of(model).graphs.eager == {"capture failed: OutOfMemoryError: Tried to allocate": 1}
    assert status_of(model).graphs.replays == 0 and not state_of(tower).faults
    hf_vit_accel.patch(model, cuda_graphs=SMALL)
    for begun in (False, True):  # before the call was checked, or afterwards
        for _ in range(1 + begun):
            assert_close(run_tower(tower, GRID), expected)
        for place in ("send", "empty"):
            with monkeypatch.context() as broken:
                if place == "send":
                    state_of(tower).runner._entries.clear()
                    once(broken, runner_module, "send", error)
                else:
                    once(broken, torch.Tensor, "new_empty", error)
                with pytest.raises(torch.OutOfMemoryError) as raised:
                    run_tower(tower, GRID)
            assert raised.value is error
            assert_close(run_tower(tower, GRID), expected)
    assert not state_of(tower).faults and not status_of(model).fallbacks and not status_of(model).graphs.eager


# --- what is not ours, and what nothing helps against -----------------------------------------------------------------


class Failing(nn.Module):
    """A module of the user's that raises."""

    def __init__(self, inner: nn.Module, error: Exception) -> None:
        super().__init__()
        self.inner, self.error, self.calls = inner, error, 0

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("name", ["blocks.1.attn.proj", "blocks.2.mlp", "blocks.0.norm1", "merger"])
def test_errors_of_a_users_module_are_the_users(kernels: Any, name: str) -> None:
    model = TINY["qwen2_5_vl"].build()
    tower, error = tower_of(model), RuntimeError("mine")
    parent, _, child = name.rpartition(".")
    failing = Failing(tower.get_submodule(name), error)
    setattr(tower.get_submodule(parent), child, failing)
    hf_vit_accel.patch(model)
    with pytest.raises(RuntimeError, match="mine") as raised:
        run_tower(tower, GRID)
    assert raised.value is error and failing.calls == 1 and not state_of(tower).faults


def test_where_nothing_helps_the_error_is_raised_and_nothing_remembered(
    kernels: Any, built: Any, monkeypatch: Any
) -> None:
    model, expected = built["qwen2_vl"]
    tower, error = tower_of(model), RuntimeError("an illegal memory access was encountered")
    hf_vit_accel.patch(model)
    with monkeypatch.context() as broken:
        once(broken, norm, "next_power_of_2", error)
        broken.setattr(fusion, "add_norm_", norm.add_norm_)
        broken.setattr(norm, "_add_norm_kernel", Launches(error))
        broken.setattr(nn.functional, "scaled_dot_product_attention", raises(RuntimeError("and again")))
        with pytest.raises(RuntimeError, match="and again") as raised:
            run_tower(tower, GRID)
        assert "illegal memory access" in " ".join(raised.value.__notes__)
    assert not state_of(tower).faults and not status_of(model).fallbacks
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower, GRID), expected)
    assert "norms" in status_of(model).fused


def test_our_own_invariants_are_not_hidden() -> None:
    with pytest.raises(AssertionError) as raised:
        norm.add_norm_(torch.zeros(4, 6).t(), None, torch.ones(4), None, 1e-6, rms=True)
    assert blame(raised.value) == {}


def test_a_gpu_that_cannot_be_asked_does_not_stop_a_cpu_tower(built: Any, monkeypatch: Any) -> None:
    model, expected = built["qwen2_vl"]
    monkeypatch.setattr(env, "has_cuda", lambda: True)
    monkeypatch.setattr(env, "why_missing", lambda package: None)
    monkeypatch.setattr(env, "cuda_capability", raises(RuntimeError("CUDA error: all devices are busy")))
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), GRID), expected)
    (first, *_) = status_of(model).rejected["full"]["torch_varlen"]
    assert first == "the GPU cannot be used: CUDA error: all devices are busy"
    with pytest.raises(BackendUnavailableError, match="all devices are busy"):
        hf_vit_accel.patch(model, attention="torch_varlen")


def test_captures_that_fail_now_and_then_are_not_remembered_without_end(graphs: Any, built: Any) -> None:
    """Each with a message of its own, as memory that runs out has, and others that succeed between them."""
    model, _ = built["qwen2_vl"]
    hf_vit_accel.patch(model, cuda_graphs=hf_vit_accel.GraphConfig(max_tokens=128, exact_after=1, max_graphs=4))
    runner, tower = state_of(tower_of(model)).runner, tower_of(model)
    for width in range(1, 60):
        graphs.fail = torch.OutOfMemoryError(f"Tried to allocate {width} MiB") if width % 3 else None
        run_tower(tower, [(1, 2, 2 * width)])
    status = status_of(model).graphs
    assert len(runner._refused) == 32 and len(status.eager) == 33
    assert status.off is not None and "32 captures failed, the last: capture failed: OutOfMemoryError" in status.off


# --- nothing is run, read or asked for that the user did not name -----------------------------------------------------

AUDITED = """
import sys
FORBIDDEN = ("socket.", "pickle.", "marshal.loads", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork",
             "os.remove", "os.rename", "os.mkdir", "urllib.", "http.client.", "ftplib.", "shutil.", "tempfile.")
QUIET = ("open", "exec", "compile", "import", "ctypes.dlopen")  # besides, while a model is patched and used
DRIVER = "libnvidia-ml.so.1"  # what torch counts CUDA devices by
seen, phase = [], "before"

def hook(event, args):
    if phase == "before":
        return
    if event.startswith(FORBIDDEN) and (phase == "use" or not event.startswith("marshal.")):
        seen.append((phase, event, str(args)[:200]))
    elif event in QUIET and phase == "use" and args[0] != DRIVER:
        seen.append((phase, event, str(getattr(args[0], "co_filename", args[0]))[:200]))
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((phase, event, str(args)[:200]))

sys.dont_write_bytecode = True
import torch
torch.set_num_threads(1)
import transformers.integrations.sdpa_attention, transformers.masking_utils, transformers.modeling_utils
from tiny import GRIDS, TINY, run_tower, tower_of
sys.addaudithook(hook)
phase = "import"
import hf_vit_accel
phase = "before"
models = [TINY[name].build() for name in FAMILIES]
for model in models:
    run_tower(tower_of(model), GRIDS["mixed"])
phase = "use"
for model in models:
    for arguments in ({}, {"attention": "sdpa", "fuse": False}, {"attention": "flex"}, {"cuda_graphs": True}):
        hf_vit_accel.patch(model, **arguments)
        run_tower(tower_of(model), GRIDS["mixed"])
        str(hf_vit_accel.status(model))
        hf_vit_accel.unpatch(model)
phase = "before"
SPOIL
assert not seen, seen
print("quiet")
"""


@pytest.mark.parametrize("spoil", [None, "socket", "open"])
def test_importing_and_patching_read_and_ask_for_nothing(spoil: str | None) -> None:
    """Watched from inside by an audit hook, which is shown to work by what it is to find."""
    extra = {
        None: "",
        "socket": "phase = 'use'; import socket; socket.socket(); phase = 'before'",
        "open": "phase = 'use'; open(sys.executable, 'rb').close(); phase = 'before'",
    }[spoil]
    folder = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "0",
    }
    families = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"] if spoil is None else []
    code = AUDITED.replace("SPOIL", extra).replace("FAMILIES", str(families))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (spoil is None), done.stderr[-3000:]
    assert ("quiet" in done.stdout) == (spoil is None)
    assert spoil is None or f"'{spoil}" in done.stderr


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
    folder = Path(__file__).parent
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
        real = fusion.patch_embed
        broken.setattr(fusion, "patch_embed", lambda *args: (torch.empty(1 << 50, device="cuda"), real(*args)))
        with pytest.raises(torch.OutOfMemoryError):
            run_tower(tower, GRID)
    assert_close(run_tower(tower, GRID), expected, 0.0)
    assert not status_of(model).fallbacks
