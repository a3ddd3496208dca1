"""Every tower class that a family names, in its smallest shape: proven, fast, and equal to stock with its gradients."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import randomise, relative_error

import hf_vit_accel
from hf_vit_accel import upstream
from hf_vit_accel.families import FAMILIES, Family, family_of
from hf_vit_accel.upstream import prove

GRIDS = [[(1, 4, 6)], [(1, 4, 6), (2, 6, 4), (1, 2, 12), (1, 8, 8)]]


def build(family: Family, module: str, name: str) -> Any:
    """A tower with its real config's switches; skipped where this transformers is older than the family."""
    kind: Any = getattr(pytest.importorskip(module), name)
    config = kind.config_class()
    for field, value in family.tiny.items():
        setattr(config, field, value)
    config._attn_implementation_internal = "sdpa"
    return randomise(kind(config).eval())


CLASSES = [(family, *tower) for family in FAMILIES for tower in family.towers]


@pytest.fixture(params=CLASSES, ids=lambda each: each[2])
def tower(request: Any) -> Any:
    return build(*request.param)


def run(tower: Any, grid: list[tuple[int, int, int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and the gradients of pixels and every parameter for a random weighting of them."""
    family, generator = family_of(tower), torch.Generator().manual_seed(0)
    assert family is not None
    width = family.parts(tower).projection.weight[0].numel()
    pixels = torch.randn(sum(t * h * w for t, h, w in grid), width, generator=generator).requires_grad_()
    if not family.clips:
        grid = [(1, h, w) for t, h, w in grid for _ in range(t)]
    outputs = family.tensors_of(tower(family.pixels(tower, pixels), grid_thw=torch.tensor(grid)))
    wanted = [torch.randn(output.shape, generator=generator) for output in outputs]
    return outputs, list(torch.autograd.grad(outputs, [pixels, *tower.parameters()], wanted))


@pytest.mark.parametrize("grid", GRIDS, ids=["image", "mixed"])
def test_a_tower_is_served_fast_and_equals_stock(tower: Any, grid: list[tuple[int, int, int]]) -> None:
    expected, gradients = run(tower, grid)
    hf_vit_accel.patch(tower, strict=True)
    found, ours = run(tower, grid)
    assert max(map(relative_error, found, expected)) < 1e-5 and max(map(relative_error, ours, gradients)) < 1e-4
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls, status.against_fast) == (1, 0, ())


def test_a_family_that_states_something_wrong_is_caught(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof can fail: the same class, with the layers in another order."""
    family = family_of(tower)
    assert family is not None and prove(tower, family).fast is None
    monkeypatch.setattr(upstream, "_PROOFS", {})

    def reversed_layers(tower: Any) -> Any:
        parts = family.parts(tower)
        return replace(parts, blocks=parts.blocks[::-1])

    why = prove(tower, replace(family, parts=reversed_layers)).fast
    assert why is not None and "something else" in why


def test_every_module_of_a_family_is_importable_by_its_name() -> None:
    for _, module, name in CLASSES:
        try:
            home = importlib.import_module(module)
        except ImportError:
            continue
        assert hasattr(home, name)
