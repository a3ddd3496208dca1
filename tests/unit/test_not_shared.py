"""Test which calls the ranks of `data_parallel` do not share: with other pixels or weights, under DDP, and so on."""

from collections.abc import Callable

import pytest
import torch
from support.patching import status_of
from support.ranks import MIXED, OnRanks, loss_of, sharing_of
from tiny import TINY, assert_close, checkpoint_layers, pixels_for, relative_error, run_tower, tower_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import hf_vit_accel
from hf_vit_accel import FallbackError
from hf_vit_accel.layout import rows_of
from hf_vit_accel.options import data_parallel


def pixels_of_two_ranks(pixels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pixels that differ on rank 1, as pairs: of most ranks, of rank 1."""
    swapped = pixels.clone()
    swapped[:48] = pixels[:48].roll(24, 0)  # the same images in another order
    one_larger = pixels.clone()
    one_larger[-1, -1] = torch.nextafter(one_larger[-1, -1], torch.tensor(9.0))
    zero = pixels.clone()
    zero[5, 7] = 0.0
    negative_zero = zero.clone()
    negative_zero[5, 7] = -0.0  # another bit, but equal results
    rotated = torch.cat([pixels[24:], pixels[:24]])
    return [(pixels, swapped), (pixels, one_larger), (pixels, rotated), (zero, negative_zero)]


def check_other_pixels(rank: int) -> None:
    model = TINY["qwen3_vl"].build()
    tower = tower_of(model)
    grid = [(1, 4, 6)] * 4 + [(2, 4, 4)]
    weight = tower.blocks[1].mlp.linear_fc1.weight
    calls = [pair[rank == 1] for pair in pixels_of_two_ranks(pixels_for(tower, grid))]
    hf_vit_accel.patch(model)
    expected = []
    for pixels in calls:
        tower.zero_grad()
        loss = loss_of(tower, pixels, grid)
        loss.backward()
        expected.append((loss.detach(), weight.grad.clone()))
    for grad in (False, True):
        hf_vit_accel.patch(model, data_parallel=True)
        for pixels, (expected_loss, expected_gradient) in zip(calls, expected, strict=True):
            tower.zero_grad()
            with torch.set_grad_enabled(grad):
                loss = loss_of(tower, pixels, grid)
            assert relative_error(loss.detach(), expected_loss) < 1e-6
            if grad:
                loss.backward()
                assert relative_error(weight.grad, expected_gradient) < 1e-5
        reason = "not shared: pixel values or weights on 1 of the group are not those of the others"
        assert status_of(model).fallbacks == {reason: 4}
        assert sharing_of(model) == f"rank {rank} of 3, 4 calls encoded by each rank alone"
        run_tower(tower, MIXED)
        assert "1 calls shared" in sharing_of(model)
    hf_vit_accel.patch(model, data_parallel=True, strict=True)
    with pytest.raises(FallbackError, match="pixel values or weights on 1 of the group"):
        tower(calls[0], grid_thw=torch.tensor(grid))


def check_stock_on_one_rank(rank: int) -> None:
    model = TINY["qwen2_5_vl"].build()
    tower = tower_of(model)
    expected = run_tower(tower, MIXED)
    has_hook = rank == 2

    def add_hook() -> torch.utils.hooks.RemovableHandle | None:
        return tower.rotary_pos_emb.register_forward_hook(lambda *_: None) if has_hook else None

    hf_vit_accel.patch(model, data_parallel=True)
    handle = add_hook()
    assert_close(run_tower(tower, MIXED), expected)
    status = hf_vit_accel.status(model).towers[0]
    assert (status.calls, status.stock_calls) == ((0, 1) if has_hook else (1, 0))
    reason = "hooks on rotary_pos_emb" if has_hook else "not shared: rank 2 of the group: hooks on rotary_pos_emb"
    assert status.fallbacks == {reason: 1} and "1 calls encoded by each rank alone" in status.ranks
    if handle is not None:
        handle.remove()
    assert_close(run_tower(tower, MIXED), expected)
    assert "1 calls shared" in sharing_of(model)
    hf_vit_accel.patch(model, data_parallel=True, strict=True)
    add_hook()
    with pytest.raises(FallbackError, match="hooks on rotary_pos_emb"):
        run_tower(tower, MIXED)


def check_hooks_inside(rank: int) -> None:
    model = TINY["qwen3_vl"].build()
    tower = tower_of(model)
    expected = run_tower(tower, MIXED)
    hf_vit_accel.patch(model, data_parallel=True)
    seen: list[int] = []
    if rank == 1:
        tower.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    for _ in range(2):
        assert_close(run_tower(tower, MIXED), expected)
    assert seen == [rows_of(MIXED)] * (2 * rank), "hooks see each call with all its rows"
    assert sharing_of(model) == f"rank {rank} of 2, 2 calls encoded by each rank alone"


def patched_model() -> nn.Module:
    return hf_vit_accel.patch(TINY["qwen2_vl"].build(), data_parallel=True)


def call_under_ddp() -> nn.Module:
    model = patched_model()
    tower = tower_of(model)
    ddp = nn.parallel.DistributedDataParallel(tower)
    ddp(pixels_for(tower, MIXED), grid_thw=torch.tensor(MIXED))
    return model


def call_under_fsdp() -> nn.Module:
    model = patched_model()
    for block in tower_of(model).blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    run_tower(tower_of(model), MIXED)
    return model


def call_with_reentrant_checkpoints() -> nn.Module:
    model = patched_model().train()
    tower = tower_of(model)
    checkpoint_layers(model, reentrant=True)
    loss_of(tower, pixels_for(tower, MIXED), MIXED).backward()
    return model


NOT_SHARED: dict[str, Callable[[], nn.Module]] = {
    "DDP averages gradients over the same ones": call_under_ddp,
    "FSDP2 shards layers": call_under_fsdp,
    "reentrant checkpoints": call_with_reentrant_checkpoints,
}
"""The beginning of each reason, and a function that makes such a call and returns the model."""


def check_calls_that_are_not_shared(rank: int) -> None:
    for reason, call in NOT_SHARED.items():
        status = status_of(call())
        assert status.calls == 1 and "shared" not in status.ranks
        [fallback] = status.fallbacks
        assert fallback.startswith(f"not shared by ranks: {reason}")


def check_checkpointed_call(rank: int) -> None:
    """A rank without a share would keep nothing that makes the checkpoint run it again; others would wait for it."""
    model = patched_model()
    grid = [(1, 4, 6)] * 2
    pixels = pixels_for(tower_of(model), grid)
    expected = loss_of(tower_of(TINY["qwen2_vl"].build()), pixels, grid)
    loss = checkpoint(loss_of, tower_of(model), pixels, grid, use_reentrant=False)
    loss.backward()
    assert relative_error(loss.detach(), expected.detach()) < 1e-6
    assert status_of(model).fallbacks == {"not shared by ranks: saved-tensor hooks are active (checkpointing?)": 2}


def check_small_call(rank: int) -> None:
    data_parallel.LEAST = 2048
    model = patched_model()
    run_tower(tower_of(model), MIXED)
    assert sharing_of(model) == f"rank {rank} of 2, 1 calls too small to share" and not status_of(model).fallbacks


CHECKS = {
    check_other_pixels: 3,
    check_stock_on_one_rank: 3,
    check_hooks_inside: 2,
    check_calls_that_are_not_shared: 2,
    check_checkpointed_call: 2,
    check_small_call: 2,
}
"""What is checked, and on how many ranks."""


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_that_do_not_share_a_call(on_ranks: OnRanks, check: Callable[[int], None]) -> None:
    on_ranks(check, CHECKS[check])
