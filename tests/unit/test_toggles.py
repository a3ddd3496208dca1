"""Switches that trainers set and set back at every step: what was known of the tower for a value is found again.

TRL's GRPO trainer switches checkpointing off for its rollouts and on for its step, and adapters off for the reference.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cpu_graphs import SMALL, Recorder, status_of
from support.graphs import Grid, patch
from support.patching import assert_fast, training_step
from support.towers import NARROW, ONE_TOWER
from tiny import TINY, assert_close, checkpoint_layers, pixels_for, run_tower, tower_of

import hf_vit_accel

GRID: Grid = [(1, 6, 8), (1, 4, 4)]
ROUNDS = 4
LINEARS = r".*visual.*\.(qkv|proj|fc1|linear_fc1|linear_fc2|up_proj|down_proj)"


def train(model: Any, seed: int) -> list[torch.Tensor]:
    """Make a step of the tower alone; return its outputs and gradients."""
    return training_step(tower_of(model), GRID, pixels_for(tower_of(model), GRID, seed))


def rollout_and_step(model: Any, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run a forward as GRPO's rollouts do, then a step as its training does; return outputs and gradients."""
    switch = "activation" if hasattr(model, "activation_checkpointing_disable") else "gradient"
    getattr(model, f"{switch}_checkpointing_disable")()
    model.eval()
    outputs = run_tower(tower_of(model), GRID, seed)
    model.train()
    checkpoint_layers(model, reentrant=False)
    return outputs, train(model, seed)


def rebuilds(model: Any) -> int:
    return hf_vit_accel.status(model).towers[0].rebuilds


def layouts_decided(model: Any) -> int:
    """Return how many layouts were decided, not found."""
    return hf_vit_accel.status(model).towers[0].layouts[2]


def test_checkpointing_that_is_switched_at_every_step(on_cpu: type[Recorder], model: Any) -> None:
    stock = copy.deepcopy(model)
    patch(model)  # graphs at the first call, on poisoned buffers
    for seed in range(ROUNDS):
        (outputs, gradients), (expected, expected_gradients) = (
            rollout_and_step(changed, seed) for changed in (model, stock)
        )
        assert_close(outputs, expected)
        assert_close(gradients, expected_gradients, 1e-4)
        if seed == 1:
            counts = rebuilds(model), layouts_decided(model), status_of(model).captures
    assert (rebuilds(model), layouts_decided(model), status_of(model).captures) == counts
    assert status_of(model).replays == ROUNDS and not status_of(model).stale
    assert_fast(model)


@pytest.mark.parametrize("family", ONE_TOWER)
def test_adapters_that_are_switched_at_every_step(family: str) -> None:
    """Switch as GRPO does for its reference, and as trainers with a second adapter do (DPO, PPO)."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False)
    adapted = peft.get_peft_model(TINY[family].build(), config)
    adapted.add_adapter("second", config)
    stock = copy.deepcopy(adapted)
    model = hf_vit_accel.patch(adapted)
    for seed in range(ROUNDS):
        results = []
        for changed in (model, stock):
            tower = tower_of(changed)
            with changed.disable_adapter():
                reference = run_tower(tower, GRID, seed)
            changed.set_adapter("second")
            second = run_tower(tower, GRID, seed)
            changed.set_adapter("default")
            changed.merge_adapter()
            merged = run_tower(tower, GRID, seed)
            changed.unmerge_adapter()
            results.append(([*reference, *second, *merged], train(changed, seed)))
        (outputs, gradients), (expected, expected_gradients) = results
        assert_close(outputs, expected, 1e-4)
        assert_close(gradients, expected_gradients, 1e-3)
        if seed == 1:
            counts = rebuilds(model), layouts_decided(model)
    assert (rebuilds(model), layouts_decided(model)) == counts
    assert_fast(model)


def _move_data(model: Any) -> None:
    parameter = tower_of(model).blocks[1].attn.proj.weight
    parameter.data = parameter.data * 1.5


def _replace_module(model: Any) -> None:
    block = tower_of(model).blocks[1]
    block.attn.proj = copy.deepcopy(block.attn.proj)
    with torch.no_grad():
        block.attn.proj.weight.mul_(1.5)


def _hook(model: Any) -> None:
    tower_of(model).blocks[1].register_forward_hook(lambda module, args, output: output * 1.5)


CHANGES = [_move_data, _replace_module, _hook]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("graphs", [False, SMALL], ids=["eager", "graphs"])
def test_a_change_while_another_value_is_set_is_seen(
    on_cpu: type[Recorder], change: Callable[[Any], None], graphs: object
) -> None:
    """The reading of the first value returns, in a tower that changed meanwhile."""
    model = TINY["qwen2_5_vl"].build()
    stock = copy.deepcopy(model)
    hf_vit_accel.patch(model, cuda_graphs=graphs)
    values = [[1, 3], [0, 1]]  # of the layers that attend to whole images
    for value in values * 2:
        for changed in (model, stock):
            tower_of(changed).fullatt_block_indexes = list(value)
        assert_close(run_tower(tower_of(model), GRID), run_tower(tower_of(stock), GRID))
    assert rebuilds(model) == 1
    before = run_tower(tower_of(stock), GRID)
    for changed in (model, stock):
        change(changed)
    for value in values * 2:
        for changed in (model, stock):
            tower_of(changed).fullatt_block_indexes = list(value)
        expected = run_tower(tower_of(stock), GRID)
        assert_close(run_tower(tower_of(model), GRID), expected)
    assert expected[0].dtype != before[0].dtype or (expected[0] - before[0]).norm() > 1e-3 * before[0].norm()


def test_autocast_that_is_switched_has_graphs_of_its_own(on_cpu: type[Recorder]) -> None:
    """Evaluate in bf16 by autocast, then without: neither makes the graphs of the other stale."""
    stock = NARROW.build()
    model = copy.deepcopy(stock)
    patch(model)
    for _ in range(ROUNDS):
        for is_enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
                expected = run_tower(tower_of(stock), GRID)
                outputs = run_tower(tower_of(model), GRID)
            assert_close(outputs, expected, 3e-2 if is_enabled else 1e-5)
    status = status_of(model)
    assert (status.captures, status.replays, len(status.graphs)) == (2, 2 * ROUNDS, 2)
    assert status.kept and "kept       1 x" in str(status)
