"""The matrix of ways to wrap a model: each is patched before and after, used, and unpatched, in every family.

By default one cell of each row runs, another family from row to row, and none of a few slow rows; `--matrix` runs all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import ELSEWHERE, FAMILIES, ORDERS, ROWS, Row, answers_and_features, flat, missing
from tiny import GRIDS, TINY, assert_close, pixels_for
from torch.utils.checkpoint import checkpoint

import hf_vit_accel
from hf_vit_accel.families import find_towers
from hf_vit_accel.tower.forward import AcceleratedForward
from hf_vit_accel.tower.state import state_of


def cells() -> Iterator[Any]:
    """Every row in every order and family; all but one of each row that is not slow are marked."""
    for index, row in enumerate(ROWS):
        kept = row.orders[index // len(FAMILIES) % len(row.orders)], FAMILIES[index % len(FAMILIES)]
        for order in row.orders:
            for family in FAMILIES:
                marks = [] if (order, family) == kept and not row.slow else [pytest.mark.matrix]
                yield pytest.param(row, order, family, id=f"{row.name}, {order}, {family}", marks=marks)


@pytest.mark.parametrize(("row", "order", "family"), list(cells()))
def test_cell(row: Row, order: str, family: str) -> None:
    if why := missing(row):
        pytest.skip(why)
    use = row.use or answers_and_features
    stock, model = (row.build(family) if row.build else TINY[family].build() for _ in range(2))
    with ExitStack() as stack:
        wrapped = row.wrap(stock, stack)
        expected = use(wrapped)
        name = tower_of(wrapped).config._attn_implementation
    with ExitStack() as stack:
        if order == ORDERS[0]:
            model = row.wrap(model, stack)
            assert hf_vit_accel.patch(model) is model
        else:
            model = row.wrap(hf_vit_accel.patch(model), stack)
        for _ in range(2):
            assert_close(use(model), expected, row.bound)
        check_status(model, row)
        assert hf_vit_accel.unpatch(model) is model
        tower = tower_of(model)
        assert state_of(tower) is None and tower.config._attn_implementation == name
        assert not any(isinstance(value, AcceleratedForward) for value in vars(tower).values())
        assert_close(use(model), expected, 0.0 if row.exact else row.bound)


def tower_of(model: Any) -> Any:
    """The one tower, whatever is wrapped around it."""
    [(_, tower, _)] = find_towers(model)
    return tower


def check_status(model: Any, row: Row) -> None:
    """What status says of the model's calls is what the row declares, no less and no more."""
    [status] = hf_vit_accel.status(model).towers
    ways = {"fast": status.calls > 0, "stock": status.stock_calls > 0, "unpatched": not status.patched}
    assert [way for way, gone in ways.items() if gone] == [row.outcome], str(status)
    assert all(any(reason in found for reason in row.reasons) for found in status.fallbacks), str(status)
    assert all(any(reason in found for found in status.fallbacks) for reason in row.reasons), str(status)
    if status.calls:
        assert row.unfused in status.unfused["patch_embed"] if row.unfused else "patch_embed" in status.fused


def test_rows_are_told_apart() -> None:
    assert len({(row.name, order) for row in ROWS for order in row.orders}) == sum(len(row.orders) for row in ROWS)
    for row in ROWS:
        assert row.outcome in ("fast", "stock", "unpatched")
        assert bool(row.reasons) == (row.outcome == "stock"), row.name


@pytest.mark.parametrize("name", ELSEWHERE)
def test_ways_tested_elsewhere_are(name: str) -> None:
    file, _, test = ELSEWHERE[name][1].partition("::")
    assert f"\ndef {test}(" in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_follows_a_frozen_tower_is_trained_under_checkpointing(family: str, reentrant: bool) -> None:
    """Where stock's features require gradients although the tower is frozen, those of the fast path do, too.

    (A hook on its patch embedding makes them so, which Qwen3-VL's tower does not get.)
    """
    found = []
    for patched in (False, True):
        model = TINY[family].build()
        tower, grid = tower_of(model).requires_grad_(False), GRIDS["mixed"]
        model.enable_input_require_grads()  # as `gradient_checkpointing_enable` does for PEFT and where it is reentrant
        if patched:
            hf_vit_accel.patch(model)
        torch.manual_seed(0)
        head = torch.nn.Linear(32, 4)
        features = tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)).pooler_output
        assert features.requires_grad == (family != "qwen3_vl")
        features.mul_(1.0)  # as one may write to what stock returns
        if not features.requires_grad:
            continue
        checkpoint(head, features, use_reentrant=reentrant).square().sum().backward()
        found.append([features.detach(), head.weight.grad, head.bias.grad])
        if patched:
            assert (state_of(tower).calls, state_of(tower).stock_calls) == (1, 0)
            model.disable_input_require_grads()
            assert not tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid)).pooler_output.requires_grad
    if found:
        assert_close(found[1], found[0])


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
    grids = [GRIDS["images"], GRIDS["mixed"], [(2, 4, 4)] * 3, *([(1, 4, 2 * n), (1, 8, 8)] for n in range(3, 9))]

    def run(call: Any) -> list[list[torch.Tensor]]:
        with torch.no_grad():
            return [flat(call(pixels_for(tower, grid), grid_thw=torch.tensor(grid))) for grid in grids]

    def features(pixels: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        output = tower(pixels * 1.0, grid_thw=grid_thw)
        output.pooler_output = output.pooler_output * 1.0
        return output

    expected = run(tower)
    hf_vit_accel.patch(model, strict=True)
    try:
        for call, graphs in ((tower, 0), (features, 2)):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(call, backend=backend, dynamic=True)
            for found, wanted in zip(run(compiled), expected, strict=True):
                assert_close(found, wanted)
            assert counters["stats"].get("unique_graphs", 0) == graphs, counters
            assert sum(counters["graph_break"].values()) == bool(graphs), counters
        with pytest.raises(torch._dynamo.exc.Unsupported, match="the layout is decided on the host"):
            torch.compile(features, backend=backend, fullgraph=True)(
                pixels_for(tower, grids[0]), torch.tensor(grids[0])
            )
    finally:
        torch._dynamo.reset()
    assert state_of(tower).calls == 2 * len(grids)
