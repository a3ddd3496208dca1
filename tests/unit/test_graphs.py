"""The graph runner without a GPU: packing, padding, eviction, staleness; its recorder replays by running again.

Before each replay every static buffer is poisoned, so that whatever a graph reads must have been written for it. On a
GPU: the same with real captures.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from standins import SMALL, Recorder, both_towers, status_of
from support.graphs import Grid, draw_grid, patch
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, GraphConfig, backends
from hf_vit_accel.backends import ORDER
from hf_vit_accel.graphs import budgets, runner, store
from hf_vit_accel.graphs.buffers import Shape, pad, pad_segments
from hf_vit_accel.layout import Geometry, Segments, build
from hf_vit_accel.tower import forward as tower_module
from hf_vit_accel.tower.state import state_of

ODD: dict[str, Any] = {
    "integers": lambda p, g: ((p * 10).to(torch.int32), g),
    "bytes": lambda p, g: ((p.abs() * 10).to(torch.uint8), g),
    "wider floats": lambda p, g: (p.double() * 1.1, g),
    "padding rows in the grid": lambda p, g: (p, torch.cat([g.new_zeros(1, 3), g])),
}


@pytest.mark.parametrize("case", ODD)
@both_towers
def test_odd_input_is_replayed(on_cpu: Any, model: Any, case: str) -> None:
    """What stock casts and views itself, between calls of the usual form."""
    tower, grid = tower_of(model), [(1, 4, 6), (1, 2, 2)]
    usual = pixels_for(tower, grid), torch.tensor(grid)
    odd = ODD[case](*usual)
    with torch.no_grad():
        expected = [outputs_of(tower(*given)) for given in (usual, odd)]
        patch(model)
        for _ in range(3):
            for given, wanted in zip((usual, odd), expected, strict=True):
                assert_close(outputs_of(tower(*given)), wanted)
    assert status_of(model).replays == 6 and not status_of(model).eager


# --- pure parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4, 5, 64, 1280, 4096])
def test_the_ladder(most: int) -> None:
    steps = budgets.ladder(most)
    assert steps[-1] == most and list(steps) == sorted(set(steps))
    tokens = np.arange(16, most + 1)
    if len(tokens):
        padded = np.array(steps)[np.searchsorted(steps, tokens)]
        assert (padded / tokens).max() < 1.25 and (padded / tokens).mean() < 1.12
        assert (padded - tokens)[tokens > 512].max(initial=0) < 64


sizes = st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(1, 5))
def test_the_bound_on_windows_is_never_exceeded_and_reached(items: Any, side: int) -> None:
    grid = tuple((t, 2 * h, 2 * w) for t, h, w in items)
    metadata = build(grid, Geometry(merge=2, window=side))
    assert metadata.window is not None
    assert metadata.window.count <= budgets.most_windows(metadata.merged, metadata.full.count, side)
    thin = build(tuple((1, 2, 2 * (side * k + 1)) for k in range(1, 5)), Geometry(merge=2, window=side))
    assert thin.window is not None
    assert thin.window.count == budgets.most_windows(thin.merged, 4, side)


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(0, 200), st.integers(1, 3), st.sampled_from([None, 2, 4]))
def test_padded_layouts(items: Any, spare: int, spare_segments: int, side: int | None) -> None:
    grid = tuple((t, 2 * h, 2 * w) for t, h, w in items)
    plain = build(grid, Geometry(merge=2, window=side, table=None if side else 6))
    tokens, segments = plain.merged + spare, plain.full.count + spare_segments
    shape = Shape(
        rows=4 * tokens,
        tokens=tokens,
        segments=segments,
        max_seqlen=4 * tokens,
        windows=budgets.most_windows(tokens, segments, side) if side else 0,
        window_max_seqlen=4 * side**2 if side else 0,
    )
    padded = pad(plain, shape)
    assert padded.rows == padded.full.rows == 4 * tokens and padded.full.count == segments
    assert (padded.full.lengths_S[: plain.full.count] == plain.full.lengths_S).all()
    assert (np.diff(padded.full.cu_seqlens_S1) >= 0).all() and padded.full.max_seqlen == 4 * tokens
    for name, array in padded.arrays().items():
        real = plain.arrays()[name]
        assert array.dtype == real.dtype and (array[: len(real)] == real).all(), name
    if side:
        assert padded.window is not None and padded.window.rows == 4 * tokens
        assert padded.window.lengths_S.max() <= 4 * side**2 and padded.window.count == shape.windows
        assert (np.sort(padded.window_index_M) == np.arange(tokens)).all()
        assert (padded.window_index_M[padded.inverse_index_M] == np.arange(tokens)).all()
        assert (padded.window_index_M[plain.merged :] == np.arange(plain.merged, tokens)).all()


def test_spare_rows_need_a_segment_of_their_own() -> None:
    with pytest.raises(AssertionError):
        pad_segments(Segments(np.array([4], np.int32)), 8, 1, 8)
    assert pad_segments(Segments(np.array([4], np.int32)), 4, 3, 8).lengths_S.tolist() == [4, 0, 0]
    spread = pad_segments(Segments(np.array([4], np.int32)), 4 + 200, 9, 500).lengths_S
    assert spread.tolist() == [4, 50, 50, 50, 50, 0, 0, 0, 0]


@given(st.lists(sizes, min_size=1, max_size=40), st.integers(20, 1600))
def test_packing_loses_nothing(items: Any, most: int) -> None:
    grid = tuple((t, 2 * h, 2 * w) for t, h, w in items)
    tokens = [t * h * w for t, h, w in items]
    bins = budgets.pack(grid, 2, budgets.ladder(most))
    if isinstance(bins, str):
        assert max(tokens) > most and "exceeds the largest budget" in bins
        return
    assert [b.first for b in bins] == [0, *(b.last for b in bins[:-1])] and bins[-1].last == len(grid)
    for b in bins:
        assert b.tokens == sum(tokens[b.first : b.last]) and b.frames == sum(t for t, _, _ in items[b.first : b.last])
        assert b.budget is not None and b.tokens <= b.budget <= most and b.frames < budgets.FRAMES
        assert all(smaller < b.tokens for smaller in budgets.ladder(most) if smaller < b.budget)


def test_packing_counts_frames() -> None:
    bins = budgets.pack(((100, 2, 2),) * 5, 2, (1280,))
    assert [(b.first, b.last) for b in bins] == [(0, 2), (2, 4), (4, 5)]  # type: ignore[union-attr]
    assert "a video exceeds the 255 frames" in budgets.pack(((400, 2, 2),), 2, (1280,))


def test_replays_that_do_not_pay() -> None:
    def one(tokens: int, budget: int) -> budgets.Bin:
        return budgets.Bin(first=0, last=1, tokens=tokens, frames=1, budget=budget)

    assert budgets.pays([one(16, 512)], 2), "launches alone take longer"
    assert budgets.pays([one(1000, 1024)], 2) and not budgets.pays([one(1000, 1280)], 2)
    assert budgets.pays([one(1000, 1024)] * 2, 2) and not budgets.pays([one(1000, 1024)] * 12, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(max_tokens=0),
        dict(max_tokens=1.5),
        dict(exact_after=-1),
        dict(max_graphs=0),
        dict(max_bytes=True),
        dict(budgets=()),
        dict(budgets=(4, 4)),
        dict(budgets=(8, 4)),
        dict(budgets=(0, 4)),
        dict(budgets=(True, 4)),
        dict(budgets=5),
    ],
    ids=str,
)
def test_settings_are_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected "):
        GraphConfig(**wrong)


def test_patch_wants_a_config() -> None:
    with pytest.raises(ValueError, match="expected cuda_graphs to be"):
        hf_vit_accel.patch(TINY["qwen3_vl"].build(), cuda_graphs=3)  # type: ignore[arg-type]


# --- whole towers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param("qwen2_vl", "auto", marks=pytest.mark.matrix),
        ("qwen2_5_vl", "auto"),
        ("qwen3_vl", "auto"),
        ("qwen2_5_vl", "flex"),
    ],
)
def test_a_stream_of_layouts_equals_eager(on_cpu: Any, family: str, attention: str) -> None:
    model, rng = TINY[family].build(), np.random.default_rng(0)
    grids = [draw_grid(rng) for _ in range(25)]
    grids += [[(1, 4, 12), (1, 4, 4)], [(1, 8, 8)], [(4, 4, 4)], [(1, 2, 32)], [(2, 4, 8)]]  # 16 tokens, five layouts
    expected = [run_tower(tower_of(model), grid, seed) for seed, grid in enumerate(grids)]
    patch(model, attention=attention)
    found = [run_tower(tower_of(model), grid, seed) for seed, grid in enumerate(grids)]
    for one, other in zip(found, expected, strict=True):  # all at once: no replay may have changed what another gave
        assert_close(one, other)
    status = status_of(model)
    assert status.replays >= len(grids) and not status.eager and status.captures == len(status.graphs)
    assert status.captures < len(grids) and 1 < status.padding < 1.4
    assert hf_vit_accel.status(model).towers[0].calls == len(grids)
    assert "replays" in str(hf_vit_accel.status(model))


def test_a_call_beyond_the_largest_budget_is_cut_between_images(on_cpu: Any, model: Any) -> None:
    grid: Grid = [(1, 10, 12), (2, 8, 8), (1, 14, 14), (1, 2, 2), (1, 16, 12)]
    expected = run_tower(tower_of(model), grid)
    patch(model)
    assert_close(run_tower(tower_of(model), grid), expected)
    assert status_of(model).replays == 2


def test_what_is_too_large_runs_eagerly_and_is_counted(on_cpu: Any, model: Any) -> None:
    expected = run_tower(tower_of(model), [(1, 24, 24)])
    patch(model, strict=True)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), [(1, 24, 24)]), expected)
    status = status_of(model)
    assert status.eager == {"an image or video exceeds the largest budget of 128 merged tokens": 2}
    assert status.replays == 0


def test_shapes_that_come_often_are_captured_exactly(on_cpu: Any, model: Any) -> None:
    graphs = patch(model, GraphConfig(max_tokens=128, exact_after=3))
    for grid in ([(1, 10, 12)], [(1, 26, 22)]):  # one within the budgets, one beyond them
        expected = run_tower(tower_of(model), grid)
        for _ in range(4):
            assert_close(run_tower(tower_of(model), grid), expected)
    other = run_tower(tower_of(model), [(1, 22, 26)], seed=5)
    exact = [label for label, _, _ in status_of(model).graphs if "exactly" in label]
    assert len(exact) >= 2 and status_of(model).captures <= 5
    hf_vit_accel.unpatch(model)
    assert_close(other, run_tower(tower_of(model), [(1, 22, 26)], seed=5))
    assert not graphs._graphs and not graphs._arena


def test_weights_updated_in_place_are_seen(on_cpu: Any, model: Any) -> None:
    patch(model)
    grid: Grid = [(1, 6, 8)]
    run_tower(tower_of(model), grid)
    with torch.no_grad():
        for parameter in tower_of(model).parameters():
            parameter.mul_(1.1)
    found, captures = run_tower(tower_of(model), grid), status_of(model).captures
    assert captures == 1
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_of(model), grid))


def _assign(model: Any) -> None:
    model.load_state_dict({name: value * 1.2 for name, value in model.state_dict().items()}, assign=True)


def _move_data(model: Any) -> None:
    for parameter in tower_of(model).parameters():
        parameter.data = parameter.data * 1.2


def _replace_frequencies(model: Any) -> None:
    rotary = tower_of(model).rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq * 1.5


def _other_layers(model: Any) -> None:
    tower = tower_of(model)
    if hasattr(tower, "fullatt_block_indexes"):
        tower.fullatt_block_indexes = [0]
    elif hasattr(tower, "deepstack_visual_indexes"):
        tower.deepstack_visual_indexes = [1, 3]
    else:
        del tower.blocks[-1]


MOVED, OTHER_SPEC = store.STALE_REASONS["memory"], store.STALE_REASONS["spec"]
CHANGES = {
    "assign": (_assign, {MOVED: 1}),
    "move": (_move_data, {MOVED: 1}),
    "frequencies": (_replace_frequencies, {MOVED: 1}),
    "layers": (_other_layers, {}),  # the tower notices, and closes its graphs
    "double": (lambda model: model.double(), {OTHER_SPEC: 1}),
}


@pytest.mark.parametrize(("change", "reasons"), CHANGES.values(), ids=CHANGES)
def test_what_a_graph_bakes_in_makes_it_stale(on_cpu: Any, model: Any, change: Any, reasons: dict[str, int]) -> None:
    """(Numbers and switches of modules: tests/unit/test_ops.py.)"""
    patch(model)
    grid: Grid = [(1, 6, 8), (1, 12, 12)]
    before = run_tower(tower_of(model), grid)
    change(model)
    found = run_tower(tower_of(model), grid)
    assert status_of(model).captures == 2 and len(status_of(model).graphs) == 1
    assert status_of(model).stale == reasons
    assert all(f"stale      1 x {why}" in str(hf_vit_accel.status(model)) for why in reasons)
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_of(model), grid))
    different = max(relative_error(f, b) for f, b in zip(found, before, strict=True))
    assert found[1].dtype != before[1].dtype or different > 1e-4


@pytest.mark.parametrize("name", ["rotary_pos_emb", "merger"])
def test_any_attribute_of_modules_makes_graphs_stale(on_cpu: Any, model: Any, name: str) -> None:
    patch(model)
    run_tower(tower_of(model), [(1, 6, 8)])
    for captures, value in ((2, 1), (3, 2), (4, torch.zeros(3)), (5, torch.zeros(3))):
        tower_of(model).get_submodule(name).something = value
        run_tower(tower_of(model), [(1, 6, 8)])
        run_tower(tower_of(model), [(1, 6, 8)])
        assert status_of(model).captures == captures


@pytest.mark.parametrize("name", ["blocks.1.attn.qkv", "blocks.1.attn.proj", "blocks.1.norm2", "blocks.1.mlp"])
def test_switches_of_upstream_modules_make_graphs_stale(on_cpu: Any, model: Any, name: str) -> None:
    """Dropout and the like act by attributes; the modules are torch's own, so they are not refused."""
    tower = tower_of(model)
    parent, _, child = name.rpartition(".")
    setattr(tower.get_submodule(parent), child, nn.Sequential(tower.get_submodule(name), nn.Hardtanh(-0.1, 0.1)))
    patch(model)
    before = run_tower(tower, [(1, 6, 8)])
    tower.get_submodule(name)[1].max_val = 0.3
    found = run_tower(tower, [(1, 6, 8)])
    assert status_of(model).captures == 2
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower, [(1, 6, 8)]))
    assert relative_error(found[1], before[1]) > 1e-4


