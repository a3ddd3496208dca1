"""The matrix of ways to wrap a model: each is patched before and after, used, and unpatched, in every family.

By default one cell of each row runs, another family from row to row, and no slow row; `--matrix` runs all cells.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import BEFORE, ELSEWHERE, ROWS, Row, why_not_here
from support.tensors import Output, flat
from tiny import FAMILIES, GRIDS, TINY, assert_close, pixels_for, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.tower.forward import AcceleratedForward
from hf_vit_accel.tower.state import state_of


def cells() -> Iterator[Any]:
    """Yield every row in every order and family; all cells but one of each row that is not slow are marked."""
    for index, row in enumerate(ROWS):
        default_order = row.orders[index // len(FAMILIES) % len(row.orders)]
        default_family = FAMILIES[index % len(FAMILIES)]
        for order in row.orders:
            for family in FAMILIES:
                is_default = (order, family) == (default_order, default_family) and not row.slow
                marks = [] if is_default else [pytest.mark.matrix]
                yield pytest.param(row, order, family, id=f"{row.name}, {order}, {family}", marks=marks)


@pytest.mark.parametrize(("row", "order", "family"), list(cells()))
def test_cell(row: Row, order: str, family: str) -> None:
    reason = why_not_here(row)
    if reason:
        pytest.skip(reason)
    model = TINY[family].build()
    with ExitStack() as stack:
        stock = row.wrap(TINY[family].build(), stack)
        expected = row.use(stock)
        attention = tower_of(stock).config._attn_implementation
    with ExitStack() as stack:
        if order == BEFORE:
            model = row.wrap(model, stack)
            assert hf_vit_accel.patch(model) is model
        else:
            model = row.wrap(hf_vit_accel.patch(model), stack)
        for _ in range(2):
            assert_close(row.use(model), expected, row.bound)
        check_status(model, row)
        assert hf_vit_accel.unpatch(model) is model
        check_unpatched(model, attention)
        assert_close(row.use(model), expected, 0.0 if row.exact else row.bound)


def check_status(model: nn.Module, row: Row) -> None:
    """Compare what `status` says of the model's calls with the row: no reason is missing, none is added."""
    [status] = hf_vit_accel.status(model).towers
    outcomes = {"fast": status.calls > 0, "stock": status.stock_calls > 0, "unpatched": not status.patched}
    assert [name for name, happened in outcomes.items() if happened] == [row.outcome], str(status)
    for fallback in status.fallbacks:
        assert any(reason in fallback for reason in row.reasons), str(status)
    for reason in row.reasons:
        assert any(reason in fallback for fallback in status.fallbacks), str(status)
    if not status.calls:
        return
    if row.unfused:
        assert row.unfused in status.unfused["patch_embed"]
    else:
        assert "patch_embed" in status.fused


def check_unpatched(model: nn.Module, attention: str) -> None:
    """Check that nothing of ours is left on the tower, and that its attention has its former name."""
    tower = tower_of(model)
    assert state_of(tower) is None
    assert tower.config._attn_implementation == attention
    assert not any(isinstance(value, AcceleratedForward) for value in vars(tower).values())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_ways_tested_elsewhere_are(name: str) -> None:
    _, place = ELSEWHERE[name]
    file, _, test = place.partition("::")
    assert f"\ndef {test}(" in (Path(__file__).parents[1] / file).read_text()


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(family, backend, marks=[pytest.mark.matrix] * ((family, backend) != ("qwen2_5_vl", "eager")))
        for family in FAMILIES
        for backend in ("eager", "aot_eager")
    ],
)
def test_compiled_towers_are_one_call_for_every_layout(family: str, backend: str) -> None:
    """torch.compile meets one opaque call: no graph breaks inside the tower, nothing compiled anew for new layouts."""
    from torch._dynamo.utils import counters

    model = TINY[family].build()
    tower = tower_of(model)
    # Several rows each: torch compiles anew for the size of 1.
    grids = [GRIDS["images"], GRIDS["mixed"], [(2, 4, 4)] * 3]
    grids += [[(1, 4, 2 * width), (1, 8, 8)] for width in (3, 4)]

    def run(call: Callable[..., Output]) -> list[list[torch.Tensor]]:
        with torch.no_grad():
            return [flat(call(pixels_for(tower, grid), grid_thw=torch.tensor(grid))) for grid in grids]

    def features(pixels: torch.Tensor, grid_thw: torch.Tensor) -> Output:
        output = tower(pixels * 1.0, grid_thw=grid_thw)
        if hasattr(output, "pooler_output"):
            output.pooler_output = output.pooler_output * 1.0
        return output

    expected = run(tower)
    hf_vit_accel.patch(model, strict=True)
    try:
        for call, graphs in ((tower, 0), (features, 2)):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(call, backend=backend, dynamic=True)
            for outputs, stock_outputs in zip(run(compiled), expected, strict=True):
                assert_close(outputs, stock_outputs)
            assert counters["stats"].get("unique_graphs", 0) == graphs, counters
            assert sum(counters["graph_break"].values()) == bool(graphs), counters
        with pytest.raises(torch._dynamo.exc.Unsupported, match="the layout is decided on the host"):
            torch.compile(features, backend=backend, fullgraph=True)(
                pixels_for(tower, grids[0]), torch.tensor(grids[0])
            )
    finally:
        torch._dynamo.reset()
    assert state_of(tower).fast_calls == 2 * len(grids)
