"""Bound the host's work for a layer. In calls of few rows, it takes longer than the kernels. Counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.calls import entered
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
    """The most that the host may do for a layer of a family.

    Args:
        functions: Functions of the package that are entered.
        operators: Operators that torch runs.
    """

    functions: int
    operators: int


TRAINING = {"qwen3_vl": Bound(82, 77), "qwen2_5_vl": Bound(74, 76)}
INFERENCE = {"qwen3_vl": Bound(23, 21), "qwen2_5_vl": Bound(24, 13)}
"""The counts when these tests were written. A lower count needs no change here; a higher one slows small calls."""


class NotLaunched:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
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
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a tower as on a GPU, with kernels and attention that only allocate their results."""

    def attend(q: Tensor, *args: object, scale: float) -> tuple[object, ...]:
        return torch.empty_like(q.transpose(1, 2)).transpose(1, 2), ONE, None, None, 1, 1, ONE, ONE, None

    def attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: object, scale: float) -> object:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    for kernel in KERNELS.values():
        for module, name in kernel.launched:
            monkeypatch.setattr(module, name, NotLaunched())
    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    monkeypatch.setattr(torch_cudnn.TorchCudnn, "reasons_against", lambda backend, request: [])
    monkeypatch.setattr(torch_cudnn, "_cudnn_attention", attend)
    monkeypatch.setattr(torch_cudnn, "_cudnn_attention_backward", attend_backward)


def tower_of_depth(family: str, depth: int) -> nn.Module:
    """Build a tower all of whose layers do the same, except the first one of Qwen2.5-VL, which has no windows."""
    tiny = TINY[family]
    uniform = {"fullatt_block_indexes": [0]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": []}
    vision = tiny.vision | uniform | {"depth": depth}
    return tower_of(type(tiny)(tiny.model, tiny.config, vision, tiny.text).build())


def count_step(tower: nn.Module, trains: bool) -> Counter[object]:
    """Count the functions that the second step of a patched tower enters, and the operators that it runs."""
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
        functions = entered(step)
        with Operators() as operators:
            step()
    return Counter(functions) + operators.counts


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("family", INFERENCE)
def test_the_work_for_a_layer_is_bounded(no_launches: None, family: str, trains: bool) -> None:
    bound = (TRAINING if trains else INFERENCE)[family]
    shallow = count_step(tower_of_depth(family, SHALLOW), trains)
    deep = count_step(tower_of_depth(family, DEEP), trains)
    per_layer = {key: (count - shallow[key]) / (DEEP - SHALLOW) for key, count in deep.items()}
    functions = sum(count for key, count in per_layer.items() if isinstance(key, tuple))
    operators = sum(count for key, count in per_layer.items() if isinstance(key, str))
    listing = "\n".join(f"{count:6.2f}  {key}" for key, count in per_layer.items() if count)
    assert functions <= bound.functions and operators <= bound.operators, listing