def test_parameters_that_are_not_contiguous_run_eagerly(on_cpu: Any, model: Any) -> None:
    patch(model)
    weight = tower_of(model).blocks[1].attn.proj.weight
    weight.data = weight.data.t().contiguous().t()
    found = run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).eager == {"a parameter is not contiguous": 1}
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_of(model), [(1, 6, 8)]))


def test_weights_that_change_at_every_call_are_not_captured_for_ever(on_cpu: Any, model: Any) -> None:
    patch(model)
    for _ in range(12):
        _move_data(model)
        run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).captures <= 5
    assert status_of(model).eager == {store._CHANGED: 8}
    for _ in range(12):
        run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).replays >= 8


def test_what_a_plan_decides_on_the_host_tells_graphs_apart(on_cpu: Any, model: Any) -> None:
    """Equal shapes and segment counts, but another longest segment."""
    patch(model, GraphConfig(max_tokens=128, exact_after=1))
    grids: list[Grid] = [[(1, 4, 8), (1, 4, 8)], [(1, 4, 12), (1, 4, 4)]]
    for grid in grids:
        run_tower(tower_of(model), grid)
    assert status_of(model).captures == 2


def test_strict_holds_for_replays(on_cpu: Any, model: Any, monkeypatch: Any) -> None:
    """A named backend that cannot serve the call is noticed before anything is replayed."""
    monkeypatch.setattr("hf_vit_accel.api.require", lambda name, **_: None)
    patch(model, attention="torch_varlen", strict=True)
    with pytest.raises(FallbackError, match="torch_varlen cannot serve the call"):
        run_tower(tower_of(model), [(1, 6, 8)])
    patch(model, attention="torch_varlen")
    run_tower(tower_of(model), [(1, 6, 8)])
    status = hf_vit_accel.status(model).towers[0]
    assert status.graphs.replays == 1 and any("torch_varlen cannot serve" in why for why in status.fallbacks)
    assert status.backends["full"] == "sdpa"


