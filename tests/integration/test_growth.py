"""Caches of routes, graphs and plans are bounded, and memory does not grow with the number of calls."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.bad_inputs import outcome, spoil
from support.cpu_graphs import Recorder
from support.towers import alike
from tiny import TINY, pixels_for, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import GraphConfig, machine
from hf_vit_accel.backends import BACKENDS, Backend, Request
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.engine.call import Batch
from hf_vit_accel.engine.route import Routes, Spec
from hf_vit_accel.graphs import policy, store
from hf_vit_accel.graphs import runner as runner_module
from hf_vit_accel.layout import Geometry, build, to_device
from hf_vit_accel.tower import forward
from hf_vit_accel.tower.state import state_of

Grid = tuple[tuple[int, int, int], ...]

CALLS = 1_000
ENTRIES = 64  # of a cache of routes, which is full soon: its memory hardly changes from then on
SECTION = CALLS // 10
BLOCKS = 4 * SECTION // 10  # four sections of calls may add one block of Python's memory in ten calls


def new_grids() -> Iterator[Grid]:
    """Yield CALLS different layouts of at most 104 merged tokens in random order."""
    sizes = [(t, 2 * h, 2 * w) for t in (1, 2) for h in range(1, 9) for w in range(1, 64 // (t * h) + 1)]
    others = [(1, 2, 2 * w) for w in range(1, 41)]
    grids = [(size, other) for size in sizes for other in others]
    grids += [(other, size) for size, other in grids if size[0] == 2 or size[1] > 2]
    order = np.random.default_rng(0).permutation(len(grids))[:CALLS]
    assert len(order) == CALLS, len(order)
    return (grids[index] for index in order)


def growth_of(call: Callable[[Grid], object]) -> int:
    """Return the blocks of Python's memory that the second half of CALLS calls adds.

    The section of calls that adds most is left out: a process also allocates what it needs once, say for a module that
    is imported late. What grows for ever grows in each section.
    """
    allocated_blocks = []
    for index, grid in enumerate(new_grids()):
        call(grid)
        if index + 1 >= CALLS // 2 and (index + 1) % SECTION == 0:
            gc.collect()
            allocated_blocks.append(sys.getallocatedblocks())
    growths = sorted(after - before for before, after in pairwise(allocated_blocks))
    return sum(growths[:-1])


def check_bounded(owner: object, bound: int) -> None:
    """Check the length of every container among an object's attributes."""
    for name, value in vars(owner).items():
        if hasattr(value, "__len__") and not isinstance(value, str):
            assert len(value) <= bound, (name, len(value))


def request_of(tower: nn.Module) -> Request:
    attention = tower.blocks[0].attn
    return Request(
        device=torch.device("cpu"),
        dtype=torch.float32,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
    )


def test_grids_are_all_new() -> None:
    assert len(set(new_grids())) == CALLS


def spec_of(tower: nn.Module, *, fast: bool) -> Spec:
    """Return the key of the routes of a patched tower."""
    state = state_of(tower)
    snapshot = state.snapshot(tower)
    return forward.spec_of(state, snapshot, snapshot.weights()[1], torch.device("cpu"), fast=fast, grad=False)


@pytest.mark.parametrize(("family", "attention"), alike(("qwen2_5_vl", "flex"), ("qwen3_vl", "auto")))
def test_routes_do_not_grow(family: str, attention: str) -> None:
    tower = hf_vit_accel.patch(tower_of(TINY[family].build()), attention=attention)
    routes = state_of(tower).routes
    spec = spec_of(tower, fast=False)
    assert routes.cache.entries == 1024
    routes.cache.entries = ENTRIES
    growth = growth_of(lambda grid: routes.get(grid, spec).ready())
    cache = routes.cache
    assert cache.misses == CALLS and len(cache) <= ENTRIES and cache.total_cost <= cache.cost
    cached_routes = [routes.get(grid, spec) for grid in list(new_grids())[-len(cache) :]]
    assert cache.misses == CALLS
    assert sum(x.nbytes for route in cached_routes for x in route.ready().tensors.values()) <= cache.total_cost
    check_bounded(state_of(tower), 64)
    assert growth < BLOCKS


