"""Patch a model in either way, call its tower, and check what `status` says of the calls."""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from tiny import GRIDS, assert_close, outputs_of, pixels_for, relative_error, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.status import TowerStatus
from hf_vit_accel.tower.forward import AcceleratedForward
from hf_vit_accel.tower.state import state_of
from support.tensors import Output, flat

AUTO = "flash_vit_auto"
WAYS = ("patch", "name")
Grid = list[tuple[int, int, int]]


def patch_by(way: str, model: nn.Module) -> None:
    """Call `patch`, or set the registered name, as loading by name does."""
    if way == "patch":
        hf_vit_accel.patch(model)
    else:
        model.set_attn_implementation(AUTO)


def status_of(model: nn.Module) -> TowerStatus:
    """Return the status of a model's only tower."""
    [status] = hf_vit_accel.status(model).towers
    return status


def assert_fast(model: nn.Module, calls: int | None = None) -> None:
    """Check that all calls of a model's only tower were fast, and how many there were."""
    status = status_of(model)
    assert (status.stock_calls, status.against_fast, status.fallbacks) == (0, (), {}), str(status)
    assert status.calls == calls if calls is not None else status.calls, str(status)


def check_calls(model: nn.Module, fast: int, stock: int, *reasons: str) -> None:
    """Check the number of fast calls and of stock calls, which went that way for these reasons and no others."""
    state = state_of(tower_of(model))
    status = status_of(model)
    assert (state.fast_calls, state.stock_calls) == (status.calls, status.stock_calls) == (fast, stock)
    assert status.fallbacks == dict(state.fallbacks)
    for fallback in state.fallbacks:
        assert any(reason in fallback for reason in reasons), state.fallbacks
    for reason in reasons:
        assert any(reason in fallback for fallback in state.fallbacks), state.fallbacks


def check_stock(model: nn.Module, grid: Grid, expected: list[torch.Tensor], bound: float = 0.0) -> None:
    """Unpatch; check that nothing of ours remains, and that the tower computes what it did before."""
    tower = tower_of(model)
    hf_vit_accel.unpatch(model)
    assert state_of(tower) is None and not status_of(model).patched
    assert not any(isinstance(value, AcceleratedForward) for value in vars(tower).values())
    assert tower.config._attn_implementation == "sdpa"
    assert_close(run(tower, grid), expected, bound)


def run(tower: nn.Module, grid: Grid, **kwargs: object) -> list[torch.Tensor]:
    """Call a tower without gradients. Pixels are fp32 on the CPU, wherever the weights are at the moment."""
    with torch.no_grad():
        return flat(tower(pixels_for(tower, grid), grid_thw=torch.tensor(grid), **kwargs))


def training_step(tower: nn.Module, grid: Grid, pixels: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the outputs of a step, then the gradients of pixels and of every parameter that has one."""
    tower.zero_grad(set_to_none=True)
    pixels = (pixels_for(tower, grid) if pixels is None else pixels).requires_grad_()
    outputs = flat(tower(pixels, grid_thw=torch.tensor(grid)))
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    trained = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return [*(output.detach() for output in outputs), pixels.grad, *trained]


def gradients(tower: nn.Module, grid: Grid, forward: Callable[..., Output] | None = None) -> list[torch.Tensor]:
    """Return the gradients of pixels and of every parameter; none may be missing."""
    tower.zero_grad(set_to_none=True)
    pixels = pixels_for(tower, grid).requires_grad_()
    output = (forward or tower)(pixels, grid_thw=torch.tensor(grid))
    torch.stack([tensor.square().mean() for tensor in flat(output)]).sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())
    return [pixels.grad, *(parameter.grad for parameter in tower.parameters())]


SEEDS = range(5)


def _run(tower: nn.Module, dtype: torch.dtype, grid: Grid, seed: int) -> list[torch.Tensor]:
    """Return the outputs for pixels that were rounded to a dtype, whatever the dtype of the tower."""
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, seed).to(dtype).to(weight.device, weight.dtype)
    with torch.no_grad():
        return outputs_of(tower(pixels, grid_thw=torch.tensor(grid, device=weight.device)))


def mean_errors(runs: Iterable[list[torch.Tensor]], exact: Iterable[list[torch.Tensor]]) -> list[float]:
    """Return the mean error of every output over the seeds."""
    errors = []
    for outputs, expected in zip(runs, exact, strict=True):
        errors.append([relative_error(output, other) for output, other in zip(outputs, expected, strict=True)])
    return [sum(of_output) / len(of_output) for of_output in zip(*errors, strict=True)]


def check_error_bound(
    model: nn.Module,
    dtype: torch.dtype,
    device: str,
    attentions: Sequence[str],
    grids: Iterable[Grid] = tuple(GRIDS.values()),
) -> None:
    """Assert errors of at most max(1.1 x stock's, one unit in the last place), against stock in fp32, over five seeds.

    The model in fp32 stays as it is. Each backend in `attentions` is checked with each of the grids.
    """
    tower = tower_of(copy.deepcopy(model)).to(device)
    reference = copy.deepcopy(tower)
    for parameter in tower.parameters():  # buffers, such as rotary frequencies, stay in fp32
        parameter.data = parameter.data.to(dtype)
    for parameter, rounded in zip(reference.parameters(), tower.parameters(), strict=True):
        parameter.data = rounded.data.float()
    for grid in grids:
        exact = [_run(reference, dtype, grid, seed) for seed in SEEDS]
        stock = mean_errors([_run(tower, dtype, grid, seed) for seed in SEEDS], exact)
        for attention in attentions:
            with hf_vit_accel.patched(tower, attention=attention, strict=True):
                patched = mean_errors([_run(tower, dtype, grid, seed) for seed in SEEDS], exact)
            for error, stock_error in zip(patched, stock, strict=True):
                bound = max(1.1 * stock_error, torch.finfo(dtype).eps)
                assert error <= bound, (attention, grid, patched, stock)