def test_what_the_recorder_cannot_do_runs_eagerly(on_cpu: Any, model: Any) -> None:
    patch(model)
    run_tower(tower_of(model), [(1, 6, 8)])
    on_cpu.reason = "torch.compile is tracing the call"
    run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).replays == 1
    assert status_of(model).eager == {"torch.compile is tracing the call": 1}


def test_graphs_that_work_outlive_captures_that_fail(on_cpu: Any, model: Any) -> None:
    patch(model)
    run_tower(tower_of(model), [(1, 6, 8)])
    on_cpu.fail = RuntimeError("out of memory")
    for width in (2, 10, 18, 26):
        run_tower(tower_of(model), [(1, 8, width)])
    assert status_of(model).off and status_of(model).replays == 1
    run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).replays == 2
    on_cpu.fail = None
    _move_data(model)
    run_tower(tower_of(model), [(1, 8, 10)])
    assert status_of(model).replays == 3 and status_of(model).off is None


@pytest.mark.parametrize("why", ["hook", "hidden states"])
def test_calls_that_want_more_go_the_stock_way(on_cpu: Any, model: Any, why: str) -> None:
    tower = tower_of(model)
    expected = run_tower(tower, [(1, 6, 8)])
    patch(model)
    assert_close(run_tower(tower, [(1, 6, 8)]), expected)
    pixels, grid = pixels_for(tower, [(1, 6, 8)]), torch.tensor([(1, 6, 8)])
    if why == "hook":
        seen: list[Any] = []
        handle = tower.blocks[1].register_forward_hook(lambda *_: seen.append(1))
        assert_close(run_tower(tower, [(1, 6, 8)]), expected)
        handle.remove()
        assert seen
    else:
        with torch.no_grad():
            assert tower(pixels, grid_thw=grid, output_hidden_states=True).hidden_states
    status = hf_vit_accel.status(model).towers[0]
    assert status.stock_calls == 1 and len(status.fallbacks) == 1 and status.graphs.replays == 1
    assert_close(run_tower(tower, [(1, 6, 8)]), expected)
    assert status_of(model).replays == 2


