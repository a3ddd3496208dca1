"""Run `benchmarks/training.py` with a tiny tower on a CPU: its verdicts on gradients. And compare two files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from support.backends import add_spoiled, hide_gpu
from torch import nn

from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tools.bench import towers, ways

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import shapes
import slower
import training

GRID = ((1, 4, 4), (1, 2, 4))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's CUDA device, if it has one."""
    hide_gpu(monkeypatch)
    monkeypatch.setattr(training, "DEVICE", torch.device("cpu"))


@pytest.fixture
def tower() -> nn.Module:
    tower = tiny.tower_of(tiny.TINY["qwen2_5_vl"].build(fresh=True))
    del tower.blocks[2:]
    return tower.to(torch.bfloat16).requires_grad_(True).train()


def measured(tower: nn.Module, backends: list[str], baselines: list[str]) -> dict[str, dict[str, Any]]:
    chosen = ways.choose(tower, backends, baselines)
    return {row["contender"]: row for row in training.measure("tiny", tower, {"size": GRID}, chosen, rounds=1)}


def test_every_gradient_is_compared(tower: nn.Module) -> None:
    """Stock's own errors stand beside, and set-ups that cannot run are skipped."""
    rows = measured(tower, ["auto", "sdpa"], ["sdpa", "graph", "compile+graph"])
    timed = {name: row for name, row in rows.items() if row["status"] == "timed"}
    assert timed.keys() == {"stock sdpa", "auto", "sdpa"}
    assert all(row["problem"] for name, row in rows.items() if name not in timed)
    names = {name for name, _ in tower.named_parameters()} | {"pixels", "output 0"}
    for row in timed.values():
        assert row["worst"] in names and 1e-4 < row["error"] <= row["bound"] < 0.1 and row["ms"] > 0
        assert 0 < row["error_ratio_mean"] <= row["error_ratio"]
    assert all(parameter.grad is None for parameter in tower.parameters())


def test_a_wrong_gradient_is_not_timed(tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is right, but the gradient of one product is a quarter too large."""

    class Louder(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.25

    add_spoiled(monkeypatch, Louder.apply, differentiable=True)
    rows = measured(tower, ["spoiled", "sdpa"], ["sdpa"])
    assert rows["sdpa"]["status"] == "timed" and rows["spoiled"]["status"] == "wrong"
    assert rows["spoiled"]["ms"] is None and "is allowed, of " in rows["spoiled"]["problem"]


def test_slower_rows_are_listed() -> None:
    def rows(**median_of: float) -> dict[str, Any]:
        timed = [
            dict(model="m", size="s", contender=name, ms=ms, ms_low=ms - 1, ms_high=ms + 1)
            for name, ms in median_of.items()
        ]
        return {"device": "A", "rows": [*timed, dict(model="m", size="s", contender="skipped", ms=None)]}

    before = rows(same=10, slow=10, noisy=10, fast=9)
    lines = list(slower.slower(before, rows(same=10.1, slow=20, noisy=11, fast=5, new=3)))
    assert lines[0] == "slower: m, s, slow: 20.00 ms, before 10.00"
    assert lines[1:] == ["4 compared, 1 slower by more than 3% and the spread of their runs"]
    assert next(slower.slower(before, before | {"device": "B"})) == "device: A before, B now"
    published = json.loads((Path(slower.__file__).parent / "towers.json").read_text())
    (line,) = slower.slower(published, published)
    assert line.endswith(" compared, 0 slower by more than 3% and the spread of their runs")


@pytest.mark.skipif(len(towers.SHAPES) < 9 + len(shapes.OTHERS), reason="this transformers lacks some families")
def test_every_family_has_a_shape() -> None:
    kinds = {towers.tower_class(towers.vision_config(model)).__name__ for model in towers.SHAPES}
    fast = [family for family in FAMILIES if not family.attention_only]
    assert all(kinds & {name for _, name in family.towers} for family in fast)
    for model in shapes.OTHERS:
        towers.build_tower(model, torch.device("meta"), torch.bfloat16)
