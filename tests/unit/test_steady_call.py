"""Bound what the host does for a steady call: files of ours that it enters, kernels and operators of a layer."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from support.cpu_graphs import Recorder
from support.kernel_table import KERNELS
from tiny import GRIDS, TINY, outputs_of, pixels_for, run_tower, tower_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit_accel
from hf_vit_accel.backends import torch_cudnn
from hf_vit_accel.ops import mlp
from hf_vit_accel.tower import state as state_module

GRID = GRIDS["mixed"]
OF_FAULTS = ("/machine.py", "call")
"""The wrapper of operations that marks their failures."""


PACKAGE = str(Path(hf_vit_accel.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def entered(act: Callable[[], object], package: str = PACKAGE) -> Counter[tuple[str, str, int]]:
    """Run something; count how often it enters each function of a package, by file, name and line."""
    counts: Counter[tuple[str, str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name not in COMPREHENSIONS:
            counts[code.co_filename.removeprefix(package), code.co_name, code.co_firstlineno] += 1

    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(None)
    return counts


def is_of_operations(file: str) -> bool:
    """Return whether a file belongs to operations and attention, which a call enters again and again."""
    return file.startswith(("/ops/", "/backends/"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_steady_call_enters_few_files(tower: nn.Module, mode: type[torch.no_grad | torch.inference_mode]) -> None:
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    hf_vit_accel.patch(tower)
    with mode():
        for _ in range(2):
            tower(pixels, grid_thw=grid)
        functions = entered(lambda: tower(pixels, grid_thw=grid))
    files = {file for file, name, _ in functions if not is_of_operations(file) and (file, name) != OF_FAULTS}
    assert len(files - {"/versions.py"}) <= 10, files  # with watch.py; its part was counted as an operation's before


OF_THE_STAND_IN = ("/ops/", "/backends/", "/engine/encoder.py", "/engine/recorded.py", "/graphs/step.py")
"""Files that only a recorder of tests enters in a replay, which runs again what was captured."""


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_replayed_call_enters_few_files(on_cpu: type[Recorder], tower: nn.Module, trains: bool) -> None:
    """A replay is over when its last function returns: what it enters is the host's time of a small call."""
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    hf_vit_accel.patch(tower.requires_grad_(trains), cuda_graphs=True)
    with torch.set_grad_enabled(trains):
        for _ in range(4):
            outputs = outputs_of(tower(pixels, grid_thw=grid))
            if trains:
                outputs[-1].sum().backward()
        functions = entered(lambda: tower(pixels, grid_thw=grid))
    status = hf_vit_accel.status(tower).towers[0]
    graphs = status.training if trains else status.graphs
    assert graphs is not None and str(graphs.last).startswith("replayed")
    files = {file for file, name, _ in functions if not file.startswith(OF_THE_STAND_IN) and (file, name) != OF_FAULTS}
    assert len(files) <= 11, files
    of_configs = entered(lambda: tower(pixels, grid_thw=grid), inspect.getfile(transformers.PretrainedConfig))
    assert not of_configs, "a config runs Python functions for each field that is read"


def test_checks_do_not_grow_with_the_tower() -> None:
    """Count calls of our functions, without those of a layer's operations."""
    of_layers = ("/ops/", "/backends/", "/engine/encoder.py", "/machine.py")
    counts_by_depth = []
    for depth in (4, 8):
        tower = hf_vit_accel.patch(tower_of_depth("qwen3_vl", depth))
        run_tower(tower, GRID)
        calls = entered(lambda: run_tower(tower, GRID))  # noqa: B023
        counts_by_depth.append({key: count for key, count in calls.items() if not key[0].startswith(of_layers)})
    assert counts_by_depth[0] == counts_by_depth[1]


# --- what the host launches for a layer: in calls of few rows, that takes longer than the kernels ---------------------

SMALL_IMAGE = [(1, 4, 4)]
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
    uniform = {"fullatt_block_indexes": [0]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": []}
    return tower_of(replace(TINY[family], vision=TINY[family].vision | uniform | {"depth": depth}).build())


def count_step(tower: nn.Module, launches: Counter[str], trains: bool) -> tuple[Counter[str], Counter[str]]:
    """Count the kernels and the operators that the second step of a patched tower launches."""
    hf_vit_accel.patch(tower.requires_grad_(trains), strict=True)
    pixels = pixels_for(tower, SMALL_IMAGE)
    grid = torch.tensor(SMALL_IMAGE)

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