def test_gradients_are_no_replays(on_cpu: Any, model: Any) -> None:
    tower, grads = tower_of(model), []
    for patched in (False, True):
        if patched:
            patch(model)
            run_tower(tower, [(1, 6, 8)])
        tower.zero_grad()
        tower(pixels_for(tower, [(1, 6, 8)]), grid_thw=torch.tensor([(1, 6, 8)])).pooler_output.sum().backward()
        grads.append([p.grad.clone() for p in tower.parameters() if p.grad is not None])
    assert_close(grads[1], grads[0], 1e-4)
    status = hf_vit_accel.status(model).towers[0]
    assert status.calls + status.stock_calls == 2 and status.graphs.replays == 1


def test_modules_of_others_run_eagerly(on_cpu: Any, model: Any) -> None:
    """An adapter that is switched off by a flag changes nothing that could be seen from outside."""

    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.factor = inner, 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.factor

    tower = tower_of(model)
    patch(model)
    tower.blocks[0].attn.proj = Adapter(tower.blocks[0].attn.proj)
    for factor in (2.0, 1.0, 0.5):
        tower.blocks[0].attn.proj.factor = factor
        found = run_tower(tower, [(1, 6, 8)])
        with hf_vit_accel.patched(model, fuse=False):
            assert_close(found, run_tower(tower, [(1, 6, 8)]))
    (why,) = status_of(model).eager
    assert "Adapter" in why and status_of(model).eager[why] == 3
    hf_vit_accel.patch(model, cuda_graphs=True, strict=True)
    with pytest.raises(FallbackError, match=r"not replayed from a CUDA graph: .*Adapter"):
        run_tower(tower, [(1, 6, 8)])


