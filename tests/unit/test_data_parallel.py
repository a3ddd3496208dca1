"""Test `data_parallel`: ranks share calls, with the outputs and gradients of one process.

Processes are forked, so they inherit the objects of the test; gloo connects them. Errors: test_ranks.py.
Calls that are not shared: test_not_shared.py.
"""

import copy
import pickle
import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from support.cpu_graphs import SMALL
from support.graphs import patch_training
from support.grids import Entry, drawn, frames_of
from support.ranks import MIXED, Grid, OnRanks, loss_of, sharing_of
from support.towers import two_layers
from tiny import (
    GRIDS,
    TINY,
    assert_close,
    checkpoint_layers,
    largest_error,
    outputs_of,
    pixels_for,
    relative_error,
    run_tower,
    tower_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hf_vit_accel
from hf_vit_accel import GraphConfig
from hf_vit_accel.config import Settings
from hf_vit_accel.layout import rows_of
from hf_vit_accel.options.split import Assignment, Split, cost, split
from hf_vit_accel.tower.state import state_of

ONE_SMALL_IMAGE_EACH: Grid = [(1, 2, 2), (1, 2, 2)]
"""An image for each of two ranks; a third rank has no share."""


def check_steps(rank: int, checkpoints: bool) -> None:
    model = TINY["qwen3_vl"].build().train()
    tower = tower_of(model)
    tower.blocks[0].requires_grad_(False)
    tower.blocks[1].norm1.weight = tower.blocks[2].norm1.weight  # a parameter with two names
    if checkpoints:
        checkpoint_layers(tower, reentrant=False)
    hooked: list[torch.Tensor] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        hooked.append(gradient.clone())
        return 2 * gradient

    tower.blocks[3].norm2.weight.register_hook(double)
    gradients = {}
    for is_shared in (False, True):
        hf_vit_accel.patch(model, data_parallel=is_shared, strict=True)
        tower.zero_grad()
        hooked.clear()
        for grid in (MIXED, ONE_SMALL_IMAGE_EACH):  # gradients of both steps add up
            pixels = pixels_for(tower, grid).requires_grad_()
            loss_of(tower, pixels, grid).backward()
        weights = [parameter.grad for parameter in tower.parameters() if parameter.requires_grad]
        gradients[is_shared] = [pixels.grad, *hooked, *weights]
        assert len(hooked) == 2, "hooks of weights see each complete gradient, once"
    assert largest_error(gradients[True], gradients[False]) < 1e-5
    assert all(parameter.grad is None for parameter in tower.blocks[0].parameters())
    assert sharing_of(model) == f"rank {rank} of 3, 2 calls shared"
    check_weights_without_gradient(tower)


def check_weights_without_gradient(tower: nn.Module) -> None:
    """Train by one output alone, which the merger does not reach."""
    pixels = pixels_for(tower, ONE_SMALL_IMAGE_EACH).requires_grad_()
    grid = torch.tensor(ONE_SMALL_IMAGE_EACH)
    tower.zero_grad()
    outputs_of(tower(pixels, grid_thw=grid))[0].sum().backward()
    assert tower.blocks[3].mlp.linear_fc1.weight.grad.norm() > 0
    without = [parameter.grad is None for parameter in tower.merger.parameters()]
    assert all(without), "as in stock: an optimizer would decay weights whose gradient is zero"
    hooked: list[torch.Tensor] = []
    tower.merger.linear_fc1.weight.register_hook(lambda gradient: hooked.append(gradient.clone()))
    tower.merger.linear_fc2.weight.register_post_accumulate_grad_hook(lambda weight: hooked.append(weight.grad.clone()))
    outputs_of(tower(pixels, grid_thw=grid))[0].sum().backward()
    assert len(hooked) == 2 and not any(gradient.any() for gradient in hooked), "hooks get tensors, even of zeros"


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed layers"])
def test_gradients_add_up_once(on_ranks: OnRanks, checkpoints: bool) -> None:
    on_ranks(check_steps, 3, checkpoints)


def check_replayed_steps(rank: int) -> None:
    """The gradients of a replay are a rank's part, too: they must reach the sum over ranks, once."""
    tower = tower_of(two_layers("qwen3_vl").build().train())
    grid = [(1, 4, 6)] * 2
    gradients = {}
    for is_shared in (False, True):
        graphs = patch_training(tower, GraphConfig(max_tokens=128, exact_after=2), data_parallel=is_shared, strict=True)
        for _ in range(4):
            tower.zero_grad()
            loss_of(tower, pixels_for(tower, grid), grid).backward()
        assert graphs.status().replays >= 2
        gradients[is_shared] = [parameter.grad for parameter in tower.parameters()]
    assert largest_error(gradients[True], gradients[False]) < 1e-5


def test_each_rank_replays_the_steps_of_its_share(references: list[str], on_cpu: type, on_ranks: OnRanks) -> None:
    on_ranks(check_replayed_steps, 2)


def check_copies_on_one_rank(rank: int) -> None:
    """Rank 0 has two equal images at every call, rank 1 at the first and third."""
    tower = tower_of(two_layers("qwen3_vl").build()).requires_grad_(False)
    grid = [(1, 4, 6)] * 2
    first, second = (pixels_for(tower, grid[:1], seed) for seed in range(2))
    for on_rank_1, result in ((first, "shared"), (second, "encoded by each rank alone"), (first, "shared")):
        pixels = torch.cat([first, on_rank_1 if rank == 1 else first])
        hf_vit_accel.patch(tower)
        expected = outputs_of(tower(pixels, grid_thw=torch.tensor(grid)))
        hf_vit_accel.patch(tower, data_parallel=True, reuse=True)
        assert_close(outputs_of(tower(pixels, grid_thw=torch.tensor(grid))), expected)
        assert sharing_of(tower) == f"rank {rank} of 2, 1 calls {result}"


def test_features_are_not_kept_across_calls() -> None:
    with pytest.raises(ValueError, match="does not work with data_parallel"):
        Settings(ranks=object(), reuse=hf_vit_accel.ReuseConfig(across_calls=True))


def check_ddp_over_other_ranks(rank: int) -> None:
    """Two pairs of ranks share calls; DDP averages over the pairs, each of which has images of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = two_layers("qwen2_vl").build()
    expected = tower_of(copy.deepcopy(model))
    grids = (MIXED, [(3, 4, 4), (1, 8, 8)])
    grid = grids[rank // 2]
    tower = tower_of(hf_vit_accel.patch(model, data_parallel=mesh["tp"], strict=True))
    ddp = nn.parallel.DistributedDataParallel(tower, process_group=mesh["dp"].get_group())
    loss_of(ddp, pixels_for(tower, grid), grid).backward()
    losses = [loss_of(expected, pixels_for(expected, grid), grid) for grid in grids]
    torch.stack(losses).mean().backward()
    for name, parameter in tower.named_parameters():
        assert relative_error(parameter.grad, expected.get_parameter(name).grad) < 1e-5, name
    assert sharing_of(model) == f"rank {rank % 2} of 2, 1 calls shared"


def check_groups(rank: int) -> None:
    model = TINY["qwen2_vl"].build()
    tower = tower_of(model)
    expected = run_tower(tower, MIXED)
    shared = f"rank {rank} of 2, 1 calls shared"

    def check(model: nn.Module, result: str | None) -> None:
        assert_close(run_tower(tower_of(model), MIXED), expected)
        assert sharing_of(model) == result

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for group in (dist.group.WORLD, mesh["tp"], dist.new_group([0, 1])):
        hf_vit_accel.patch(model, data_parallel=group)
        check(model, shared)
    check(copy.deepcopy(model), shared)
    with pytest.warns(UserWarning, match="a process group cannot be pickled"):
        unpickled = pickle.loads(pickle.dumps(model))
    check(unpickled, None)
    hf_vit_accel.patch(model, data_parallel=mesh["dp"])
    check(model, None)  # the only rank of its group
    for wrong, shown in ((mesh, "a mesh of 2"), ("all", "'all'"), (None, "got None"), (1, "got 1")):
        with pytest.raises(ValueError, match=f"expected data_parallel to be False, True, .*{shown}"):
            hf_vit_accel.patch(model, data_parallel=wrong)


CHECKS = {check_copies_on_one_rank: 2, check_ddp_over_other_ranks: 4, check_groups: 2}
"""What is checked, and on how many ranks."""


@pytest.mark.parametrize("check", CHECKS)
def test_ranks(on_ranks: OnRanks, check: Callable[[int], None]) -> None:
    on_ranks(check, CHECKS[check])


def test_without_a_group() -> None:
    model = TINY["qwen2_vl"].build()
    with pytest.raises(ValueError, match="call init_process_group"):
        hf_vit_accel.patch(model, data_parallel=True)
    assert state_of(tower_of(model)) is None
    run_tower(tower_of(hf_vit_accel.patch(model)), GRIDS["mixed"])
    assert sharing_of(model) is None


OPTIONS = [(40, True, False), (40, False, SMALL), (None, True, SMALL), (40, True, SMALL)]
"""Values of max_rows, reuse and cuda_graphs. Each option alone has tests of its own."""
Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def results_of(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor, *, grad: bool) -> Results:
    """Return the outputs of a call, and the gradients of all weights by a loss that weights rows differently."""
    tower.zero_grad()
    with torch.set_grad_enabled(grad):
        outputs = outputs_of(tower(pixels, grid_thw=grid))
    if grad:
        sum((x.square() * torch.linspace(0.5, 1, len(x))[:, None]).mean() for x in outputs).backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return [output.detach() for output in outputs], gradients


def check_options(rank: int) -> None:
    generator = random.Random(5)
    tower = tower_of(TINY["qwen2_5_vl"].build())
    for seed, (max_rows, reuse, graphs) in enumerate(OPTIONS):
        sizes = drawn(generator)[:3]
        pixels = pixels_for(tower, sizes, seed)
        grid = torch.tensor([*sizes, *sizes, sizes[0]])
        first = pixels[: sizes[0][0] * sizes[0][1] * sizes[0][2]]
        pixels = torch.cat([pixels, pixels, first])
        for grad in (False, True):
            expected, expected_gradients = results_of(tower, pixels, grid, grad=grad)
            options = dict(max_rows=max_rows, reuse=reuse, cuda_graphs=graphs)
            hf_vit_accel.patch(tower, data_parallel=True, **options)
            for _ in range(2):
                outputs, gradients = results_of(tower, pixels, grid, grad=grad)
                assert_close(outputs, expected)
                assert len(gradients) == len(expected_gradients)
                assert not grad or largest_error(gradients, expected_gradients) < 1e-4
            status = hf_vit_accel.status(tower).towers[0]
            assert (status.calls, status.stock_calls) == (2, 0) and "2 calls shared" in str(sharing_of(tower))
            assert status.reuse is None or status.reuse.encoded <= 2 * len(sizes)
            hf_vit_accel.unpatch(tower)


def test_options_together_equal_stock(references: list[str], on_cpu: type, on_ranks: OnRanks) -> None:
    on_ranks(check_options, 2)


# --- how the frames of a call are split -------------------------------------------------------------------------------


def costs_of_frames(grid: Sequence[Entry]) -> list[float]:
    return [cost(rows_of((frame,)), 0.5) for frame in frames_of(grid)]


def frames_in(shares: Split) -> list[tuple[int, int]]:
    """Return the entry and the number of every frame, in the order of the call."""
    pieces = sorted(piece for share in shares for piece in share)
    return [(piece.image, piece.first + n) for piece in pieces for n in range(piece.frames)]


def test_a_split_holds_every_frame_once_and_is_balanced() -> None:
    generator = random.Random(0)
    for _ in range(1000):
        grid = tuple(drawn(generator) * generator.randint(1, 4))
        ranks = generator.randint(1, 9)
        shares = split(grid, ranks, full=0.5)
        assert frames_in(shares) == [(entry, n) for entry, (frames, _, _) in enumerate(grid) for n in range(frames)]
        for share in shares:
            assert list(share) == sorted(share)
        costs = costs_of_frames(grid)
        assignment = Assignment(grid, shares)
        loads_by_rank = [sum(costs_of_frames(assignment.grid_of(rank))) for rank in range(ranks)]
        assert sum(loads_by_rank) == pytest.approx(sum(costs))
        # The bound of a schedule that gives each unit to the rank with the smallest load (Graham).
        assert max(loads_by_rank) <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks) + 1e-6
