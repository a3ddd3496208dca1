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
from hf_vit_accel.layout import Geometry, build


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
