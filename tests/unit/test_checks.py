"""Test which hooks and changes of other programs a call notices, and the form of outputs that the config says."""

import copy
from operator import attrgetter
from types import MethodType
from typing import Any

import pytest
import torch
from support.plans import assert_frozen, assert_same
from support.tensors import flat
from tiny import GRIDS, TINY, assert_close, checkpoint_layers, pixels_for, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import ReuseConfig
from hf_vit_accel.engine.call import FastPlan
from hf_vit_accel.machine import numerics
from hf_vit_accel.tower.forward import decide
from hf_vit_accel.tower.state import TowerState, state_of
from hf_vit_accel.tower.stock_way import StockPlan, Way

GRID = GRIDS["mixed"]


def test_a_reason_counts_once_a_call(tower: nn.Module) -> None:
    """DeepSpeed's ZeRO-3 sets hooks of both kinds on every module, and names its parameters."""
    for parameter in tower.parameters():
        parameter.ds_id = 0
    for module in tower.modules():
        module.register_forward_pre_hook(lambda module, args: None)
        module.register_forward_hook(lambda module, args, output: None)
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    [status] = hf_vit_accel.status(tower).towers
    assert "  calls      0 fast, 1 stock (1 with our metadata)" in str(status)
    assert status.stock_calls == 1 and set(status.fallbacks.values()) == {1}
    assert len(set(status.against_fast)) == len(status.against_fast)
    assert any("ZeRO-3" in reason for reason in status.against_fast)


@pytest.mark.parametrize("options", [{}, {"return_dict": True}, {"return_dict": False}], ids=str)
def test_outputs_are_returned_as_the_config_says(tower: nn.Module, options: dict[str, bool]) -> None:
    tower.config.return_dict = False
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    with torch.no_grad():
        expected = tower(pixels, grid, **options)
        if isinstance(expected, torch.Tensor):
            pytest.skip("this transformers returns merged features alone, whatever is requested")
        hf_vit_accel.patch(tower, strict=True)
        outputs = (tower(pixels, grid, **options), tower(pixels, grid_thw=grid, **options))
    for output in outputs:
        assert type(output) is type(expected) and isinstance(output, tuple) == (not options.get("return_dict"))
        fields = [type(value) for value in (output if isinstance(output, tuple) else output.to_tuple())]
        assert fields == [type(value) for value in (expected if isinstance(expected, tuple) else expected.to_tuple())]
        assert_close(flat(output), flat(expected))


@pytest.mark.parametrize("changes", [{"return_dict": False}, {"output_hidden_states": True}], ids=str)
def test_a_call_follows_the_config_as_it_is_now(tower: nn.Module, changes: dict[str, bool]) -> None:
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower)
    before = {name: getattr(tower.config, name) for name in changes}
    pixels = pixels_for(tower, GRID)
    grid = torch.tensor(GRID)
    for values in (before, changes, before):
        for part in (stock, tower):
            for name, value in values.items():
                setattr(part.config, name, value)
        with torch.no_grad():
            expected = stock(pixels, grid_thw=grid)
            output = tower(pixels, grid_thw=grid)
        assert type(output) is type(expected)
        assert_close(flat(output), flat(expected))


SETTINGS = {
    "cuda.matmul.fp32_precision": "tf32",
    "cudnn.conv.fp32_precision": "ieee",
    "mkldnn.matmul.fp32_precision": "bf16",
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": False,
}
"""Settings below `torch.backends`, and another value than torch's default."""


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_of_torchs_precision_is_read(name: str) -> None:
    path, attribute = name.rsplit(".", 1)
    owner = attrgetter(path)(torch.backends)
    default = getattr(owner, attribute)
    before = numerics()
    try:
        setattr(owner, attribute, SETTINGS[name])
        assert numerics() != before
    finally:
        setattr(owner, attribute, default)
    assert numerics() == before


def test_an_attention_that_the_user_sets_is_not_taken_back(tower: nn.Module) -> None:
    """Another reading of the tower changes no name."""
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    tower.config._attn_implementation = "sdpa"
    tower.blocks[0].mlp = copy.deepcopy(tower.blocks[0].mlp)
    run_tower(tower, GRID)
    assert tower.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_counter_on_the_tower_empties_no_cache(tower: nn.Module, when: str) -> None:
    if when == "before":
        tower.n_calls = 0
    hf_vit_accel.patch(tower, reuse=ReuseConfig(across_calls=True))
    if when == "after":
        tower.n_calls = 0

    def count(module: nn.Module, args: object, output: object) -> None:
        module.n_calls += 1

    tower.register_forward_hook(count)
    for _ in range(5):
        run_tower(tower, GRID)
    status = hf_vit_accel.status(tower).towers[0]
    assert tower.n_calls == 5
    assert status.layouts[2] == 1 and status.rebuilds == 0
    assert status.reuse is not None and status.reuse.encoded == len(GRID)
    assert "rebuilt" not in str(status)


