"""Fixtures and helpers of tests that let backends and kernels fail: stock models, a machine not yet probed, errors.

conftest.py registers this file as a plugin, so that its fixtures need no import.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import GRIDS, TINY, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.backends import flex as flex_backend
from hf_vit_accel.backends.base import Needs
from hf_vit_accel.ops import mlp
from hf_vit_accel.tower.state import state_of
from support.kernel_table import KERNELS
from support.references import put

GRID = GRIDS["mixed"]
Tensors = tuple[torch.Tensor, ...]
StockModels = dict[str, tuple[nn.Module, list[torch.Tensor]]]
"""By family: a model, and its stock tower's outputs for GRID."""


@pytest.fixture(scope="module")
def stock_models() -> StockModels:
    """Build a model of every family, and run its stock tower."""
    models = {family: tiny.build() for family, tiny in TINY.items()}
    return {family: (model, run_tower(tower_of(model), GRID)) for family, model in models.items()}


@pytest.fixture
def afresh(stock_models: StockModels) -> Iterator[None]:
    """Forget all that is known of the machine, before and after; unpatch every model."""
    forget_machine()
    yield
    forget_machine()
    for model, _ in stock_models.values():
        hf_vit_accel.unpatch(model)


def forget_machine() -> None:
    """Clear probes, and what backends have built."""
    machine.reset()
    flex_backend.compiled.cache_clear()


def faults_of(model: nn.Module) -> set[str]:
    """Return the backends, or the kernels, that a model remembers as broken."""
    return set(state_of(tower_of(model)).faults)


def raises(error: BaseException) -> Callable[..., None]:
    """Return a function that raises an error, whatever it is called with."""

    def call(*args: object, **kwargs: object) -> None:
        raise error.with_traceback(None)

    return call


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception, after: int = 0) -> None:
    """Let one call of a function raise: the first, or the one after so many; all other calls are real."""
    function = getattr(owner, name)
    calls = 0

    def call(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise error.with_traceback(None)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


PREFILL = "flashinfer.cudnn.prefill"


class Flashinfer:
    """cuDNN's attention in plain torch, by offsets and lengths; a test replaces either step."""

    def plan(self, qkv: Tensors, sequences: Tensors, max_seqlen: int, scale: float) -> SimpleNamespace:
        return SimpleNamespace(run=lambda *tensors: self.run(*tensors, max_seqlen, scale))

    def run(self, qkv: Tensors, sequences: Tensors, out: torch.Tensor, max_seqlen: int, scale: float) -> None:
        """Attend within segments; offsets count elements from the pointers of q, k, v and out."""
        lengths, *offsets = sequences
        starts_S4 = torch.stack([x.flatten() for x in offsets], 1).tolist()[:-1]
        for length, starts in zip(lengths.flatten().tolist(), starts_S4, strict=True):
            assert length <= max_seqlen
            parts = [
                torch.as_strided(x, (length, *x.shape[1:]), x.stride(), x.storage_offset() + start).transpose(0, 1)
                for x, start in zip((*qkv, out), starts, strict=True)
            ]
            q_HLD, k_HLD, v_HLD = (part[None] for part in parts[:3])
            parts[3].copy_(nn.functional.scaled_dot_product_attention(q_HLD, k_HLD, v_HLD, scale=scale)[0])


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Flashinfer:
    """Put a FlashInfer of plain torch behind the cuDNN backend."""
    return install_flashinfer(monkeypatch)


def install_flashinfer(monkeypatch: pytest.MonkeyPatch) -> Flashinfer:
    """Let the cuDNN backend find what it needs, and run on this machine in any dtype."""
    fake = Flashinfer()
    prefill = ModuleType(PREFILL)
    for name in ("UIDs", "_create_cudnn_handle", "_PrefillMetadata", "prepare_cudnn_batch_prefill"):
        setattr(prefill, name, None)
    execute = SimpleNamespace(execute=lambda tensors, tensor_uids: None)
    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.cudnn")}
    modules |= {PREFILL: prefill, "cudnn": SimpleNamespace(backend_version=lambda: 92000, pygraph=execute)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    needs = Needs(cuda=False, head_dim_multiple=8, head_dim_max=128)
    monkeypatch.setattr(cudnn_backend.FlashinferCudnn, "needs", needs)
    monkeypatch.setattr(cudnn_backend, "cudnn_plan_for", lambda *arguments: fake.plan(*arguments))
    return fake


class Launches:
    """Stands for a kernel: counts launches, all of which raise."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.tried = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            self.tried += 1
            raise self.error.with_traceback(None)

        return launch


class CompilationError(Exception):
    """Stands for Triton's own error, whose message shows the source first."""


LAUNCH_ERRORS = {
    "no C compiler": RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    "the kernel does not compile": CompilationError("at 3:4:\n    x = tl.load(x)\n        ^\nunsupported"),
    "the GPU is not known": KeyError("sm_999"),
}


@pytest.fixture
def break_kernel(references: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], Launches]:
    """Return a function that lets one kernel fail at its launch; all others run by their references."""

    def break_(name: str, error: BaseException) -> Launches:
        kernel = KERNELS[name]
        launches = Launches(error)
        put(monkeypatch, vars(sys.modules[kernel.function.__module__])[kernel.name], kernel.function)
        for module, launched in kernel.launched:
            monkeypatch.setattr(module, launched, launches)
        monkeypatch.setattr(mlp, "descriptor_of", lambda tensor, block: tensor)
        if not name.startswith("linear"):  # the product's kernel would apply the activation, too
            monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: "not this GPU")
        return launches

    return break_
