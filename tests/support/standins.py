"""What stands in for a GPU: kernels' references, an attention that reads offsets, CUDA graphs that run again."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tiny import FAMILIES, TINY
from torch import nn

import hf_vit_accel
from hf_vit_accel import GraphConfig, backends, ops
from hf_vit_accel.backends import BACKENDS, Plan, Request
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.engine import route
from hf_vit_accel.graphs import store
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops import activation, mlp
from hf_vit_accel.tower import decide as decide_module
from hf_vit_accel.tower import state as state_module

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Read when kernels are defined, so whatever is interpreted runs in a process of its own: test_interpreted.py's."""
SMALL = GraphConfig(max_tokens=128, exact_after=0)

# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel of an operation. function: launches it, `name` in its module; reference: the same.

    launched: where the kernel is, and its name.
    """

    name: str
    function: Any
    reference: Any
    launched: frozenset[tuple[ModuleType, str]]

    def stand_in(self, other: Any) -> Any:
        """What takes the place of the function, to call another."""
        return other if isinstance(self.function, FunctionType) else SimpleNamespace(apply=other)


def _launched(owner: Any, seen: tuple[Any, ...] = ()) -> Iterator[tuple[ModuleType, str]]:
    """The kernels that a function launches, or has launched by functions and autograd functions of ours."""
    module = sys.modules[owner.__module__]
    functions = [owner] if isinstance(owner, FunctionType) else [f.__func__ for f in vars(owner).values() if _static(f)]
    for name in {name for function in functions for name in function.__code__.co_names}:
        found = vars(module).get(name)
        if name.endswith("_kernel"):
            yield module, name
        ours = isinstance(found, FunctionType | type) and found.__module__.startswith("hf_vit_accel.ops.")
        if ours and found not in seen:
            yield from _launched(found, (*seen, owner, found))


def _static(value: Any) -> bool:
    return isinstance(value, staticmethod) and isinstance(value.__func__, FunctionType)


@cache
def _modules() -> list[ModuleType]:
    names = [found.name for found in pkgutil.walk_packages(ops.__path__, "hf_vit_accel.ops.") if not found.ispkg]
    # Of FP8, and of what is reused: tests/unit/test_fp8.py, tests/unit/test_reuse.py.
    others = "quantize", "e4m3", "scales"
    return [importlib.import_module(name) for name in names if not name.endswith(others)]


def _kernels() -> Iterator[tuple[str, Kernel]]:
    for module in _modules():
        for name, function in vars(module).items():
            called = name
            if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                called = re.sub("(?<=.)(?=[A-Z])", "_", name.removesuffix("Function")).lower()
                if called in vars(module):  # a function that runs it
                    continue
            elif not isinstance(function, FunctionType):
                continue
            stem = f"{called.rstrip('_')}_reference"
            reference = getattr(module, f"{stem}_", None) or getattr(module, stem, None)
            own = function.__module__ == module.__name__
            if own and reference and (launched := frozenset(_launched(function))):
                yield called, Kernel(name, function, reference, launched)


KERNELS = dict(_kernels())
"""Every kernel of `ops.TABLE`, found by their references, by the name of the function that launches it; GeluMlp, say,
is gelu_mlp."""


def put(monkeypatch: pytest.MonkeyPatch, function: Any, other: Any) -> None:
    """Another function in the place of one, wherever operations look for it."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is function:
                monkeypatch.setattr(module, name, other)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every kernel replaced by its reference, and taken for runnable; the names of those that were called."""
    called: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: called.append(name) or function(*args, **kwargs)

    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    for name, kernel in KERNELS.items():
        put(monkeypatch, kernel.function, kernel.stand_in(counted(name, kernel.reference)))
    monkeypatch.setattr(route, "layer_of", lambda layer, attend: None)  # a layer's function launches kernels
    put(monkeypatch, activation.linear_gelu_tanh, counted("linear_gelu_tanh", activation.linear_gelu_tanh))
    return called


def hurry_interpreter() -> None:
    """Triton's interpreter does some work anew in every call that is needed once, or not at all.

    It puts its own functions into the language, also in every call of a helper; it looks dtypes up in a table that it
    makes every time; it checks sums and products of 32-bit integers by doing them in 64; it takes the shape of every
    tensor apart; it asks how to bring two of one dtype to one. For a process that compiles nothing, since all stays.
    """
    import triton.language as tl
    from triton.language import core, semantic
    from triton.runtime import interpreter

    patch, patched, known = interpreter._patch_lang, set(), set()
    languages = {"triton.language", "triton.language.core"}
    nothing = SimpleNamespace(restore=lambda: None)

    def once(function: Any) -> Any:
        if function not in known:
            known.add(function)
            seen = {v.__name__ for v in function.__globals__.values() if isinstance(v, ModuleType)} & languages
            if not seen <= patched:
                patched.update(seen)
                patch(function)
        return nothing

    of_scalar = cache(interpreter._get_np_dtype)

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        return numpy.dtype(numpy.uint64) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = once, np_dtype
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    # By sizes, what a type's constructor made of them; by what that is kept in, what a tensor's made of it.
    types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    shapes: dict[int, tuple[Any, Any, Any]] = {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    make_alike = semantic.TritonSemantic.binary_op_type_checking_impl

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes in types:
            self.element_ty = element_ty
            self.shape, self.numel, text = types[sizes]
            self.name = f"<{text}, {element_ty}>"
        else:
            make_type(self, element_ty, shape)
            types[sizes] = self.shape, self.numel, str(self.shape)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        known = shapes.get(id(kind.shape)) if kind.is_block() else None
        if known:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            _, self.shape, self.numel = known
        else:
            make_tensor(self, handle, kind)
            if kind.is_block():
                shapes[id(kind.shape)] = kind.shape, self.shape, self.numel

    def broadcast_impl_value(self: Any, one: Any, other: Any) -> Any:
        same = one.type.is_block() and other.type.is_block() and one.type.shape is other.type.shape
        return (one, other) if same else broadcast(self, one, other)

    def alike(self: Any, one: Any, other: Any, *flags: bool) -> Any:
        tensors = type(one) is type(other) is core.tensor and one.dtype is other.dtype
        if tensors and not one.dtype.is_ptr() and not any(flags[3:]):  # the fourth: for a quotient
            return self.broadcast_impl_value(one, other)
        return make_alike(self, one, other, *flags)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, meaning = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = meaning
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    semantic.TritonSemantic.binary_op_type_checking_impl = alike
    interpreter._patch_attr = patch_attr


if INTERPRETED:
    hurry_interpreter()


# --- graphs -----------------------------------------------------------------------------------------------------------


class Masked(Sdpa):
    """Attends by the offsets that are on the device when it runs, as the kernels of the real backends do."""

    capturable = True

    def plan(self, segments: Segments, request: Request) -> Plan:
        host, arrays = {"max_seqlen": segments.max_seqlen}, {"cu_seqlens_S1": segments.cu_seqlens_S1}
        return Plan(backend=self, segments=segments, request=request, host=host, arrays=arrays)

    def attend(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: Plan) -> torch.Tensor:
        offsets = plan.tensors["cu_seqlens_S1"]
        assert offsets[-1] == len(q_THD), "every row belongs to a segment"
        assert int(offsets.diff().max()) <= plan.host["max_seqlen"]
        segment = torch.searchsorted(
            offsets[1:].contiguous(), torch.arange(len(q_THD), dtype=offsets.dtype), right=True
        )
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        mask = segment[:, None] == segment[None, :]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=plan.request.scale)
        return out[0].transpose(0, 1)


class Recorder:
    """Replays by running again. `fail`: what to raise instead of capturing. `poisoned`: buffers to spoil before use."""

    fail: Exception | None = None
    nbytes = 1000
    reason: str | None = None
    poisoned: Callable[[], list[torch.Tensor]] | None = None

    def __init__(self, device: torch.device) -> None:
        self.waiting = False

    def against(self) -> str | None:
        return self.reason

    def record(self, *runs: Callable[[], None]) -> tuple[list[Callable[[], None]], int]:
        for run in runs:
            run()
        if self.fail is not None:
            raise self.fail

        def replay(run: Callable[[], None]) -> None:
            assert self.waiting, "replayed without waiting for the last replay"
            run()

        return [partial(replay, run) for run in runs], self.nbytes

    def wait(self) -> None:
        assert not self.waiting, "the last use never said that it was done"
        self.waiting = True
        for buffer in self.poisoned() if self.poisoned else ():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 251)

    def done(self) -> None:
        assert self.waiting
        self.waiting = False

    def uses(self, tensor: torch.Tensor) -> None:
        pass

    def settle(self) -> None:
        pass


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """Graphs on the CPU; the class of their recorders, of this test's own."""

    class Fresh(Recorder):
        pass

    masked = Masked()
    monkeypatch.setattr(store, "CudaRecorder", Fresh)
    monkeypatch.setattr(decide_module, "why_not_graphs", lambda device: None)
    monkeypatch.setattr(backends, "BACKENDS", tuple(masked if b.name == "sdpa" else b for b in BACKENDS))
    return Fresh