def test_a_failed_capture_leaves_the_model_working(on_cpu: Any, model: Any) -> None:
    expected = {grid: run_tower(tower_of(model), [grid]) for grid in ((1, 6, 8), (1, 8, 16), (1, 4, 4), (1, 20, 20))}
    patch(model)
    on_cpu.fail = RuntimeError("out of luck\nand more")
    for _ in range(2):
        for grid, outputs in expected.items():
            assert_close(run_tower(tower_of(model), [grid]), outputs)
    status = status_of(model)
    assert status.replays == status.captures == 0 and "3 captures failed" in (status.off or "")
    assert "capture failed: RuntimeError: out of luck" in status.eager
    on_cpu.fail = None
    hf_vit_accel.patch(model, cuda_graphs=SMALL, strict=True)
    assert_close(run_tower(tower_of(model), [(1, 6, 8)]), expected[1, 6, 8])
    assert status_of(model).replays == 1
    on_cpu.fail = RuntimeError("again")
    with pytest.raises(FallbackError, match="capture failed"):
        run_tower(tower_of(model), [(1, 2, 2)])


def test_backends_that_cannot_be_captured_say_so(monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(tower_module, "why_not_graphs", lambda device: None)
    monkeypatch.setattr(store, "CudaRecorder", Recorder)
    hf_vit_accel.patch(model, cuda_graphs=True)
    run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).eager == {"sdpa cannot be captured: its launches depend on the layout": 1}
    hf_vit_accel.patch(model, cuda_graphs=True, strict=True)
    with pytest.raises(FallbackError, match="sdpa cannot be captured"):
        run_tower(tower_of(model), [(1, 6, 8)])


def test_on_cpu_graphs_are_left_out_and_counted(model: Any) -> None:
    hf_vit_accel.patch(model, cuda_graphs=True)
    run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).eager == {"the tensors are on cpu, CUDA graphs need cuda": 1}


def test_the_least_recently_used_graph_goes(on_cpu: Any, model: Any) -> None:
    graphs = patch(model, GraphConfig(max_tokens=128, exact_after=0, max_graphs=3))
    grids: list[Grid] = [[(1, 2, 2 * tokens)] for tokens in (4, 8, 12, 16, 20, 24)]
    for grid in [*grids, *grids]:
        run_tower(tower_of(model), grid)
    status = status_of(model)
    assert len(status.graphs) == 3 and status.captures == 12
    assert len(graphs._retired) <= 1
    run_tower(tower_of(model), grids[-3])  # the oldest of three becomes the latest used
    run_tower(tower_of(model), [(1, 2, 56)])
    run_tower(tower_of(model), grids[-3])
    assert status_of(model).captures == 13, "the least recently used one went"
    taken = sum(nbytes for _, nbytes, _ in status.graphs)
    assert status.nbytes > 2 * taken, "memory of graphs that went is held for later ones, and is told"


@pytest.mark.parametrize("model", ["qwen3_vl"], indirect=True)
def test_graphs_that_took_too_much_all_go(on_cpu: Any, model: Any) -> None:
    """What they took is one pool's: it is given back as a whole, ever more rarely."""
    on_cpu.nbytes = 1 << 20
    del tower_of(model).blocks[1:]
    patch(model, GraphConfig(max_tokens=128, exact_after=0, max_bytes=5 << 19), strict=True)
    grids: list[Grid] = [[(1, 2, 2 * tokens)] for tokens in (4, 8, 12, 16, 20)]
    expected, emptied = [run_tower(tower_of(copy.deepcopy(model)), grid) for grid in grids], 0
    for _ in range(80):
        for grid, exact in zip(grids, expected, strict=True):
            before = len(status_of(model).graphs)
            assert_close(run_tower(tower_of(model), grid), exact)
            assert status_of(model).nbytes < 4 << 20
            emptied += len(status_of(model).graphs) < before
    status = status_of(model)
    assert emptied == 3 and status.captures == 3 * 4, "after 16, 32 and 64 calls that could not be captured"
    assert [*status.eager] == ["graphs hold as much memory as they may"] and status.replays + sum(
        status.eager.values()
    ) == 400
    assert status.replays > 200


