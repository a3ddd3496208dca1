"""Sizes of graphs: the ladder of budgets, the packing of images, the padding of layouts, and the settings' checks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TINY

import hf_vit_accel
from hf_vit_accel import GraphConfig
from hf_vit_accel.graphs import budgets
from hf_vit_accel.graphs.buffers import pad, pad_segments
from hf_vit_accel.layout import Geometry, Segments, build


@pytest.mark.parametrize("largest", [1, 4, 5, 64, 1280, 4096])
def test_the_ladder_pads_little(largest: int) -> None:
    steps = budgets.ladder(largest)
    assert steps[-1] == largest and list(steps) == sorted(set(steps))
    tokens = np.arange(16, largest + 1)
    if len(tokens):
        padded = np.array(steps)[np.searchsorted(steps, tokens)]
        assert (padded / tokens).max() < 1.25 and (padded / tokens).mean() < 1.12
        assert (padded - tokens)[tokens > 512].max(initial=0) < 64


ITEMS = st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))


@given(st.lists(ITEMS, min_size=1, max_size=6), st.integers(1, 5))
def test_the_bound_on_windows_is_never_exceeded_and_reached(items: list[tuple[int, int, int]], side: int) -> None:
    grid = tuple((t, 2 * h, 2 * w) for t, h, w in items)
    metadata = build(grid, Geometry(merge=2, window=side))
    assert metadata.window is not None
    assert metadata.window.count <= budgets.most_windows(metadata.merged, metadata.full.count, side)
    thin = build(tuple((1, 2, 2 * (side * k + 1)) for k in range(1, 5)), Geometry(merge=2, window=side))
    assert thin.window is not None
    assert thin.window.count == budgets.most_windows(thin.merged, 4, side)


@given(st.lists(ITEMS, min_size=1, max_size=6), st.integers(0, 200), st.integers(1, 3), st.sampled_from([None, 2, 4]))
def test_padded_layouts_keep_the_real_part(
    items: list[tuple[int, int, int]], spare: int, spare_segments: int, side: int | None
) -> None:
    grid = tuple((t, 2 * h, 2 * w) for t, h, w in items)
    geometry = Geometry(merge=2, window=side, table=None if side else 6)
    plain = build(grid, geometry)
    tokens = plain.merged + spare
    segments = plain.full.count + spare_segments
    padded = pad(plain, geometry, tokens, segments, max_seqlen=4 * tokens)
    assert padded.rows == padded.full.rows == 4 * tokens and padded.full.count == segments
    assert (padded.full.lengths_S[: plain.full.count] == plain.full.lengths_S).all()
    assert (np.diff(padded.full.cu_seqlens_S1) >= 0).all() and padded.full.max_seqlen == 4 * tokens
    for name, array in padded.arrays().items():
        real = plain.arrays()[name]
        assert array.dtype == real.dtype and (array[: len(real)] == real).all(), name
    if side:
        assert padded.window is not None and padded.window.rows == 4 * tokens
        assert padded.window.lengths_S.max() <= 4 * side**2 and padded.window.count == budgets.most_windows(
            tokens, segments, side
        )
        assert (np.sort(padded.window_index_M) == np.arange(tokens)).all()
        assert (padded.window_index_M[padded.inverse_index_M] == np.arange(tokens)).all()
        assert (padded.window_index_M[plain.merged :] == np.arange(plain.merged, tokens)).all()


def test_spare_rows_need_a_segment_of_their_own() -> None:
    with pytest.raises(AssertionError):
        pad_segments(Segments(np.array([4], np.int32)), 8, 1, 8)
    assert pad_segments(Segments(np.array([4], np.int32)), 4, 3, 8).lengths_S.tolist() == [4, 0, 0]
    spread = pad_segments(Segments(np.array([4], np.int32)), 4 + 200, 9, 500).lengths_S
    assert spread.tolist() == [4, 50, 50, 50, 50, 0, 0, 0, 0]


@given(st.lists(ITEMS, min_size=1, max_size=40), st.integers(20, 1600))
def test_packing_loses_no_image(items: list[tuple[int, int, int]], largest: int) -> None:
    grid = tuple((t, 2 * h, 2 * w) for t, h, w in items)
    tokens = [t * h * w for t, h, w in items]
    bins = budgets.pack(grid, 2, budgets.ladder(largest))
    if isinstance(bins, str):
        assert max(tokens) > largest and "exceeds the largest budget" in bins
        return
    assert [b.first for b in bins] == [0, *(b.last for b in bins[:-1])] and bins[-1].last == len(grid)
    for b in bins:
        assert b.tokens == sum(tokens[b.first : b.last])
        assert sum(t for t, _, _ in items[b.first : b.last]) < budgets.FRAMES
        assert b.budget is not None and b.tokens <= b.budget <= largest
        assert all(smaller < b.tokens for smaller in budgets.ladder(largest) if smaller < b.budget)


def test_packing_limits_frames() -> None:
    bins = budgets.pack(((100, 2, 2),) * 5, 2, (1280,))
    assert [(b.first, b.last) for b in bins] == [(0, 2), (2, 4), (4, 5)]  # type: ignore[union-attr]
    assert "a video exceeds the 255 frames" in budgets.pack(((400, 2, 2),), 2, (1280,))


def test_much_padding_does_not_pay() -> None:
    def one(tokens: int, budget: int) -> budgets.Bin:
        return budgets.Bin(first=0, last=1, tokens=tokens, budget=budget)

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
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected "):
        GraphConfig(**wrong)


def test_patch_refuses_anything_but_a_config() -> None:
    with pytest.raises(ValueError, match="expected cuda_graphs to be"):
        hf_vit_accel.patch(TINY["qwen3_vl"].build(), cuda_graphs=3)  # type: ignore[arg-type]