@pytest.mark.parametrize("fails", [True, False])
def test_graphs_do_not_grow(on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Run the runner alone, with an encoder that computes nothing; let captures succeed or fail."""
    tower = hf_vit_accel.patch(tower_of(TINY["qwen3_vl"].build()))
    plan = SimpleNamespace(
        spec=replace(spec_of(tower, fast=True), against_graphs=None),
        weights=SimpleNamespace(contiguous=True),
        checkpoints=[],
        parameters=[],
        reading=SimpleNamespace(buffers=list, called_linears=[]),
    )
    routes = Routes()
    routes.cache.entries = ENTRIES
    runner = runner_module.Runner(GraphConfig(max_tokens=128, exact_after=1, max_graphs=8), routes)
    monkeypatch.setattr(runner_module, "encode", lambda route, pixels_TP: [pixels_TP, pixels_TP[::4]])
    monkeypatch.setattr(policy, "REMEMBERED", 128)  # reached before the first half is over
    on_cpu.fail = RuntimeError("no capture") if fails else None

    def call(grid: Grid) -> None:
        rows = sum(t * h * w for t, h, w in grid)
        result = runner.run(Batch(plan=plan, attempt=None, grid=grid, pixels_TP=torch.zeros(rows, 1)))
        assert isinstance(result, store.Eager) == fails

    growth = growth_of(call)
    status = runner.status()
    assert len(status.graphs) <= 8 and (status.captures == 0) == fails
    assert len(routes.cache) <= ENTRIES and routes.cache.total_cost <= routes.cache.cost and len(status.eager) <= 64
    check_bounded(runner, 128)
    assert growth < BLOCKS
    runner.drop_graphs()
    check_bounded(runner, 64)


def test_cudnn_plans_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new class of layouts builds a plan; the least recently used plans go."""
    monkeypatch.setattr(cudnn_backend, "CudnnPlan", lambda *arguments: object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cudnn_backend.CUDNN_PLANS.clear()
    qkv = torch.zeros(1, 3, 2, 8).unbind(1)
    misses = cudnn_backend.CUDNN_PLANS.misses
    try:
        for count in range(CALLS):
            sequences = (torch.empty(1 + count, 0),) * 5
            cudnn_backend.cudnn_plan_for(qkv, sequences, 64 << count % 3, 1.0)
        assert cudnn_backend.CUDNN_PLANS.misses == misses + CALLS and len(cudnn_backend.CUDNN_PLANS) == 256
    finally:
        cudnn_backend.CUDNN_PLANS.clear()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_plan_is_as_long_as_its_layout(backend: Backend) -> None:
    """A plan sends a few bytes for each row and segment, whatever the layout."""
    request = request_of(tower_of(TINY["qwen2_vl"].build()))
    for index, grid in enumerate(new_grids()):
        if index % 40 == 0:
            metadata = build(grid, Geometry(merge=2, window=4))
            for segments in metadata.segments().values():
                arrays = backend.plan(segments, request).arrays
                to_device(arrays, request.device)
                assert sum(x.nbytes for x in arrays.values()) <= 32 * metadata.rows + 64 * segments.count + 4096


def resident() -> int:
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("family", "graphs"),
    [("qwen2_5_vl", False), ("qwen3_vl", GraphConfig(max_tokens=128, max_graphs=8))],
    ids=["eager", "graphs"],
)
def test_a_tower_does_not_grow(
    on_cpu: type[Recorder], monkeypatch: pytest.MonkeyPatch, family: str, graphs: GraphConfig | bool
) -> None:
    """Make many calls of new shapes, a tenth of them after a refused call."""
    monkeypatch.setattr(policy, "REMEMBERED", 24)  # reached before the first third is over
    tower = tower_of(TINY[family].build())
    rng = np.random.default_rng(0)
    hf_vit_accel.patch(tower, cuda_graphs=graphs)
    state = state_of(tower)
    resident_bytes = []
    blocks = []
    state.routes.cache.entries = 24
    grids = [grid for grid in new_grids() if sum(t * h * w for t, h, w in grid) <= 160][:120]
    for index, grid in enumerate(grids):
        pixels = pixels_for(tower, list(grid), index)
        if index % 10 == 0:
            assert isinstance(outcome(tower, spoil(rng, pixels, torch.tensor(grid))), ValueError)
        with torch.no_grad():
            tower(pixels, grid_thw=torch.tensor(grid))
        if index + 1 in (40, 80, 120):
            gc.collect()
            resident_bytes.append(resident())
            blocks.append(sys.getallocatedblocks())
    check_bounded(state, 64)
    assert state.fast_calls == len(grids) == 120 and not state.fallbacks
    assert resident_bytes[2] - resident_bytes[1] < 4 << 20, resident_bytes
    assert blocks[2] - blocks[1] < 120, blocks


def test_every_cache_declares_its_bound() -> None:
    """No `functools.cache` takes inputs; a container of a module is a bounded LRU, or named here."""
    probes = {id(probe) for probe in machine.PROBES}  # one entry per package or device of the machine
    bounded_lists = {
        "PROBES": "as many as there are probes",
        "_INHERITED": "what a forked process inherits, once",
        "WORKSPACES": "one per device and stream",
        "_FOLLOWERS": "one, set when the package is imported",
        "MISSING": "as many as there are functions of transformers that are wrapped",
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
            elif isinstance(value, list | cudnn_backend.Workspaces) and name != "__all__":
                assert name in bounded_lists or name == "__path__", f"{module.__name__}.{name} might grow"
