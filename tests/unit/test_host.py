"""Bound the host's work for a layer, which decides the time of calls of few rows. Calls are counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.kernel_table import KERNELS
from test_guard import entered
from tiny import TINY, outputs_of, pixels_for, tower_of
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit_accel
from hf_vit_accel.backends import torch_cudnn
from hf_vit_accel.ops import mlp
from hf_vit_accel.tower import state as state_module

GRID = [(1, 4, 4)]
SHALLOW = 3
DEEP = 7
ONE = torch.zeros(1)
MOST_PER_LAYER = {False: 30, True: 100}
"""The most functions of ours that a layer may enter, and the most operators that it may run; by whether it trains.

Layers of Qwen3-VL take 23 functions and 21 operators in inference, 82 and 77 in training. The bound leaves room to
change a part. A further call for every tensor, hook or head of a layer exceeds it.
"""


class NoKernel:
    """Stand for a kernel, and launch nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class Operators(TorchDispatchMode):
    """Count the operators that torch runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the host's part of a call on a GPU: kernels and attention only allocate their results."""

    def attend(q: torch.Tensor, *inputs: Any, scale: float) -> Any:
        return torch.empty_like(q.transpose(1, 2)).transpose(1, 2), ONE, None, None, 1, 1, ONE, ONE, None

    def attend_backward(dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *saved: Any, scale: float) -> Any:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    for kernel in KERNELS.values():
        for module, name in kernel.launched:
            monkeypatch.setattr(module, name, NoKernel())
    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    monkeypatch.setattr(torch_cudnn.TorchCudnn, "reasons_against", lambda backend, request: [])
    monkeypatch.setattr(torch_cudnn, "_sdpa", attend)
    monkeypatch.setattr(torch_cudnn, "_sdpa_backward", attend_backward)


def patched_tower(family: str, depth: int, trains: bool) -> Any:
    """Build and patch a tower whose layers are alike: without windows in between, and without deepstack."""
    tiny = TINY[family]
    alike = {"fullatt_block_indexes": [0]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": []}
    vision = tiny.vision | alike | {"depth": depth}
    tower = tower_of(type(tiny)(tiny.model, tiny.config, vision, tiny.text).build()).requires_grad_(trains)
    hf_vit_accel.patch(tower, strict=True)
    return tower


def count_calls(tower: Any, trains: bool) -> tuple[Counter[Any], Counter[str]]:
    """Count the functions of ours and the operators of torch in a steady step, by their names."""
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)

    def step() -> None:
        tower.zero_grad(set_to_none=True)
        outputs = outputs_of(tower(pixels, grid_thw=grid))
        if trains:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees this thread alone
        step()
        functions = Counter(entered(step))
        with Operators() as operators:
            step()
    return functions, operators.counts


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("trains", [False, True])
def test_the_hosts_work_for_a_layer_is_bounded(launches_nothing: None, family: str, trains: bool) -> None:
    """Compare towers of two depths: their difference is the work for the further layers, forward and backward."""
    shallow = count_calls(patched_tower(family, SHALLOW, trains), trains)
    deep = count_calls(patched_tower(family, DEEP, trains), trains)
    for what, of_shallow, of_deep in zip(("functions", "operators"), shallow, deep, strict=True):
        per_layer = {name: (count - of_shallow[name]) / (DEEP - SHALLOW) for name, count in of_deep.items()}
        listing = "\n".join(f"{count:6.2f}  {name}" for name, count in per_layer.items() if count)
        assert sum(per_layer.values()) <= MOST_PER_LAYER[trains], f"{what} of a layer:\n{listing}"
