"""Build and run tiny towers of any class that a family supports."""

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import randomise
from torch import nn

from hf_vit_accel.families import FAMILIES, Family, family_of
from hf_vit_accel.families.interface import named_tensors

Grid = list[tuple[int, int, int]]

GRIDS: list[Grid] = [[(1, 4, 6)], [(1, 4, 6), (2, 6, 2), (1, 2, 12), (1, 8, 4)]]

CLASSES = [(family, *tower) for family in FAMILIES if not family.attention_only for tower in family.towers]
"""Family, module and name of every class that has a fast path."""


DIFFERENT = "Qwen2_5_Vision", "Qwen3VLVision", "Glm5Next", "PaddleOCR", "Dots3"
"""Towers that differ in kind: windows, a table and deepstack, a limit and groups of heads, no merger, other norms.

`test_families.py` compares every tower with stock in every run, fused; a proof compares it plain.
"""


def classes_like(*names: str, classes: Sequence[tuple[Family, str, str]] = CLASSES) -> list[Any]:
    """Return classes as parameters: those whose name begins with a given one run always, the others in the matrix."""
    return [
        pytest.param(entry, id=entry[2], marks=[pytest.mark.matrix] * (not entry[2].startswith(names)))
        for entry in classes
    ]


def tiny_tower(family: Family, module: str, name: str) -> nn.Module:
    """Build a tower with its real config's switches and tiny sizes; skip the test where transformers lacks it."""
    kind: Any = getattr(pytest.importorskip(module), name, None)
    if kind is None or "forward" not in vars(kind):
        pytest.skip(f"this transformers has another class than {name}, or has it as a former name")
    if "grid_thw" not in inspect.signature(kind.forward).parameters:  # PaddleOCR-VL in transformers 5.0
        pytest.skip(
            f"{name} takes other arguments in this transformers; test_uses_by_version.py shows that it stays stock"
        )
    config = kind.config_class()
    config = getattr(config, "vision_config", config)
    for field, value in family.tiny.items():
        setattr(config, field, value)
    config._attn_implementation_internal = "sdpa"
    return randomise(kind(config).eval())


shared_tower = functools.cache(tiny_tower)
"""As `tiny_tower`, built once; for tests that do not change it."""


def build(family: Family, module: str, name: str) -> nn.Module:
    """Copy the shared tower, which is quicker than to build another."""
    return copy.deepcopy(shared_tower(family, module, name))


def inputs(tower: nn.Module, grid: Grid, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw pixels for a grid, whose videos become images for families without clips.

    Returns:
        Flattened patches (T, P), the leaf of gradients; the same in the tower's shape; and the grid.
    """
    family = family_of(tower)
    assert family is not None
    if not family.videos:
        grid = [(1, h, w) for t, h, w in grid for _ in range(t)]
    weight = family.parts(tower).projection.weight
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(t * h * w for t, h, w in grid), weight[0].numel(), generator=generator).to(weight.dtype)
    return rows.requires_grad_(), family.pixels(tower, rows), torch.tensor(grid)


def run(tower: nn.Module, grid: Grid) -> list[torch.Tensor]:
    """Run a tower without gradients; return every output."""
    _, pixels, grid_thw = inputs(tower, grid)
    with torch.no_grad():
        return list(named_tensors(tower(pixels, grid_thw=grid_thw)).values())


def trained(tower: nn.Module, grid: Grid) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Run a tower forward and backward for a random weighting of its outputs.

    Returns:
        The outputs; and the gradients of pixels and of every parameter, None for frozen ones.
    """
    rows, pixels, grid_thw = inputs(tower, grid)
    outputs = list(named_tensors(tower(pixels, grid_thw=grid_thw)).values())
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    leaves = [rows, *tower.parameters()]
    with torch.autocast("cpu", enabled=False):  # programs leave autocast before the backward pass
        gradients = iter(torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf.requires_grad], weights))
    return outputs, [next(gradients) if leaf.requires_grad else None for leaf in leaves]
