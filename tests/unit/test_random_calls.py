"""The benchmark of random calls: its streams, and that it fails where a replay is wrong."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.cpu_graphs import Recorder
from tiny import TINY, tower_of

from hf_vit_accel.graphs.runner import Runner


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose towers are tiny."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("random_calls")
    monkeypatch.setattr(script, "build_tower", lambda *_: tower_of(TINY["qwen3_vl"].build()))
    monkeypatch.setattr(script, "SIDES", range(4, 12, 2))
    return script


def test_streams_of_new_sizes_never_repeat_one(benchmark: ModuleType) -> None:
    new = list(benchmark.Stream(40, 40).grids(1))
    assert len(new) == len(set(new)) == 40
    repeated = list(benchmark.Stream(200, 6).grids(1))
    assert len(repeated) == 200 and len(set(repeated)) <= 6
    assert repeated == list(benchmark.Stream(200, 6).grids(1)) != list(benchmark.Stream(200, 6).grids(2))


def test_random_calls_are_counted(on_cpu: type[Recorder], benchmark: ModuleType) -> None:
    streams = (benchmark.Stream(8, 8), benchmark.Stream(40, 4))
    new, common = benchmark.measure("tiny", torch.device("cpu"), streams)
    assert (new["calls"], new["stream"], common["calls"], common["stream"]) == (8, "no size twice", 40, "4 sizes")
    assert common["replays"] > 20 > common["captures"] > 0
    assert min(*new["ms"].values(), *common["ms"].values()) > 0 and common["error"] < 1e-5


def test_a_wrong_replay_fails(on_cpu: type[Recorder], benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Runner._replay

    def wrong(*arguments: Any) -> list[torch.Tensor]:
        return [output * 1.1 for output in replay(*arguments)]

    monkeypatch.setattr(Runner, "_replay", wrong)
    with pytest.raises(AssertionError):
        benchmark.measure("tiny", torch.device("cpu"), (benchmark.Stream(20, 2),))
