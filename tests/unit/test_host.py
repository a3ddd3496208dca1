"""Bound what the host launches for a layer. In calls of few rows, that takes longer than the kernels. Counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.kernel_table import KERNELS
from tiny import TINY, outputs_of, pixels_for, tower_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit_accel
from hf_vit_accel.backends import torch_cudnn
from hf_vit_accel.ops import mlp
from hf_vit_accel.tower import state as state_module

GRID = [(1, 4, 4)]
SHALLOW = 3
DEEP = 7
"""Depths of two towers. What the deeper one does beyond the other is done by its further layers."""
ONE = torch.zeros(1)


@dataclass(frozen=True)
class Bound:
    """The most that the host may launch for a layer of a family: kernels of ours, and operators of torch."""

    kernels: int
    operators: int


TRAINING = {"qwen3_vl": Bound(10, 79), "qwen2_5_vl": Bound(13, 76)}
INFERENCE = {"qwen3_vl": Bound(3, 21), "qwen2_5_vl": Bound(4, 13)}
"""The counts when these tests were written. A lower count needs no change here; a higher one slows small calls."""


class NotLaunched:
    """A kernel that counts its launches and does nothing."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self.name = name
        self.launches = launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        self.launches[self.name] += 1
        return lambda *args, **kwargs: None


class Operators(TorchDispatchMode):
    """Count how often torch runs each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run a tower as on a GPU, with kernels and attention that only allocate their results; count the launches."""
    counts: Counter[str] = Counter()

    def attend(q: Tensor, *args: object, scale: float) -> tuple[object, ...]:
        return torch.empty_like(q.transpose(1, 2)).transpose(1, 2), ONE, None, None, 1, 1, ONE, ONE, None

    def attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: object, scale: float) -> object:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    for kernel in KERNELS.values():
        for module, name in kernel.launched:
            monkeypatch.setattr(module, name, NotLaunched(name, counts))
    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    monkeypatch.setattr(torch_cudnn.TorchCudnn, "reasons_against", lambda backend, request: [])
    monkeypatch.setattr(torch_cudnn, "_cudnn_attention", attend)
    monkeypatch.setattr(torch_cudnn, "_cudnn_attention_backward", attend_backward)
    return counts


def tower_of_depth(family: str, depth: int) -> nn.Module:
    """Build a tower all of whose layers do the same, except the first one of Qwen2.5-VL, which has no windows."""
    tiny = TINY[family]
    uniform = {"fullatt_block_indexes": [0]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": []}
    vision = tiny.vision | uniform | {"depth": depth}
    return tower_of(type(tiny)(tiny.model, tiny.config, vision, tiny.text).build())


def count_step(tower: nn.Module, launches: Counter[str], trains: bool) -> tuple[Counter[str], Counter[str]]:
    """Count the kernels and the operators that the second step of a patched tower launches."""
    hf_vit_accel.patch(tower.requires_grad_(trains), strict=True)
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)

    def step() -> None:
        tower.zero_grad(set_to_none=True)
        outputs = outputs_of(tower(pixels, grid_thw=grid))
        if trains:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    with torch.autograd.set_multithreading_enabled(False):  # functions of another thread are not seen
        step()
        launches.clear()
        with Operators() as operators:
            step()
    return launches.copy(), operators.counts


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("family", INFERENCE)
def test_the_work_for_a_layer_is_bounded(launches: Counter[str], family: str, trains: bool) -> None:
    bound = (TRAINING if trains else INFERENCE)[family]
    shallow = count_step(tower_of_depth(family, SHALLOW), launches, trains)
    deep = count_step(tower_of_depth(family, DEEP), launches, trains)
    kernels, operators = (
        {name: (count - few[name]) / (DEEP - SHALLOW) for name, count in many.items()}
        for few, many in zip(shallow, deep, strict=True)
    )
    assert sum(kernels.values()) <= bound.kernels, kernels
    assert sum(operators.values()) <= bound.operators, operators
