"""Bound the host's work for a call and for a layer, by counts instead of times.

In calls of few rows, the host takes longer than the kernels.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from standins import ONE_TOWER, _modules
from support.calls import PACKAGE, entered
from tiny import GRIDS, TINY, outputs_of, pixels_for, run_tower, tower_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit_accel
from hf_vit_accel.backends import torch_cudnn
from hf_vit_accel.ops import mlp
from hf_vit_accel.tower import state as state_module

MIXED = GRIDS["mixed"]


# --- a steady call --------------------------------------------------------------------------------------------------


def entries(act: Callable[[], object]) -> list[tuple[str, list[str]]]:
    """Return every entry of a file of the package from another one, with the files on the stack at that moment."""
    entries_of_files: list[tuple[str, list[str]]] = []
    stack: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        if event == "call":
            if stack and stack[-1] != file:
                entries_of_files.append((file, list(stack)))
            stack.append(file)
        elif event == "return":
            stack.pop()

    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(None)
    return entries_of_files


def is_of_operations(file: str) -> bool:
    """Return whether a file belongs to operations and attention, which a call enters again and again."""
    return file.startswith(("/ops/", "/backends/"))


@pytest.fixture(params=ONE_TOWER)
def tower(request: pytest.FixtureRequest) -> nn.Module:
    return tower_of(TINY[request.param].build())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_steady_call_enters_few_functions_of_few_files(
    tower: nn.Module, mode: type[torch.no_grad | torch.inference_mode]
) -> None:
    pixels = pixels_for(tower, MIXED)
    grid = torch.tensor(MIXED)
    hf_vit_accel.patch(tower)
    with mode():
        for _ in range(2):
            tower(pixels, grid_thw=grid)
        functions = entered(lambda: tower(pixels, grid_thw=grid))
        calls_between_files = entries(lambda: tower(pixels, grid_thw=grid))
    wrapper = ("/machine.py", "call")  # marks the failures of an operation
    steady = [key for key in functions if not is_of_operations(key[0]) and key[:2] != wrapper]
    listing = "\n".join(str(key) for key in sorted(steady))
    assert len(steady) <= 26, listing
    assert len({file for file, _, _ in steady}) <= 9, listing
    called_back = {file for file, stack in calls_between_files if file in stack and not is_of_operations(file)}
    assert not called_back, "nothing calls back into a file that waits for it"


CHECKS = ("/tower/checks.py", "/tower/snapshot.py", "/engine/inputs.py")
"""Files with the checks of a call."""
BESIDE_CHECKS = {"autocast_dtype", "marks_outputs", "request"}
"""Functions of these files that a fast call enters after its checks."""


@pytest.mark.parametrize("grad", [False, True])
def test_the_benchmark_of_checks_does_the_checks_of_a_call(
    tower: nn.Module, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmark"))
    benchmark = importlib.import_module("checks")
    pixels = pixels_for(tower, MIXED)
    grid = torch.tensor(MIXED)
    hf_vit_accel.patch(tower.requires_grad_(False))
    assert 0 < benchmark.measure(tower, grad=grad, calls=20)["least"] < 1e6
    with torch.set_grad_enabled(grad):
        by_call = entered(lambda: tower(pixels, grid_thw=grid))
        by_benchmark = entered(lambda: benchmark.checked(tower, pixels, grid))
    checks_of_call = {key for key in by_call if key[0] in CHECKS and key[1] not in BESIDE_CHECKS}
    assert checks_of_call == {key for key in by_benchmark if key[0] in CHECKS}


def test_checks_do_not_grow_with_the_tower() -> None:
    """Count calls of our functions, without those of a layer's operations."""
    of_layers = ("/ops/", "/backends/", "/engine/encoder.py", "/machine.py")
    counts_by_depth = []
    for depth in (4, 8):
        tiny = TINY["qwen2_vl"]
        tower = tower_of(type(tiny)(tiny.model, tiny.config, tiny.vision | {"depth": depth}, tiny.text).build())
        hf_vit_accel.patch(tower)
        run_tower(tower, MIXED)
        calls = entered(lambda: run_tower(tower, MIXED))  # noqa: B023
        counts_by_depth.append({key: count for key, count in calls.items() if not key[0].startswith(of_layers)})
    assert counts_by_depth[0] == counts_by_depth[1]


# --- a layer --------------------------------------------------------------------------------------------------------

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

    for module in _modules():
        for name in list(vars(module)):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, NotLaunched())
    monkeypatch.setattr(state_module, "why_not_triton", lambda device, dtype: None)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    monkeypatch.setattr(torch_cudnn.TorchCudnn, "reasons_against", lambda backend, request: [])
    monkeypatch.setattr(torch_cudnn, "_sdpa", attend)
    monkeypatch.setattr(torch_cudnn, "_sdpa_backward", attend_backward)


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
