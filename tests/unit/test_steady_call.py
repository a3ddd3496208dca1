"""Bound how many files of ours a steady call enters, whatever the depth of the tower."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.cpu_graphs import Recorder
from tiny import GRIDS, TINY, outputs_of, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel

GRID = GRIDS["mixed"]
OF_FAULTS = ("/machine.py", "call")
"""The wrapper of operations that marks their failures."""


PACKAGE = str(Path(hf_vit_accel.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def entered(act: Callable[[], object]) -> Counter[tuple[str, str, int]]:
    """Run something; count how often it enters each function of the package, by file, name and line."""
    counts: Counter[tuple[str, str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            counts[code.co_filename.removeprefix(PACKAGE), code.co_name, code.co_firstlineno] += 1

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


def test_checks_do_not_grow_with_the_tower() -> None:
    """Count calls of our functions, without those of a layer's operations."""
    of_layers = ("/ops/", "/backends/", "/engine/encoder.py", "/machine.py")
    counts_by_depth = []
    for depth in (4, 8):
        tiny = TINY["qwen2_vl"]
        tower = tower_of(type(tiny)(tiny.model, tiny.config, tiny.vision | {"depth": depth}, tiny.text).build())
        hf_vit_accel.patch(tower)
        run_tower(tower, GRID)
        calls = entered(lambda: run_tower(tower, GRID))  # noqa: B023
        counts_by_depth.append({key: count for key, count in calls.items() if not key[0].startswith(of_layers)})
    assert counts_by_depth[0] == counts_by_depth[1]
