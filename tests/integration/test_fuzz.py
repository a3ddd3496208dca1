"""Input of every kind: served as stock does, or refused as documented; the next good call is right; nothing grows.

Seeds are fixed, so that every run tries the same inputs.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cpu_graphs import SMALL
from support.graphs import draw_grid
from support.towers import ONE_TOWER, alike
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, run_tower, tower_of

import hf_vit_accel
from hf_vit_accel import FallbackError, GraphConfig, machine
from hf_vit_accel.backends import BACKENDS, Request
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.engine.route import Routes, Spec
from hf_vit_accel.graphs import runner as runner_module
from hf_vit_accel.graphs import store
from hf_vit_accel.layout import Geometry, build, to_device
from hf_vit_accel.tower.state import state_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


class Inputs(NamedTuple):
    """What a tower is called with; told without its numbers."""

    pixels: Any
    grid: Any

    def __repr__(self) -> str:
        kinds = (type(self.pixels).__name__, getattr(self.pixels, "dtype", ""), getattr(self.pixels, "layout", ""))
        shape = tuple(getattr(self.pixels, "shape", ()))
        return f"pixels {shape} {kinds}, grid {self.grid!r} {getattr(self.grid, 'dtype', '')}"


@pytest.fixture(scope="module", params=ONE_TOWER)
def stock(request: Any) -> Any:
    """A stock tower; its twin, patched, is made from it."""
    return tower_of(TINY[request.param].build())


def twin_of(tower: Any, **arguments: Any) -> Any:
    """A patched tower with the very parameters of a stock one."""
    twin = type(tower)(type(tower.config)(**tower.config.to_dict())).eval()
    twin.load_state_dict(tower.state_dict(), assign=True)
    return hf_vit_accel.patch(twin, **arguments)


# --- bad input --------------------------------------------------------------------------------------------------------

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.complex64, torch.bool, torch.uint8, torch.int64]


KINDS: list[Callable[[Any], Any]] = [
    lambda x: x,
    lambda x: None,
    lambda x: [x],
    lambda x: np.zeros((16, 96), np.float32),
    lambda x: x.to_sparse() if x.device.type == "cpu" else x,
    lambda x: torch.zeros(16, 96).to_sparse_csr(),
    lambda x: torch.zeros(16, 96).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
    lambda x: torch.nested.nested_tensor([torch.zeros(16, 96)]),
    lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x,
]
GRID_KINDS: list[Callable[[Any], Any]] = [
    lambda x: x,
    lambda x: None,
    lambda x: "1, 4, 4",
    lambda x: 7,
    lambda x: [[1, 4, 4]],
    lambda x: ((1, 4, 4),),
    lambda x: np.array([[1, 4, 4]]),
    lambda x: torch.tensor([[1, 4, 4]]).to_sparse(),
    lambda x: torch.nested.nested_tensor([torch.tensor([1, 4, 4])]),
    lambda x: torch.tensor([[1, 4, 4]]).repeat(4, 1)[::4],
]
LAYOUTS = ["", "", "transposed", "every other row", "every other column", "expanded", "offset"]


def _strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, laid out otherwise."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "every other row":
        return x.repeat_interleave(2, 0)[::2]
    if how == "every other column":
        return x.repeat_interleave(2, 1)[:, ::2]
    if how == "expanded":
        return x[:1].expand_as(x)
    if how == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    return x


@st.composite
def inputs(draw: Any, width: int) -> Inputs:
    """Pixels and a grid: good ones, with any number of things wrong."""
    size = st.integers(1, 5)
    entries = draw(st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), size, size), min_size=1, max_size=4))
    grid: Any = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in entries])
    rows = int(grid.prod(1).sum())
    kinds = ["rows", "columns", "grid", "entries", "padding", "shape", "dtype", "device", "kind"]
    wrong = draw(st.sets(st.sampled_from(kinds)))
    if draw(st.booleans()):
        wrong = set()
    if "grid" in wrong:
        value = st.sampled_from([0, -1, -2, 1, 3, 7, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63)])
        for _ in range(draw(st.integers(1, 3))):
            grid[draw(st.integers(0, len(grid) - 1)), draw(st.integers(0, 2))] = draw(value)
        grid[grid[:, 0] == 0] %= 64  # stock computes the positions of a frame, even of those that are not there
    if "entries" in wrong:
        grid = draw(st.sampled_from([grid[:0], torch.cat([grid, grid[:1]]), grid[1:]]))
    rows = draw(st.sampled_from([0, 1, rows - 1, rows + 1, rows + 4, 2 * rows])) if "rows" in wrong else rows
    widths = [0, 1, width - 1, width + 1, 2 * width, width // 2] if "columns" in wrong else [width]
    columns = draw(st.sampled_from(widths))
    pixels: Any = torch.randn(max(rows, 0), columns, generator=torch.Generator().manual_seed(rows + columns))
    pixels = _strided(pixels, draw(st.sampled_from(LAYOUTS)))
    pixels = pixels.to(draw(st.sampled_from(OTHERS if "dtype" in wrong else FLOATS)))
    if "dtype" in wrong and draw(st.booleans()):
        grid = grid.to(draw(st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.float64])))
    elif not wrong & {"grid", "entries"}:
        grid = grid.to(draw(st.sampled_from(INTEGERS)))
    if draw(st.booleans()):
        grid = grid.repeat_interleave(2, 1)[:, ::2]
    if "padding" in wrong:
        grid = torch.cat([grid, grid.new_tensor(draw(st.sampled_from([[[0, 0, 0]], [[0, 4, 5]], [[0, 0, 0]] * 2])))])
    if "shape" in wrong:
        pixels = draw(st.sampled_from([pixels[None], pixels.flatten(), pixels[..., None], pixels.new_zeros(())]))
        grid = draw(st.sampled_from([grid, grid.flatten(), grid[None], grid[:, :2], grid.t()]))
    if "device" in wrong:
        pixels, grid = draw(st.sampled_from([(pixels.to("meta"), grid), (pixels, grid.to("meta"))]))
    if "kind" in wrong:
        pixels, grid = draw(st.sampled_from(KINDS))(pixels), draw(st.sampled_from(GRID_KINDS))(grid)
    return Inputs(pixels, grid)


def outcome(tower: Any, given_: Inputs) -> list[torch.Tensor] | Exception:
    """What a tower makes of inputs, or the error that it raises."""
    try:
        with torch.no_grad():
            return outputs_of(tower(given_[0], grid_thw=given_[1]))
    except Exception as error:
        return error


DOCUMENTED = re.compile(r"expected .*(got|found) .*; .|^expected at least one image.*; .", re.S)
"""Every ValueError of ours: what was expected, what was got, and, after the semicolon, what to do."""


def check(stock: Any, patched: Any, given_: Inputs) -> str:
    """Both towers on one input: equal outputs, or a documented error. Says which."""
    found, expected = outcome(patched, given_), outcome(stock, given_)
    if isinstance(expected, Exception) and not isinstance(found, Exception):  # of another type, which stock cannot take
        expected = outcome(stock, Inputs(given_.pixels.float(), given_.grid.long()))
    if isinstance(found, Exception):
        documented = type(found) is ValueError and DOCUMENTED.match(str(found))
        # Stock broadcasts a single row over all positions of its table, though no image has fewer than merge ** 2.
        single = documented and re.search(r"rows of pixel values for .*, got 1;", str(found))
        assert isinstance(expected, Exception) or single, (given_, found)
        assert documented or type(found) is type(expected), (given_, found, expected)
        return "refused" if documented else "as stock"
    assert not isinstance(expected, Exception), (given_, expected)
    assert_close(found, expected, 1e-5)
    return "served"


@pytest.fixture(scope="module")
def patched(stock: Any) -> Iterator[Any]:
    yield twin_of(stock)


def test_any_input_is_served_or_refused(stock: Any, patched: Any) -> None:
    assert stock.patch_embed.proj.weight[0].numel() == 96
    seen: Counter[str] = Counter()

    @given(given_=inputs(96))
    @settings(FUZZ, max_examples=60)
    def tried(given_: Inputs) -> None:
        way = check(stock, patched, given_)
        seen[way] += 1
        good = GRIDS["smallest"]
        if way != "served":
            assert_close(run_tower(patched, good), run_tower(stock, good))

    tried()
    assert seen["served"] > 15 and seen["refused"] > 15, seen


# --- good and bad input in turn ---------------------------------------------------------------------------------------


def spoil(rng: np.random.Generator, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
    """One thing wrong with good input."""
    row, column = int(rng.integers(len(grid))), int(rng.integers(3))
    spoiled = grid.clone()
    spoiled[row, column] = int(rng.choice([0, -1, -4, int(spoiled[row, column]) + 1, 2**31, 2**62]))
    return [
        Inputs(pixels[:-1], grid),
        Inputs(pixels[:0], grid),
        Inputs(torch.cat([pixels, pixels[:4]]), grid),
        Inputs(pixels[:, :-1], grid),
        Inputs(torch.cat([pixels, pixels], 1), grid),
        Inputs(pixels, spoiled),
        Inputs(pixels, grid[:0]),
        Inputs(pixels, grid.flatten()),
        Inputs(pixels.to("meta"), grid),
        Inputs(pixels, grid.float()),
        Inputs(pixels.to(torch.complex64), grid),
        Inputs(None, grid),
    ][int(rng.integers(12))]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("way", ["eager", "graphs", "strict", "unfused"])
def test_good_calls_between_bad_ones_are_right(on_cpu: Any, stock: Any, way: str, seed: int) -> None:
    """A stream of new and old layouts of any dtype and strides; every third call fails."""
    arguments: dict[str, Any] = {
        "eager": {},
        "graphs": dict(cuda_graphs=GraphConfig(max_tokens=64, exact_after=2, max_graphs=8)),
        "strict": dict(strict=True, cuda_graphs=SMALL),
        "unfused": dict(fuse=False, attention="sdpa"),
    }[way]
    patched, rng = twin_of(stock, **arguments), np.random.default_rng(seed)
    layouts = [draw_grid(rng, 40) for _ in range(8)]
    served = refused = 0
    for call in range(45):
        layout = layouts[int(rng.integers(8))] if rng.random() < 0.6 else draw_grid(rng, 60)
        pixels, grid = pixels_for(stock, layout, call), torch.tensor(layout)
        if call % 3 == 0:
            error = outcome(patched, spoil(rng, pixels, grid))
            assert type(error) is ValueError and DOCUMENTED.match(str(error)), error
            refused += 1
            continue
        given_ = Inputs(_strided(pixels, str(rng.choice(LAYOUTS))), grid.to(INTEGERS[int(rng.integers(5))]))
        if way == "strict" and rng.random() < 0.2:
            with pytest.raises(FallbackError, match="output_hidden_states is requested"), torch.no_grad():
                patched(given_.pixels, grid_thw=grid, output_hidden_states=True)
            refused += 1
            continue
        expected = outcome(stock, Inputs(given_.pixels.detach(), grid))
        assert_close(outcome(patched, given_), expected)  # type: ignore[arg-type]
        served += 1
    status = hf_vit_accel.status(patched).towers[0]
    assert (status.calls, status.stock_calls) == (served, 0) and not status.fallbacks
    assert served + refused == 45 and refused >= 15
    if status.graphs is not None:
        assert status.graphs.replays and len(status.graphs.graphs) <= max(8, 192 * (way == "strict"))


# --- nothing grows ----------------------------------------------------------------------------------------------------

CALLS = 2_000
ENTRIES = 64  # of a cache of routes: it is full soon, and what it holds weighs about the same ever after
BLOCKS = CALLS // 20  # blocks of Python's memory that the second half of the calls may add: not one in ten of them


def new_grids() -> Iterator[tuple[tuple[int, int, int], ...]]:
    """So many layouts of at most 104 merged tokens, no two alike, in random order."""
    sizes = [(t, 2 * h, 2 * w) for t in (1, 2) for h in range(1, 9) for w in range(1, 64 // (t * h) + 1)]
    others = [(1, 2, 2 * w) for w in range(1, 41)]
    grids = [(size, other) for size in sizes for other in others]
    grids += [(other, size) for size, other in grids if size[0] == 2 or size[1] > 2]
    order = np.random.default_rng(0).permutation(len(grids))[:CALLS]
    assert len(order) == CALLS, len(order)
    return (grids[index] for index in order)


def growth_of(call: Callable[[Any], None]) -> int:
    """Blocks of Python's memory that are held after CALLS calls beyond those after half of them."""
    held = []
    for index, grid in enumerate(new_grids()):
        call(grid)
        if index + 1 in (CALLS // 2, CALLS):
            gc.collect()
            held.append(sys.getallocatedblocks())
    return held[1] - held[0]


def check_bounded(owner: Any, most: int) -> None:
    """Every container among an object's attributes holds at most so many things."""
    for name, value in vars(owner).items():
        if hasattr(value, "__len__") and not isinstance(value, str):
            assert len(value) <= most, (name, len(value))


def request_of(tower: Any, **kwargs: Any) -> Request:
    attention = tower.blocks[0].attn
    return Request(
        device=torch.device("cpu"),
        dtype=torch.float32,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        **kwargs,
    )


def test_grids_are_all_new() -> None:
    assert len(set(new_grids())) == CALLS


def spec_of(tower: Any, *, fast: bool) -> Spec:
    """What decides the routes of a patched tower."""
    state = state_of(tower)
    snapshot = state.snapshot(tower)
    return state.spec(snapshot, snapshot.weights()[1], torch.device("cpu"), fast=fast, grad=False)


@pytest.mark.parametrize(("family", "attention"), alike(("qwen2_5_vl", "flex"), ("qwen3_vl", "auto")))
def test_routes_do_not_grow(family: str, attention: str) -> None:
    tower = hf_vit_accel.patch(tower_of(TINY[family].build()), attention=attention)
    routes, spec = state_of(tower).routes, spec_of(tower, fast=False)
    assert routes.cache.entries == 1024
    routes.cache.entries = ENTRIES
    grown, cache = growth_of(lambda grid: routes.get(grid, spec).ready()), routes.cache
    assert cache.misses == CALLS and len(cache) <= ENTRIES and cache.total_cost <= cache.cost
    kept = [routes.get(grid, spec) for grid in list(new_grids())[-len(cache) :]]
    assert cache.misses == CALLS
    assert sum(x.nbytes for each in kept for x in each.ready().tensors.values()) <= cache.total_cost
    check_bounded(state_of(tower), 64)
    assert grown < BLOCKS


@pytest.mark.parametrize("fails", alike(True, False))
def test_graphs_do_not_grow(on_cpu: Any, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The runner alone, with an encoder that computes nothing; also where captures fail."""
    tower = hf_vit_accel.patch(tower_of(TINY["qwen3_vl"].build()))
    spec, routes = spec_of(tower, fast=True), Routes()
    routes.cache.entries = ENTRIES
    runner = runner_module.Runner(GraphConfig(max_tokens=128, exact_after=1, max_graphs=8), routes)
    monkeypatch.setattr(runner_module, "encode", lambda route, pixels_TP: [pixels_TP, pixels_TP[::4]])
    monkeypatch.setattr(store, "REMEMBERED", 128)  # reached before the first half is over
    on_cpu.fail = RuntimeError("no capture") if fails else None

    def call(grid: Any) -> None:
        rows = sum(t * h * w for t, h, w in grid)
        result = runner.run(routes.get(grid, spec), torch.zeros(rows, 1), [1])
        assert isinstance(result, store.Eager) == fails

    grown = growth_of(call)
    status = runner.status()
    assert len(status.graphs) <= 8 and (status.captures == 0) == fails
    assert len(routes.cache) <= ENTRIES and routes.cache.total_cost <= routes.cache.cost and len(status.eager) <= 64
    check_bounded(runner, 128)
    assert grown < BLOCKS
    runner.close()
    check_bounded(runner, 64)


def test_cudnn_plans_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is built for every class of layouts that was never seen; the least recently used ones go."""
    monkeypatch.setattr(cudnn_backend, "Graph", lambda *arguments: object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cudnn_backend.GRAPHS.clear()
    qkv, before = torch.zeros(1, 3, 2, 8).unbind(1), cudnn_backend.GRAPHS.misses
    try:
        for count in range(CALLS):
            sequences = (torch.empty(1 + count, 0),) * 5
            cudnn_backend.graph_for(qkv, sequences, 64 << count % 3, 1.0)
        assert cudnn_backend.GRAPHS.misses == before + CALLS and len(cudnn_backend.GRAPHS) == 256
    finally:
        cudnn_backend.GRAPHS.clear()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_plan_is_as_long_as_its_layout(backend: Any) -> None:
    """Bytes that a plan sends: a few times the rows and segments, whatever the layout."""
    request = request_of(tower_of(TINY["qwen2_vl"].build()))
    for index, grid in enumerate(new_grids()):
        if index % 40 == 0:
            metadata = build(grid, Geometry(merge=2, window=4))
            for segments in metadata.segments().values():
                arrays = backend.plan(segments, request).arrays
                to_device(arrays, request.device)
                assert sum(x.nbytes for x in arrays.values()) <= 32 * metadata.rows + 64 * segments.count + 4096


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by /proc")
@pytest.mark.parametrize(
    ("family", "graphs"),
    [("qwen2_5_vl", False), ("qwen3_vl", GraphConfig(max_tokens=128, max_graphs=8))],
    ids=["eager", "graphs"],
)
def test_a_tower_does_not_grow(on_cpu: Any, monkeypatch: pytest.MonkeyPatch, family: str, graphs: Any) -> None:
    """Many calls of new shapes, a tenth of them after one that was refused."""
    monkeypatch.setattr(store, "REMEMBERED", 24)  # reached before the first third is over
    tower, rng = tower_of(TINY[family].build()), np.random.default_rng(0)
    hf_vit_accel.patch(tower, cuda_graphs=graphs)
    state, held, blocks = state_of(tower), [], []
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
            held.append(resident())
            blocks.append(sys.getallocatedblocks())
    check_bounded(state, 64)
    assert state.calls == len(grids) == 120 and not state.fallbacks
    assert held[2] - held[1] < 4 << 20 and blocks[2] - blocks[1] < 120, (held, blocks)


def test_every_cache_declares_its_bound() -> None:
    """No `functools.cache` of inputs; and what a module holds that grows is a bounded LRU, or named here."""
    probes = {id(probe) for probe in machine.PROBES}  # of packages and devices: as many as the machine has
    held = {
        "PROBES": "as many as there are probes",
        "WORKSPACES": "one per device and stream",
        "MISSING": "as many as there are functions of transformers that are wrapped",
    }
    for found in pkgutil.walk_packages(hf_vit_accel.__path__, "hf_vit_accel."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if hasattr(value, "cache_parameters") and id(value) not in probes:
                assert value.cache_parameters()["maxsize"] is not None, f"{found.name}.{name} is cached without a bound"
            if isinstance(value, machine.LRU):
                assert value.entries <= 256
            elif isinstance(value, list | cudnn_backend.Workspaces) and name != "__all__":
                assert name in held or name == "__path__", f"{found.name}.{name} might grow"


def test_the_documented_form_of_errors_is_told_from_others() -> None:
    assert DOCUMENTED.match("expected 3 rows, got 4; pass the same images")
    assert not DOCUMENTED.match("shape '[-1, 3]' is invalid for input of size 7")
