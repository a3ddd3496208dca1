"""Test that `status` prints what calls recorded, says what is expected before the first one, and changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support import attention_only
from support.fp8 import run_fp8_on_cpu
from support.patching import gradients, status_of
from support.towers import skip_without_metadata
from tiny import GRIDS, TINY, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import Fp8Config
from hf_vit_accel.engine import route as route_module
from hf_vit_accel.tower import state as state_module
from hf_vit_accel.tower.state import TowerState, state_of

GRID = GRIDS["mixed"]
ATTENTIONS = "output_attentions is requested"


def recorded(state: TowerState) -> tuple[object, ...]:
    """Return what a state holds of calls, and what was built for them."""
    snapshot = state.last_snapshot
    specs = {} if snapshot is None else dict(snapshot.specs)
    routes = dict(state.routes.cache._values), state.routes.hits, state.routes.cache.misses
    counts = state.fast_calls, state.stock_calls, state.metadata_calls, dict(state.fallbacks), state.rebuilds
    return snapshot, state.earlier, specs, routes, counts, state.last_route, state.scales, state.faults


@contextmanager
def building_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let whatever builds operations or routes fail."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("operations or routes are built")

    with monkeypatch.context() as patched:
        patched.setattr(state_module, "build", fail)
        patched.setattr(route_module, "make_route", fail)
        yield


def patch_by_name(tower: nn.Module) -> None:
    tower.set_attn_implementation("flash_vit_auto")


PATCHES = {
    "patch": hf_vit_accel.patch,
    "by name": patch_by_name,
    "fp8": partial(hf_vit_accel.patch, fp8=Fp8Config(min_seqlen=0)),
    "with all options": partial(hf_vit_accel.patch, reuse=True, max_rows=40, cuda_graphs=True),
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_status_changes_nothing(family: str, patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask before, between and after calls: also where the tower changed, and no call has read it since."""
    run_fp8_on_cpu(monkeypatch)
    tower: Any = tower_of(TINY[family].build())
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    patch(tower)
    state = state_of(tower)
    assert state is not None

    def check() -> None:
        before = recorded(state)
        with building_nothing(monkeypatch):
            text = str(hf_vit_accel.status(tower))
            assert str(hf_vit_accel.status(tower)) == text
        assert recorded(state) == before

    def replace_block() -> None:
        tower.blocks[0].mlp.act_fn = nn.Tanh()

    steps = (
        lambda: None,
        replace_block,
        partial(run_tower, tower, GRID),
        partial(tower, pixels, grid_thw=grid),  # with gradients
        partial(setattr, tower.config, "output_hidden_states", True),
        partial(tower, pixels, grid_thw=grid, output_attentions=True),
        partial(run_tower, tower, GRID),
        tower.double,
    )
    for step in steps:
        step()
        check()
    assert (state.fast_calls, state.stock_calls) == (3, 1)