def test_status_names_the_attribute_that_changed() -> None:
    tower = tower_of(TINY["qwen2_5_vl"].build())
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    tower.window_size = 16
    run_tower(tower, GRID)
    status = hf_vit_accel.status(tower).towers[0]
    assert (status.rebuilds, status.rebuild_reason) == (1, "the tower's attribute 'window_size' changed")
    assert "rebuilt    1 x, last because the tower's attribute 'window_size' changed" in str(status)


@pytest.mark.usefixtures("nothing_said")
def test_a_forward_of_a_layer_is_said_once(tower: Any) -> None:
    """A user who steers a layer, or skips it, sees why his tower is not fast without asking `status`."""
    block = tower.blocks[0]
    forward = block.forward
    block.forward = lambda hidden, *args, **kwargs: 2 * forward(hidden, *args, **kwargs)
    expected = run_tower(tower, GRID)
    with pytest.warns(UserWarning, match=r"stays stock: layer 0: .*forward of its own") as caught:
        hf_vit_accel.patch(tower)
        assert_close(run_tower(tower, GRID), expected)
        hf_vit_accel.patch(tower)
    assert len([warning for warning in caught if "stays stock" in str(warning.message)]) == 1


def hook(tower: Any) -> None:
    tower.blocks[1].attn.register_forward_hook(lambda *_: None)


def checkpoint(tower: Any) -> None:
    checkpoint_layers(tower.train(), reentrant=False)


PLANNED: dict[str, dict[str, Any]] = {
    "fast": {},
    "with gradients": {"trains": True},
    "with checkpoints": {"trains": True, "change": checkpoint},
    "with a hook in a block": {"change": hook},
    "with hidden states": {"options": {"output_hidden_states": True}},
    "with reuse": {"settings": {"reuse": True}},
    "with our metadata": {"options": {"output_attentions": True}},
    "on what it was called with": {"options": {"cu_seqlens": torch.zeros(1, dtype=torch.int32)}},
}
"""By kind of plan: what is trained and changed, and the options of patch and of the call."""


def call_of(tower: nn.Module, way: str) -> tuple[nn.Module, TowerState, tuple[torch.Tensor], dict[str, Any]]:
    """Patch a tower and run it once; return what `decide` takes for a call that gets a plan of this kind."""
    kind = PLANNED[way]
    tower.requires_grad_(kind.get("trains", False))
    hf_vit_accel.patch(tower, **kind.get("settings", {}))
    kind.get("change", lambda tower: None)(tower)
    run_tower(tower, GRID)
    state = state_of(tower)
    assert state is not None
    return tower, state, (pixels_for(tower, GRID),), {"grid_thw": torch.tensor(GRID), **kind.get("options", {})}


@pytest.mark.parametrize("way", PLANNED)
def test_a_call_that_is_decided_twice_gets_the_same_plan_and_changes_nothing(tower: nn.Module, way: str) -> None:
    call = call_of(tower, way)
    state = call[1]
    first = decide(*call)

    def counted() -> tuple[object, ...]:
        snapshot = state.last_snapshot
        routes = len(state.routes.cache), state.routes.hits, state.routes.cache.misses
        counts = state.fast_calls, state.stock_calls, state.rebuilds, dict(state.fallbacks)
        return snapshot, dict(snapshot.specs), routes, counts

    before = counted()
    assert_same(first, decide(*call))
    assert counted() == before
    assert_as_planned(first, way)


@pytest.mark.parametrize("way", ["fast", "with a hook in a block", "with our metadata"])
def test_a_call_counts_one_hit_where_its_layout_is_cached(tower: nn.Module, way: str) -> None:
    _, _, (pixels,), options = call_of(tower, way)
    counts = []
    for _ in range(3):
        tower(pixels, **options)
        counts.append(hf_vit_accel.status(tower).towers[0].layouts[1:])
    [(hits, misses), *later] = counts
    assert later == [(hits + 1, misses), (hits + 2, misses)]


@pytest.mark.parametrize("way", PLANNED)
def test_a_plan_is_frozen_all_through(tower: nn.Module, way: str) -> None:
    assert_frozen(decide(*call_of(tower, way)))


def assert_as_planned(plan: FastPlan | StockPlan, way: str) -> None:
    """Assert that the plan of a call is of the kind that a test is about."""
    if isinstance(plan, StockPlan):
        assert way == {Way.METADATA: "with our metadata", Way.STOCK: "on what it was called with"}[plan.way]
        return
    assert (bool(plan.called), bool(plan.checkpoints)) == ("hook" in way, "checkpoints" in way)
    assert plan.spec.request.grad == (way in ("with gradients", "with checkpoints", "with a hook in a block"))
    assert (plan.inputs.beside_grid is not None) == ("reuse" in way)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_status_says_that_other_code_took_our_forward_off(tower: Any, how: str) -> None:
    hf_vit_accel.patch(tower)
    if how == "deleted":
        del tower.forward
    else:
        tower.forward = MethodType(type(tower).forward, tower)
    run_tower(tower, GRID)
    [status] = hf_vit_accel.status(tower).towers
    assert "other code took the forward of patch off the tower" in status.against_fast[0]
    hf_vit_accel.patch(tower)
    run_tower(tower, GRID)
    [status] = hf_vit_accel.status(tower).towers
    assert status.calls == 1 and not status.against_fast