def test_graphs_that_all_go_are_not_those_of_the_call_at_hand(on_cpu: Any, model: Any) -> None:
    """A call of several bins finds the graph of the first, and for another all go: none is replayed that went."""
    on_cpu.nbytes = 1 << 20
    del tower_of(model).blocks[2:]
    patch(model, GraphConfig(max_tokens=64, exact_after=0, max_bytes=1), strict=True)
    first: Grid = [(1, 2, 2 * 64)]
    whole: Grid = [*first, (1, 2, 2 * 8)]
    expected = run_tower(tower_of(copy.deepcopy(model)), whole)
    run_tower(tower_of(model), first)
    for _ in range(60):
        assert_close(run_tower(tower_of(model), whole), expected)
    status = status_of(model)
    assert status.captures == 1 + 2 and len(status.graphs) == 1, "after 16 and 32 calls that could not be captured"


def test_where_no_shape_of_its_own_can_be_held_its_budget_serves(on_cpu: Any, model: Any) -> None:
    patch(model, GraphConfig(max_tokens=128, exact_after=2, max_bytes=1), strict=True)
    for _ in range(4):
        run_tower(tower_of(model), [(1, 6, 8)])
    assert status_of(model).replays == 4 and status_of(model).captures == 1 and not status_of(model).eager


def test_copies_and_pickles_keep_the_settings_only(on_cpu: Any, model: Any) -> None:
    expected = run_tower(tower_of(model), [(1, 6, 8)])
    patch(model)
    run_tower(tower_of(model), [(1, 6, 8)])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        graphs = state_of(tower_of(twin)).runner
        assert graphs.config == SMALL and not graphs._graphs
        with torch.no_grad():
            for parameter in tower_of(twin).parameters():
                parameter.mul_(1.5)
        run_tower(tower_of(twin), [(1, 6, 8)])
    assert_close(run_tower(tower_of(model), [(1, 6, 8)]), expected)


def test_a_deleted_model_is_freed(on_cpu: Any) -> None:
    model = TINY["qwen2_vl"].build()
    on_cpu.record = lambda self, run: (run(), (lambda: None, 0))[1]
    patch(model)
    run_tower(tower_of(model), [(1, 6, 8)])
    seen = weakref.ref(tower_of(model))
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