def status_of(model: Any) -> Any:
    """What graphs did."""
    return hf_vit_accel.status(model).towers[0].graphs


def alike(kept: Any, *others: Any) -> list[Any]:
    """What a test is asked of: others, which show no more than the one that is kept, in the matrix alone."""
    return [
        kept,
        *(pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.matrix) for each in others),
    ]


TOWERS = [
    pytest.param("qwen2_vl", marks=[pytest.mark.matrix] * (not torch.cuda.is_available())),
    *(name for name in FAMILIES if name != "qwen2_vl"),
]
"""For what asks how a tower is served, not what it computes: Qwen2-VL's has no part that none of the others has.

No windows, no table of positions, no deepstack; its activation is held to stock where each family is: test_tower.py,
test_ops.py, test_families.py. On a GPU it is asked, too.
"""


ONE_TOWER = list(TOWERS) if torch.cuda.is_available() else alike("qwen2_5_vl", "qwen3_vl", "qwen2_vl")
"""For what asks what is kept, counted or refused between calls, which no part of a tower has a say in.

That calls are right in every tower, eagerly and replayed, in passes and with modules replaced: test_families.py.
"""
both_towers = pytest.mark.parametrize("model", TOWERS, indirect=True)
"""For what the fixture `model` is to be of every kind."""


@pytest.fixture(params=ONE_TOWER)
def model(request: Any) -> Any:
    """A tiny model of each family, or of one that is asked for."""
    return TINY[request.param].build()
