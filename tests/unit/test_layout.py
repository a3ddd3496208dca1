"""Compare every array with transformers' own functions, over random grids; test the packed copy and the cache."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.versions import vision_function

from hf_vit_accel.layout import Geometry, build, to_device

MERGE = 2
SIZES = st.one_of(st.integers(1, 12), st.integers(1, 60), st.sampled_from([1, 4, 8, 16, 100]))
ENTRY = st.tuples(st.sampled_from([1, 1, 1, 2, 3, 8]), SIZES, SIZES).map(
    lambda e: (e[0], MERGE * e[1], MERGE * (e[2] if e[1] < 30 else min(e[2], 12)))
)
GRIDS = st.lists(ENTRY, min_size=1, max_size=40).filter(lambda grid: sum(t * h * w for t, h, w in grid) < 60_000)

EXTREME = [
    [(1, 2, 2)],
    [(1, 2, 400)],
    [(1, 400, 2)],
    [(1, 8, 8)],
    [(1, 10, 10), (1, 8, 8), (1, 6, 14)],
    [(16, 2, 2)],
    [(1, 2, 2)] * 40,
    [(3, 16, 8), (1, 200, 4), (2, 10, 22)],
]


def examples(test):
    for grid in EXTREME:
        test = example(grid=grid)(test)
    return test


@examples
@given(grid=GRIDS)
def test_segments_and_positions(grid) -> None:
    metadata = build(tuple(grid), Geometry(merge=MERGE))
    grid_thw = torch.tensor(grid)
    offsets = vision_function("get_vision_cu_seqlens")(grid_thw)
    assert torch.equal(torch.from_numpy(metadata.full.cu_seqlens_S1), offsets) and offsets.dtype == torch.int32
    assert metadata.full.cu_seqlens_S1.dtype == np.int32
    assert metadata.full.max_seqlen == int((offsets[1:] - offsets[:-1]).max())
    assert (metadata.full.count, metadata.full.rows) == (len(offsets) - 1, int(offsets[-1]))
    positions = vision_function("get_vision_position_ids")(grid_thw, MERGE)
    assert torch.equal(torch.from_numpy(metadata.of_rows["position_ids"]).long(), positions)
    assert (metadata.rows, metadata.merged) == (len(positions), len(positions) // MERGE**2)
    assert metadata.window is None
    assert set(metadata.arrays()) == {"cu_seqlens", "position_ids"}


@examples
@given(grid=GRIDS)
@pytest.mark.parametrize(("window_size", "patch"), [(112, 14), (32, 4), (24, 4)])
def test_windows(grid, window_size, patch) -> None:
    metadata = build(tuple(grid), Geometry(merge=MERGE, window=window_size // MERGE // patch))
    index, offsets = vision_function("get_vision_window_index")(torch.tensor(grid), MERGE, window_size, patch)
    assert torch.equal(torch.from_numpy(metadata.of_tokens["window_index"]), index)
    assert torch.equal(torch.from_numpy(metadata.of_tokens["inverse_index"]), torch.argsort(index))
    assert torch.equal(torch.from_numpy(metadata.window.cu_seqlens_S1), offsets)
    assert metadata.window.max_seqlen == int((offsets[1:] - offsets[:-1]).max())
    assert set(metadata.segments()) == {"full", "window"}


@examples
@given(grid=GRIDS)
@pytest.mark.parametrize(
    ("merge", "side", "taps", "align_corners"),
    [(MERGE, 48, 2, True), (MERGE, 1, 2, True), (1, 7, 2, False), (1, 7, 4, True), (1, 7, 4, False)],
)
def test_interpolation(grid, merge, side, taps, align_corners) -> None:
    geometry = Geometry(merge=merge, table=side, taps=taps, align_corners=align_corners, clips=True)
    metadata = build(tuple(grid), geometry)
    mode = "bilinear" if taps == 2 else "bicubic"
    indices, weights = vision_function("get_vision_interpolation_indices_and_weights")(
        torch.tensor(grid), side, mode=mode, align_corners=align_corners, spatial_merge_size=merge
    )
    assert torch.equal(torch.from_numpy(metadata.of_rows["interp_indices"]).long(), indices)
    assert torch.equal(torch.from_numpy(metadata.of_rows["interp_weights"]), weights), "bit for bit"
    offsets = vision_function("get_vision_cu_seqlens")(torch.tensor(grid), merge_temporal=True)
    assert torch.equal(torch.from_numpy(metadata.full.cu_seqlens_S1), offsets)


def test_the_packed_copy_is_one_buffer_and_exact() -> None:
    arrays = build(((2, 6, 10), (1, 2, 2)), Geometry(merge=MERGE, window=2, table=6)).arrays()
    arrays["empty"] = np.zeros((0, 3), dtype=np.int32)
    arrays["strided"] = np.arange(20, dtype=np.int64).reshape(4, 5)[:, 1:3]
    tensors = to_device(arrays, torch.device("cpu"))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape and np.array_equal(tensors[name].numpy(), array)
        assert tensors[name].numpy().dtype == array.dtype and tensors[name].data_ptr() % 16 == 0
