"""What the host does for a layer beside launching kernels, which is what calls of few rows take: counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.kernel_table import operation_modules
from test_guard import entered
from tiny import TINY, outputs_of, pixels_for, tower_of
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit_accel
from hf_vit_accel.backends import torch_cudnn
from hf_vit_accel.ops import mlp
from hf_vit_accel.tower import state as state_module

GRID = [(1, 4, 4)]
SHALLOW, DEEP = 3, 7
ONE = torch.zeros(1)


class Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class Operators(TorchDispatchMode):
    """How often torch runs each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, results aside: kernels and attention only allocate."""

    def attend(q: Any, *rest: Any, scale: float) -> Any:
        return torch.empty_like(q.transpose(1, 2)).transpose(1, 2), ONE, None, None, 1, 1, ONE, ONE, None

    def back(dout: Any, q: Any, k: Any, v: Any, *rest: Any, scale: float) -> Any:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    for module in operation_modules():
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Nothing())
    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    monkeypatch.setattr(torch_cudnn.TorchCudnn, "reasons_against", lambda backend, request: [])
    monkeypatch.setattr(torch_cudnn, "_sdpa", attend)
    monkeypatch.setattr(torch_cudnn, "_sdpa_backward", back)


@pytest.mark.parametrize(
    ("family", "trains", "functions", "operators"),
    [
        ("qwen3_vl", True, 82, 77),
        ("qwen3_vl", False, 23, 21),
        ("qwen2_5_vl", True, 74, 76),
        ("qwen2_5_vl", False, 24, 13),
    ],
)
def test_a_layer(launches_nothing: None, family: str, trains: bool, functions: int, operators: int) -> None:
    """At most so many functions of ours are entered, and so many operators run, forward and backward."""
    tiny, counts = TINY[family], []
    same = {"fullatt_block_indexes": [0]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": []}
    for depth in (SHALLOW, DEEP):
        vision = tiny.vision | same | {"depth": depth}
        tower = tower_of(type(tiny)(tiny.model, tiny.config, vision, tiny.text).build()).requires_grad_(trains)
        hf_vit_accel.patch(tower, strict=True)
        pixels, grid = pixels_for(tower, GRID), torch.tensor(GRID)

        def step() -> None:
            tower.zero_grad(set_to_none=True)  # noqa: B023
            made = outputs_of(tower(pixels, grid_thw=grid))  # noqa: B023
            if trains:
                torch.autograd.backward(made, [torch.ones_like(each) for each in made])

        with torch.autograd.set_multithreading_enabled(False):  # else its thread is not seen
            step()
            calls = entered(step)
            with Operators() as mode:
                step()
        counts.append((Counter(calls), mode.found))
    layers = DEEP - SHALLOW
    of_ours, of_torch = (
        {key: (count - shallow[key]) / layers for key, count in deep.items()}
        for shallow, deep in zip(*counts, strict=True)
    )
    listing = "\n".join(f"{count:6.2f}  {key}" for key, count in (of_ours | of_torch).items() if count)
    assert sum(of_ours.values()) <= functions and sum(of_torch.values()) <= operators, listing
