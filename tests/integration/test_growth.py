"""Caches of routes and graphs are bounded, and memory does not grow with the number of calls."""

import copy
import gc
import importlib
import pkgutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cpu_graphs import Recorder
from support.towers import alike
from tiny import TINY, assert_close, pixels_for, run_tower, tower_of

import hf_vit_accel
from hf_vit_accel import GraphConfig, machine
from hf_vit_accel.graphs import policy
from hf_vit_accel.tower.state import state_of

Grid = tuple[tuple[int, int, int], ...]

CALLS = 200


def new_grids() -> list[Grid]:
    """Return different layouts of at most 160 rows in random order."""
    sizes = [(t, 2 * h, 2 * w) for t in (1, 2) for h in range(1, 9) for w in range(1, 64 // (t * h) + 1)]
    others = [(1, 2, 2 * w) for w in range(1, 41)]
    grids = [(size, other) for size in sizes for other in others]
    grids += [(other, size) for size, other in grids if size[0] == 2 or size[1] > 2]
    shuffled = (grids[index] for index in np.random.default_rng(0).permutation(len(grids)))
    return [grid for grid in shuffled if sum(t * h * w for t, h, w in grid) <= 160][:CALLS]


def check_bounded(owner: object, bound: int) -> None:
    """Check the length of every container among an object's attributes."""
    for name, value in vars(owner).items():
        if hasattr(value, "__len__") and not isinstance(value, str):
            assert len(value) <= bound, (name, len(value))


def clear_caches() -> None:
    """Clear the caches of functions, whose bounds `test_every_cache_declares_its_bound` checks."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_vit_accel"):
            for value in vars(module).values():
                if hasattr(value, "cache_parameters"):
                    value.cache_clear()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("family", "graphs"),
    alike(("qwen3_vl", GraphConfig(max_tokens=128, max_graphs=8)), ("qwen2_5_vl", False)),
    ids=["graphs", "eager"],
)
def test_a_tower_does_not_grow(
    on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, family: str, graphs: GraphConfig | bool
) -> None:
    """Make many calls of new shapes, a tenth of them after a refused call: these are right, too."""
    monkeypatch.setattr(policy, "REMEMBERED", 24)  # reached before the first third is over
    stock = tower_of(TINY[family].build())
    tower = copy.deepcopy(stock)
    hf_vit_accel.patch(tower, cuda_graphs=graphs)
    state = state_of(tower)
    resident_bytes = []
    blocks = []
    state.routes.cache.entries = 24
    for index, grid in enumerate(new_grids()):
        if index % 10 == 0:
            with pytest.raises(ValueError, match="rows of pixel values"):
                tower(pixels_for(tower, list(grid), index)[:-1], torch.tensor(grid))
        outputs = run_tower(tower, list(grid), index)
        if index % 10 == 0:
            assert_close(outputs, run_tower(stock, list(grid), index))
        if index + 1 in (40, 80, 120, 160, 200):
            clear_caches()
            gc.collect()
            resident_bytes.append(resident())
            blocks.append(sys.getallocatedblocks())
    check_bounded(state, 64)
    assert state.fast_calls == CALLS and not state.fallbacks
    assert resident_bytes[-1] - resident_bytes[1] < 4 << 20, resident_bytes
    # Caches fill and empty by turns. What grows with the calls grows between any two counts: by 40 at the least.
    assert min(after - before for before, after in pairwise(blocks)) < 40, blocks


def test_every_cache_declares_its_bound() -> None:
    """No `functools.cache` takes inputs; a container of a module is a bounded LRU, or named here."""
    probes = {id(probe) for probe in machine.PROBES}  # one entry per package or device of the machine
    bounded_lists = {
        "PROBES": "as many as there are probes",
        "_INHERITED": "what a forked process inherits, once",
    }
    for module_info in pkgutil.walk_packages(hf_vit_accel.__path__, "hf_vit_accel."):
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            if hasattr(value, "cache_parameters") and id(value) not in probes:
                assert value.cache_parameters()["maxsize"] is not None, (
                    f"{module.__name__}.{name} is cached without a bound"
                )
            if isinstance(value, machine.LRU):
                assert value.entries <= 256
            elif isinstance(value, list) and name != "__all__":
                assert name in bounded_lists or name == "__path__", f"{module.__name__}.{name} might grow"