class Adapted(nn.Module):
    """As an adapter: what it wraps, and more."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora(x)


def _block(tower: Any) -> nn.Module:
    old, tower.blocks[1] = tower.blocks[1], copy.deepcopy(tower.blocks[0])
    return old


def _linear(tower: Any) -> nn.Module:
    attention = tower.blocks[1].attn
    old, attention.proj = attention.proj, copy.deepcopy(attention.proj)
    return old


def _norm(tower: Any) -> nn.Module:
    block = tower.blocks[1]
    old, block.norm1 = block.norm1, copy.deepcopy(block.norm1)
    return old


def _adapter(tower: Any) -> nn.Module:
    """Unloaded: only its base stays."""
    attention = tower.blocks[2].attn
    old, attention.proj = attention.proj, attention.proj.base_layer
    return old.lora


def _parameters(tower: Any) -> nn.Module:
    old, attention = nn.Module(), tower.blocks[1].attn
    old.weight, attention.qkv.weight = attention.qkv.weight, nn.Parameter(attention.qkv.weight.detach().clone())
    return old


@pytest.mark.parametrize("trains", [False, True], ids=["", "trains"])
@pytest.mark.parametrize("replace", [_block, _linear, _norm, _adapter, _parameters])
def test_what_was_replaced_is_freed_by_the_next_call(
    on_cpu: Any, references: Any, model: Any, replace: Callable[[Any], nn.Module], trains: bool
) -> None:
    """Routes, graphs and features held to serve later calls are made of the modules that were there."""
    tower, grid = tower_of(model).requires_grad_(trains), [(1, 4, 6), (1, 2, 2)]
    if replace is _adapter:
        tower.blocks[2].attn.proj = Adapted(tower.blocks[2].attn.proj).requires_grad_(trains)
    config = GraphConfig(max_tokens=128, exact_after=1)
    hf_vit_accel.patch(model, cuda_graphs=config, reuse=hf_vit_accel.ReuseConfig(across_calls=True))

    def call() -> None:
        made = outputs_of(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)))
        if trains:
            torch.stack([each.square().mean() for each in made]).sum().backward()
            tower.zero_grad(set_to_none=True)

    for _ in range(3):
        call()
    state = state_of(tower)
    assert (state.training if trains else state.runner).status().captures == (replace is not _adapter)
    gone = [weakref.ref(each) for each in replace(tower).parameters()]
    call()
    gc.collect()
    assert gone and not any(each() is not None for each in gone)


def test_a_weight_that_turns_into_a_buffer_is_watched(on_cpu: Any) -> None:
    """At the place where it is then: by features that are kept, and by graphs."""
    model = TINY["qwen3_vl"].build()
    tower, grid = tower_of(model), [(1, 4, 6)]
    hf_vit_accel.patch(model, cuda_graphs=SMALL, reuse=hf_vit_accel.ReuseConfig(across_calls=True))
    run_tower(tower, grid)
    attention = tower.blocks[1].attn.proj
    weight = attention._parameters.pop("weight").detach()
    for scale in (1.0, 2.0):
        attention.register_buffer("weight", weight * scale)
        run_tower(tower, grid)
        attention.weight.mul_(1.5)
        found, captures = run_tower(tower, grid), status_of(model).captures
    assert captures == 3, "as it lay elsewhere twice"
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower, grid))


def test_inference_mode_does_not_spoil_the_buffers(on_cpu: Any, model: Any) -> None:
    tower = tower_of(model)
    expected = run_tower(tower, [(1, 6, 8)])
    patch(model)
    pixels, grid = pixels_for(tower, [(1, 6, 8)]), torch.tensor([(1, 6, 8)])
    with torch.inference_mode():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)
    assert_close(run_tower(tower, [(1, 6, 8)]), expected)
    with torch.inference_mode():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)
    assert status_of(model).captures == 1


def test_threads_get_their_own_answers(on_cpu: Any, model: Any) -> None:
    tower = tower_of(model)
    rng = np.random.default_rng(1)
    grids = [draw_grid(rng, 40) for _ in range(12)]
    expected = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
    patch(model)
    wrong: list[Any] = []

    def work(start: int) -> None:
        for seed in [*range(start, 12), *range(start)]:
            try:
                assert_close(run_tower(tower, grids[seed], seed), expected[seed])
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_warmup_captures_every_budget(on_cpu: Any, capsys: Any) -> None:
    model = TINY["qwen2_5_vl"].build()  # the family with most to capture: windows
    patch(model)
    status = hf_vit_accel.warmup(model, progress=False).towers[0].graphs
    assert status is not None and status.captures == len(status.budgets) == len(status.graphs)
    for grid in ([(1, 6, 8)], [(1, 4, 18)], [(2, 8, 8)]):
        run_tower(tower_of(model), grid)
    assert not any("exactly" in label for label, _, _ in status_of(model).graphs)
    for _ in range(3):
        hf_vit_accel.warmup(model, progress=False)
    assert status_of(model).captures == status.captures, "nothing is left to capture for images of a few frames"
    hf_vit_accel.patch(model, cuda_graphs=GraphConfig(max_tokens=64, exact_after=0))
    with pytest.raises(ValueError, match="expected sizes as a list of calls"):
        hf_vit_accel.warmup(model, [(1, 6, 8)])  # type: ignore[list-item]
    status = hf_vit_accel.warmup(model, [[(1, 6, 8)], ((1, 40, 40), (1, 2, 2))]).towers[0].graphs
    assert status is not None
    assert sum("exactly" in label for label, _, _ in status.graphs) == 2
    assert "1604 patches exactly" in "".join(capsys.readouterr())


def test_warmup_wants_graphs_or_sizes() -> None:
    model = TINY["qwen2_vl"].build()
    with pytest.raises(ValueError, match="expected a model patched"):
        hf_vit_accel.warmup(model, [GRIDS["images"]])
    with pytest.raises(ValueError, match="patched with cuda_graphs, or sizes"):
        hf_vit_accel.warmup(hf_vit_accel.patch(model))
    assert hf_vit_accel.warmup(model, [GRIDS["images"]], progress=False).towers[0].calls == 1
    with pytest.raises(ValueError, match="expected sizes as a list of calls"):
        hf_vit_accel.warmup(model, [[(1, -2, 8)]])


# --- on a GPU -------------------------------------------------------------------------------------------------------

CAPTURABLE = [backend.name for backend in ORDER if backend.capturable]


def usable(attention: str) -> str:
    if reasons := backends.backend_named(attention).reasons_against_machine():
        pytest.skip("; ".join(reasons))
    return attention


def poison(graphs: Any) -> None:
    for buffer in graphs._arena:
        buffer.fill_(float("nan"))
    for graph in graphs._graphs.values():
        graph.packed.fill_(251)
        graph.pixels_TP.fill_(float("nan"))
        for output in graph.outputs:
            output.fill_(float("nan"))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", CAPTURABLE)
def test_gpu_a_stream_of_layouts(model: Any, attention: str) -> None:
    """Bit-equal to the eager fused tower at exact shapes, as exact as stock at padded ones."""
    tower = tower_of(model.to("cuda", torch.bfloat16))
    exact = copy.deepcopy(tower).float()
    rng = np.random.default_rng(0)
    grids = [draw_grid(rng) for _ in range(20)]
    grids += [[(1, 4, 12), (1, 4, 4)], [(1, 8, 8)], [(4, 4, 4)], [(1, 2, 32)], [(2, 4, 8)]] + [[(1, 40, 42)]] * 3
    hf_vit_accel.patch(tower, attention=usable(attention))
    eager = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
    for exact_after in (0, 1):
        config = GraphConfig(max_tokens=128, exact_after=exact_after, max_graphs=20)
        hf_vit_accel.patch(tower, attention=attention, cuda_graphs=config, strict=True)
        graphs, found = state_of(tower).runner, []
        for seed, grid in enumerate(grids):
            poison(graphs)
            found.append(run_tower(tower, grid, seed))
        for seed, (outputs, expected) in enumerate(zip(found, eager, strict=True)):
            if exact_after:
                assert all(map(torch.equal, outputs, expected)), grids[seed]
                continue
            pixels = pixels_for(tower, grids[seed], seed, device="cuda", dtype=torch.bfloat16).float()
            with torch.no_grad():
                truth = outputs_of(exact(pixels, grid_thw=torch.tensor(grids[seed], device="cuda")))
            for one, other, true in zip(outputs, expected, truth, strict=True):
                bound = max(1.2 * relative_error(other, true), torch.finfo(torch.bfloat16).eps)
                assert relative_error(one, true) <= bound, grids[seed]
        assert status_of(tower).replays >= len(grids) - 3 * (not exact_after)


@pytest.mark.gpu
def test_gpu_weights_and_memory(model: Any) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    grid: Grid = [(1, 6, 8), (1, 12, 12)]
    hf_vit_accel.patch(tower)
    run_tower(tower, grid)  # libraries take their own workspaces
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    hf_vit_accel.patch(tower, cuda_graphs=SMALL, strict=True)
    run_tower(tower, grid)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.1)
    found = run_tower(tower, grid)
    assert status_of(tower).captures == 1
    for parameter in tower.parameters():
        parameter.data = parameter.data * 1.1
    moved = run_tower(tower, grid)
    assert status_of(tower).captures == 2
    hf_vit_accel.patch(tower)
    assert_close(run_tower(tower, grid), moved, 2e-2)
    assert relative_error(found[1], moved[1]) > 2e-2
    hf_vit_accel.unpatch(tower)
    del found, moved
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


@pytest.mark.gpu
def test_gpu_streams_and_threads(model: Any) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    rng = np.random.default_rng(1)
    grids = [draw_grid(rng, 60) for _ in range(10)]
    hf_vit_accel.patch(tower, cuda_graphs=GraphConfig(max_tokens=64, exact_after=0), strict=True)
    expected = [run_tower(tower, grid, seed) for seed, grid in enumerate(grids)]
    inputs = [pixels_for(tower, grid, seed, device="cuda", dtype=torch.bfloat16) for seed, grid in enumerate(grids)]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def work(offset: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                outputs = []
                for seed in [*range(offset, 10), *range(offset)] * 5:
                    outputs.append((seed, outputs_of(tower(inputs[seed], grid_thw=torch.tensor(grids[seed])))))
                torch.cuda.current_stream().synchronize()
            for seed, found in outputs:
                assert all(map(torch.equal, found, expected[seed])), seed
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 4, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@pytest.mark.gpu
def test_gpu_a_failed_capture_leaves_the_model_working(model: Any, monkeypatch: Any) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    hf_vit_accel.patch(tower, attention="torch_varlen")  # of auto's, some serve no graph
    expected = run_tower(tower, [(1, 6, 8)])
    hf_vit_accel.patch(tower, attention="torch_varlen", cuda_graphs=SMALL)
    encode = runner.encode

    def waits(*args: Any) -> Any:
        outputs = encode(*args)
        outputs[0].sum().item()  # not allowed while a stream is captured
        return outputs

    monkeypatch.setattr(runner, "encode", waits)
    assert_close(run_tower(tower, [(1, 6, 8)]), expected)
    monkeypatch.setattr(runner, "encode", encode)
    (why,) = status_of(tower).eager
    assert "capture failed" in why
    assert_close(run_tower(tower, [(1, 6, 8)]), expected)
    assert_close(run_tower(tower, [(1, 8, 16)]), run_tower(tower, [(1, 8, 16)]))
    assert status_of(tower).replays == 2, "other shapes are captured"


@pytest.mark.gpu
def test_gpu_a_replay_waits_for_nothing(model: Any) -> None:
    tower = tower_of(model.to("cuda", torch.bfloat16))
    hf_vit_accel.patch(tower, cuda_graphs=SMALL, strict=True)
    pixels = pixels_for(tower, [(1, 6, 8)], device="cuda", dtype=torch.bfloat16)
    on_gpu, on_cpu = torch.tensor([(1, 6, 8)], device="cuda"), torch.tensor([(1, 6, 8)])
    with torch.no_grad():
        tower(pixels, grid_thw=on_cpu)
        torch.cuda.set_sync_debug_mode("error")
        try:
            tower(pixels, grid_thw=on_cpu)
            with pytest.raises(RuntimeError, match="synchronizing"):
                tower(pixels, grid_thw=on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
