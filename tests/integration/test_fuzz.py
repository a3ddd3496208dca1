"""Inputs of every kind give stock's outputs or a documented error, and leave the next good call right.

Seeds are fixed, so that every run tries the same inputs.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.towers import ONE_TOWER
from tiny import GRIDS, TINY, assert_close, outputs_of, run_tower, tower_of
from torch import nn

import hf_vit_accel

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")


@pytest.fixture(scope="module", params=ONE_TOWER)
def stock(request: pytest.FixtureRequest) -> nn.Module:
    return tower_of(TINY[request.param].build())


@pytest.fixture(scope="module")
def patched(stock: nn.Module) -> nn.Module:
    """Build a patched tower that shares the parameters of the stock one."""
    twin = type(stock)(type(stock.config)(**stock.config.to_dict())).eval()
    twin.load_state_dict(stock.state_dict(), assign=True)
    return hf_vit_accel.patch(twin)


# --- bad input --------------------------------------------------------------------------------------------------------


Inputs = tuple[Any, Any]
"""Pixels and grid of a call, of any type."""


def outcome(tower: nn.Module, inputs: Inputs) -> list[torch.Tensor] | Exception:
    """Call a tower; return its outputs, or the error that it raises."""
    try:
        with torch.no_grad():
            return outputs_of(tower(inputs[0], grid_thw=inputs[1]))
    except Exception as error:
        return error


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.complex64, torch.bool, torch.int16, torch.int64]


KINDS: list[Callable[[torch.Tensor], object]] = [
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
GRID_KINDS: list[Callable[[torch.Tensor], object]] = [
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
LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x,
    lambda x: x.t().contiguous().t(),
    lambda x: x.repeat_interleave(2, 0)[::2],
    lambda x: x.repeat_interleave(2, 1)[:, ::2],
    lambda x: x[:1].expand_as(x),
    lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
]
"""Most give the same values with other strides; one repeats the first row."""


@st.composite
def inputs(draw: st.DrawFn, width: int) -> Inputs:
    """Draw pixels and a grid with any number of things wrong; nothing is wrong in half of them."""
    size = st.integers(1, 5)
    entries = draw(st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), size, size), min_size=1, max_size=4))
    grid = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in entries])
    rows = int(grid.prod(1).sum())
    kinds = ["rows", "columns", "grid", "entries", "padding", "shape", "dtype", "device", "kind"]
    wrong = draw(st.sets(st.sampled_from(kinds)))
    if draw(st.booleans()):
        wrong = set()
    if "grid" in wrong:
        value = st.sampled_from([0, -1, -2, 1, 3, 7, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63)])
        for _ in range(draw(st.integers(1, 3))):
            grid[draw(st.integers(0, len(grid) - 1)), draw(st.integers(0, 2))] = draw(value)
        grid[grid[:, 0] == 0] %= 64  # stock computes positions even where there is no frame: keep them few
    if "entries" in wrong:
        grid = draw(st.sampled_from([grid[:0], torch.cat([grid, grid[:1]]), grid[1:]]))
    rows = draw(st.sampled_from([0, 1, rows - 1, rows + 1, rows + 4, 2 * rows])) if "rows" in wrong else rows
    widths = [0, 1, width - 1, width + 1, 2 * width, width // 2] if "columns" in wrong else [width]
    columns = draw(st.sampled_from(widths))
    pixels = torch.randn(max(rows, 0), columns, generator=torch.Generator().manual_seed(rows + columns))
    pixels = draw(st.sampled_from(LAYOUTS))(pixels)
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
        pixels = draw(st.sampled_from(KINDS))(pixels)
        grid = draw(st.sampled_from(GRID_KINDS))(grid)
    return pixels, grid


DOCUMENTED = re.compile(r"expected .*(got|found) .*; .|^expected at least one image.*; .", re.S)
"""The form of our errors: the expectation, the value and, after the semicolon, the fix."""


def check(stock: nn.Module, patched: nn.Module, tried: Inputs) -> str:
    """Call both towers; check for equal outputs or a documented error.

    Returns:
        "served", "refused" by us, or "as stock" for stock's own error.
    """
    result = outcome(patched, tried)
    expected = outcome(stock, tried)
    if isinstance(expected, Exception) and not isinstance(result, Exception):  # stock takes fewer dtypes
        expected = outcome(stock, (tried[0].float(), tried[1].long()))
    if isinstance(result, Exception):
        documented = type(result) is ValueError and DOCUMENTED.match(str(result))
        # Stock broadcasts a single row over all positions of its table, though no image has fewer than merge ** 2.
        is_single_row = documented and re.search(r"rows of pixel values for .*, got 1;", str(result))
        assert isinstance(expected, Exception) or is_single_row, (tried, result)
        assert documented or type(result) is type(expected), (tried, result, expected)
        return "refused" if documented else "as stock"
    assert not isinstance(expected, Exception), (tried, expected)
    assert_close(result, expected, 1e-5)
    return "served"


def test_any_input_is_served_or_refused(stock: nn.Module, patched: nn.Module) -> None:
    assert stock.patch_embed.proj.weight[0].numel() == 96
    counts: Counter[str] = Counter()

    @given(tried=inputs(96))
    @settings(settings.get_profile("same"), max_examples=60)
    def try_inputs(tried: Inputs) -> None:
        result = check(stock, patched, tried)
        counts[result] += 1
        if result != "served":
            good_grid = GRIDS["smallest"]
            assert_close(run_tower(patched, good_grid), run_tower(stock, good_grid))

    try_inputs()
    assert counts["served"] > 15 and counts["refused"] > 15, counts


@pytest.mark.parametrize(
    ("pixels", "grid", "result"),
    [
        (torch.zeros(1, 4, 96, device="meta"), torch.tensor([1, 2, 2]), "as stock"),
        (torch.zeros(1, 0, 0), torch.tensor([[1, 2, 2]], device="meta"), "as stock"),
        (torch.zeros(4, 96), torch.tensor([[1, 2, 2], [0, 4, 5]]), "refused"),
    ],
    ids=["pixels on meta", "grid on meta", "a row of no frames that cannot be merged"],
)
def test_what_stock_refuses(stock: nn.Module, patched: nn.Module, pixels: Any, grid: Any, result: str) -> None:
    assert check(stock, patched, (pixels, grid)) == result
