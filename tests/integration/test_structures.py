"""Towers of random structure beside stock: outputs and gradients, in passes or not, with reuse, alone and on two ranks.

A seed decides everything: depth, kept blocks, heads, windows, deepstack layers, images, and the settings of the patch.
"""

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_on_ranks, share_small_calls
from tiny import TINY, assert_close, outputs_of, pixels_for, relative_error, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.layout import rows_of

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TURNS = ("qwen3_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_vl")
DRAWN = (6, 9, 12, 14, 15, 16, 17)
"""Seeds of every run, which draw every kind of structure."""
SEEDS = [pytest.param(seed, marks=[pytest.mark.matrix] * (seed not in DRAWN)) for seed in range(200)]


@dataclass(frozen=True)
class Structure:
    """One random tower, its call and its settings."""

    family: str
    vision: dict[str, Any]  # fields of the vision config that differ from the tiny ones
    kept_blocks: int  # from the first on
    grid: list[tuple[int, int, int]]
    copied: frozenset[int]  # entries that hold the same pixels as an earlier entry of their size
    settings: dict[str, Any]
    trains_pixels: bool
    frozen: tuple[str, ...]  # names of parts

    def tower(self) -> nn.Module:
        tiny = replace(TINY[self.family], vision=TINY[self.family].vision | self.vision)
        tower = tower_of(tiny.build())
        tower.blocks = tower.blocks[: self.kept_blocks]
        for name in self.frozen:
            getattr(tower, name).requires_grad_(False)
        return tower

    def pixels(self, tower: nn.Module) -> torch.Tensor:
        pixels = pixels_for(tower, self.grid)
        parts = list(pixels.split([t * h * w for t, h, w in self.grid]))
        for entry in self.copied:
            parts[entry] = parts[self.grid.index(self.grid[entry])]
        return torch.cat(parts).requires_grad_(self.trains_pixels)


def draw_vision(generator: random.Random, family: str) -> dict[str, Any]:
    """Draw the fields of a vision config; layers may be listed that have no block."""
    depth = generator.randint(1, 5)
    heads = generator.randint(1, 4)
    width = heads * generator.choice((16, 40, 80))
    layers = list(range(depth + 3))
    sizes = dict(depth=depth, num_heads=heads)
    if family == "qwen2_vl":
        return sizes | dict(embed_dim=width)
    sizes |= dict(hidden_size=width)
    if family == "qwen2_5_vl":
        full_layers = generator.sample(layers, generator.randint(0, depth))
        return sizes | dict(fullatt_block_indexes=full_layers, window_size=generator.choice((16, 32, 48)))
    deepstack = generator.sample(layers, generator.choice((0, 1, 2, 2, 3)))
    if deepstack and generator.random() < 0.2:
        deepstack.append(deepstack[0])
    return sizes | dict(deepstack_visual_indexes=deepstack, num_position_embeddings=generator.choice((16, 36, 64)))


def draw(seed: int) -> Structure:
    """Draw a structure; families take turns."""
    generator = random.Random(seed)
    family = TURNS[seed % len(TURNS)]
    vision = draw_vision(generator, family)
    sizes = [2 * generator.randint(1, 5) for _ in range(3)]
    grid = [
        (generator.choice((1, 1, 2, 5)), generator.choice(sizes), generator.choice(sizes))
        for _ in range(generator.randint(2, 5))
    ]
    repeated = [entry for entry, size in enumerate(grid) if size in grid[:entry]]
    return Structure(
        family=family,
        vision=vision,
        kept_blocks=generator.randint(1, vision["depth"]),
        grid=grid,
        copied=frozenset(entry for entry in repeated if generator.random() < 0.7),
        settings=dict(
            max_rows=generator.choice((None, *[generator.randint(1, rows_of(tuple(grid)) // 2)] * 3)),
            reuse=generator.random() < 0.5,
        ),
        trains_pixels=generator.random() < 0.3,
        frozen=tuple(generator.sample(["patch_embed", "blocks", "merger"], generator.choice((0, 0, 1, 2)))),
    )


def run_step(tower: nn.Module, structure: Structure) -> list[torch.Tensor | None]:
    """Return outputs, and the gradients of pixels and of all weights for a random weighting of the outputs."""
    tower.zero_grad()
    pixels = structure.pixels(tower)
    outputs = outputs_of(tower(pixels, grid_thw=torch.tensor(structure.grid)))
    generator = torch.Generator().manual_seed(1)
    loss = sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
    if loss.requires_grad:
        loss.backward()
    return [*(output.detach() for output in outputs), pixels.grad, *(weight.grad for weight in tower.parameters())]


def check(tower: nn.Module, structure: Structure, expected: list[torch.Tensor | None], **settings: Any) -> Any:
    """Patch a tower and compare it with stock, without and with gradients; return its status."""
    hf_vit_accel.patch(tower, strict=True, **structure.settings, **settings)
    with torch.no_grad():
        outputs = outputs_of(tower(structure.pixels(tower), grid_thw=torch.tensor(structure.grid)))
    assert_close(outputs, expected[: len(outputs)])
    for actual, value in zip(run_step(tower, structure), expected, strict=True):
        assert (actual is None) == (value is None)
        assert value is None or torch.equal(actual, value) or relative_error(actual, value) < 1e-4
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls, dict(status.fallbacks)) == (2, 0, {})
    return status


def check_on_rank(rank: int, tower: nn.Module, structure: Structure, expected: list[torch.Tensor | None]) -> None:
    """Share the calls of a tower with another rank."""
    status = check(tower, structure, expected, data_parallel=True)
    assert status.ranks == f"rank {rank} of 2, 2 calls shared", status.ranks


@pytest.fixture(scope="module", autouse=True)
def proven() -> None:
    """Prove every family once: ranks inherit the proofs."""
    for family in FAMILIES:
        hf_vit_accel.patch(TINY[family].build())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_structure_computes_what_stock_computes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure = draw(seed)
    stock = structure.tower()
    expected = run_step(stock, structure)
    check(copy.deepcopy(stock), structure, expected)
    share_small_calls(monkeypatch)
    run_on_ranks(check_on_rank, 2, tmp_path, copy.deepcopy(stock), structure, expected)