def test_status_changes_nothing_where_attention_alone_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _, *of_class = attention_only.CLASSES[0]
    tower = attention_only.build(*of_class)
    hf_vit_accel.patch(tower)
    state = state_of(tower)
    assert state is not None
    for calls in range(3):
        before = recorded(state)
        with building_nothing(monkeypatch):
            status = status_of(tower)
            assert str(status_of(tower)) == str(status)
        assert recorded(state) == before
        assert (status.calls, status.backends) == (calls, {"full": "sdpa"} if calls else {})
        tower(**attention_only.inputs(tower))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_before_the_first_call_status_says_what_is_expected(family: str) -> None:
    """Windows may have a kernel, and parts their operations: only a call builds and so knows them."""
    tower = tower_of(TINY[family].build())
    hf_vit_accel.patch(tower, attention="flex", fp8=False)
    status = status_of(tower)
    assert (status.family, status.calls, status.stock_calls, status.against_fast) == (family, 0, 0, ())
    assert status.backends == {"full": "flex"} and not status.fused and not status.unfused
    assert "  attention  flex -> flex (full layers), expected before the first call\n" in str(status)
    assert "  fused      known after the first call\n" in str(status)
    run_tower(tower, GRID)
    status = status_of(tower)
    assert "expected" not in str(status) and "patch_embed" in status.fused
    hf_vit_accel.patch(tower)
    assert status_of(tower).backends == {"full": "sdpa"} and "flash_attention_3" in status_of(tower).rejected["full"]


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.filterwarnings("ignore:.*stays stock")
def test_reasons_are_visible_before_the_first_call_and_then_those_of_the_last_one() -> None:
    """A reason that appears, or goes, after a call is recorded by the next one."""
    tower: Any = tower_of(TINY["qwen3_vl"].build())
    hf_vit_accel.patch(tower)
    forward = tower.blocks[0].forward
    tower.blocks[0].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    [reason] = status_of(tower).against_fast
    assert reason.startswith("layer 0: ")
    run_tower(tower, GRID)
    stock = status_of(tower)
    assert (stock.against_fast, stock.fused, dict(stock.fallbacks)) == ((reason,), (), {reason: 1})
    assert f"  not fast   {reason}" in str(stock) and stock.backends == {"full": "sdpa"}
    del tower.blocks[0].forward
    assert status_of(tower).against_fast == (reason,), "no call has run without it yet"
    run_tower(tower, GRID)
    status = status_of(tower)
    assert (status.against_fast, status.calls, status.rebuilds) == ((), 1, stock.rebuilds + 1)
    assert "norms" in {*status.fused, *status.unfused}


@pytest.mark.parametrize("way", ["with our metadata", "on what it was called with"])
def test_a_stock_call_records_why(way: str) -> None:
    tower: Any = tower_of(TINY["qwen2_5_vl"].build())
    hf_vit_accel.patch(tower)
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    offsets = torch.tensor([0, len(pixels)], dtype=torch.int32)
    calls = {
        "with our metadata": ({"output_attentions": True}, ATTENTIONS),
        "on what it was called with": ({"cu_seqlens": offsets}, "the caller supplies sequence metadata"),
    }
    options, reason = calls[way]
    if "cu_seqlens" in options:
        skip_without_metadata(tower)
    run_tower(tower, GRID)
    fast = status_of(tower)
    with torch.no_grad():
        tower(pixels, grid_thw=grid, **options)
    status = status_of(tower)
    assert status.against_fast == (reason,) and f"  not fast   {reason}" in str(status)
    if way == "with our metadata":  # its layers ran as modules, by a route of its own
        assert status.backends == {"full": "sdpa", "window": "sdpa"} and not status.fused
    else:  # nothing of the call before it is shown as its own
        assert not status.backends and not status.rejected and not status.fused and not status.unfused
        assert "  attention  auto -> not recorded\n  fused      nothing\n" in str(status)
    run_tower(tower, GRID)
    again = status_of(tower)
    assert (again.against_fast, again.backends, again.fused) == ((), fast.backends, fast.fused)


def test_status_prints_the_route_of_the_last_call() -> None:
    """Not that of the calls that the tower, as it is now, would get."""
    tower = tower_of(TINY["qwen2_5_vl"].build())
    hf_vit_accel.patch(tower)
    state = state_of(tower)
    assert state is not None
    for call in (partial(run_tower, tower, GRID), partial(gradients, tower, GRID)):
        call()
        tower.to(torch.float64 if tower.dtype == torch.float32 else torch.float32)
        route = state.last_route
        assert route is not None and route.spec.ops is not None
        status = status_of(tower)
        assert status.backends == {kind: choice.backend.name for kind, choice in route.choices.items()}
        assert {*status.fused} == route.spec.ops.fused and status.unfused == route.spec.ops.unfused
        assert status.rejected == {kind: choice.rejected for kind, choice in route.choices.items()}


@pytest.mark.parametrize("called", [False, True])
def test_a_forward_that_was_taken_off_is_seen_at_once(called: bool) -> None:
    """No call can record it: none reaches us."""
    tower: Any = tower_of(TINY["qwen3_vl"].build())
    hf_vit_accel.patch(tower)
    if called:
        run_tower(tower, GRID)
    del tower.forward
    status = status_of(tower)
    assert "other code took the forward of patch off the tower" in status.against_fast[0]
    assert status.calls == called
