"""The residual stream in the epilogues of the products that write it: towers with it beside stock, and when it is used.

There is no GPU here: what QuACK's product computes stands in for it. A layer's gradients: tests/unit/test_backward.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from standins import INTERPRETED, both_towers, put
from support.graphs import patch
from test_families import one_node_a_layer
from tiny import (
    FAMILIES,
    GRIDS,
    TINY,
    assert_close,
    checkpoint_layers,
    outputs_of,
    pixels_for,
    relative_error,
    run_tower,
    tower_of,
)
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, Fp8Config, machine
from hf_vit_accel.engine.route import Routes
from hf_vit_accel.ops import gemm_epilogue, linears, mlp
from hf_vit_accel.ops.gemm_epilogue import gemm_add_reference
from hf_vit_accel.tower import forward as tower_module
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]
ROWS = sum(t * h * w for t, h, w in GRID)


def run_through_blocks(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 has layers run: within the block's own call."""
    encode, through = tower_module.encode, dict(enumerate(tower.blocks))
    monkeypatch.setattr(
        tower_module, "encode", lambda route, pixels, saves, _, into: encode(route, pixels, saves, through, into)
    )


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A machine where it is right, also for few rows; for each product that adds, whether it does so in place."""
    found: list[bool] = []

    def gemm_add(h: Any, weight: Any, bias: Any, x: torch.Tensor, out: Any = None) -> torch.Tensor:
        assert not any(size % 8 for size in (*weight.shape, h.shape[1])) and x.is_contiguous()
        found.append(out is x)
        return gemm_add_reference(h, weight, bias, x, out)

    monkeypatch.setattr(gemm_epilogue, "LEAST_ROWS", ROWS)
    monkeypatch.setattr(gemm_epilogue, "why_not", lambda device, dtype, kind: None if kind == "residual" else "no")
    monkeypatch.setattr(Routes, "warmed", True)
    put(monkeypatch, gemm_epilogue.gemm_add, gemm_add)
    return found


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_towers_equal_stock(references: list[str], added: list[bool], model: Any, monkeypatch: Any) -> None:
    """In place and within every layer, also in windows and before mergers of deepstack; not below so many rows."""
    tower, few = tower_of(model), [*GRID[:-1], (2, 4, 8)]
    expected, of_few = run_tower(tower, GRID), run_tower(tower, few)
    hf_vit_accel.patch(model, strict=True)
    assert_close(run_tower(tower, few), of_few)
    assert not added
    for through in (False, True):
        if through:
            run_through_blocks(tower, monkeypatch)
        added.clear()
        assert_close(run_tower(tower, GRID), expected)
        assert added == [True] * 2 * len(tower.blocks)
    with torch.no_grad():  # weights are live
        tower.blocks[1].attn.proj.weight.mul_(2)
        tower.blocks[1].attn.proj.bias.add_(1)
    changed = run_tower(tower, GRID)
    hf_vit_accel.unpatch(model)
    assert_close(changed, run_tower(tower, GRID))
    assert relative_error(changed[0], expected[0]) > 1e-2


@both_towers
def test_rounding_is_that_of_stock(references: list[str], added: list[bool], model: Any) -> None:
    exact = [x.double() for x in run_tower(tower_of(model), GRID)]
    tower = tower_of(model.to(torch.bfloat16))
    stock = run_tower(tower, GRID)
    hf_vit_accel.patch(model, strict=True)
    found = run_tower(tower, GRID)
    assert added and [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in stock]
    for ours, theirs, true in zip(found, stock, exact, strict=True):
        assert relative_error(ours, true) <= 1.1 * relative_error(theirs, true)


def test_autocast_casts_the_weights(references: list[str], added: list[bool], model: Any) -> None:
    hf_vit_accel.patch(model, strict=True)
    found = []
    for rows in (ROWS + 1, ROWS):
        gemm_epilogue.LEAST_ROWS = rows
        state_of(tower_of(model)).close()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(run_tower(tower_of(model), GRID))
    assert added and [x.dtype for x in found[0]] == [x.dtype for x in found[1]]
    assert max(map(relative_error, *found)) < 0.02


@pytest.mark.parametrize("way", ["served", "trained", "graphs"])
def test_a_served_tower_waits_for_warmup(
    references: list[str], added: list[bool], on_cpu: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What QuACK's import takes, a short process does not gain: only training and graphs are sure to be long."""
    asked: list[Any] = []
    monkeypatch.setattr(gemm_epilogue, "why_not", lambda *at: asked.append(at))
    monkeypatch.setattr(Routes, "warmed", False)
    tower = tower_of(TINY["qwen2_vl"].build()).requires_grad_(way == "trained")
    hf_vit_accel.patch(tower, cuda_graphs=way == "graphs")
    pixels, grid = pixels_for(tower, GRID), torch.tensor(GRID)
    tower(pixels, grid_thw=grid)
    assert bool(asked) == (way != "served")
    if way == "served":
        assert not added
        hf_vit_accel.warmup(tower, [[(1, 4, 4)]], progress=False)
        assert not asked, "calls of few rows do not use it"
        hf_vit_accel.warmup(tower, [GRID], progress=False)
        assert asked == [(torch.device("cpu"), torch.float32, "residual")] * len(asked) and added
        before = len(added)
        tower(pixels, grid_thw=grid)
        assert len(added) > before


def test_a_warmup_asks_for_it_only_where_it_can_be_used(
    references: list[str], added: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gemm_epilogue, "why_not", lambda *at: asked.append(at))
    for options in ({"fuse": False}, {"fuse": ["patch_embed"]}):
        model = hf_vit_accel.patch(TINY["qwen2_vl"].build(), **options)
        hf_vit_accel.warmup(model, [GRID], progress=False)
    assert not asked and not added


def test_replays(references: list[str], added: list[bool], on_cpu: Any, model: Any) -> None:
    """From CUDA graphs, whose rows are padded to that many, poisoned beyond."""
    gemm_epilogue.LEAST_ROWS = 65
    tower, grids = tower_of(model), [[(1, 8, 10)], [(1, 6, 8), (1, 4, 4)], GRID]
    expected = [run_tower(tower, grid) for grid in grids]
    graphs = patch(model)
    for grid, outputs in zip(grids, expected, strict=True):
        assert_close(run_tower(tower, grid), outputs)
    assert added and graphs.status().replays >= len(grids)


# --- what stands against it -------------------------------------------------------------------------------------------


class Adapter(nn.Linear):
    """Computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def _adapter(tower: Any) -> None:
    for block in tower.blocks[:1]:
        block.attn.proj.__class__ = Adapter


def _own_forward(tower: Any) -> None:
    proj = tower.blocks[0].attn.proj
    proj.forward = lambda x: nn.functional.linear(x, proj.weight, proj.bias) * 0.5


def _adapter_in_the_mlp(tower: Any) -> None:
    mlp.layers_of(tower.blocks[0].mlp)[2].__class__ = Adapter  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "options", "left"),
    [
        (_adapter, {}, -2),
        (_own_forward, {}, -2),
        (_adapter_in_the_mlp, {}, 0),
        (None, {"fuse": {"norms"}}, 0),
        (None, {"fuse": {"mlp", "rope"}}, 0),
        (None, {}, None),
    ],
)
def test_only_plain_products_between_fused_norms(
    references: list[str], added: list[bool], model: Any, change: Any, options: Any, left: int | None
) -> None:
    """left: how many of the products add, from the end."""
    tower = tower_of(model)
    if change is not None:
        change(tower)
    expected = run_tower(tower, GRID)
    hf_vit_accel.patch(model, **options)
    assert_close(run_tower(tower, GRID), expected)
    both = 2 * len(tower.blocks)
    assert len(added) == (both if left is None else both + left if left else 0)


def test_widths_that_it_does_not_take(references: list[str], added: list[bool]) -> None:
    tiny = TINY["qwen3_vl"]
    model = type(tiny)(tiny.model, tiny.config, tiny.vision | {"intermediate_size": 36}, tiny.text).build()
    expected = run_tower(tower_of(model), GRID)
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), GRID), expected)
    assert not added


def test_linears_in_fp8_come_first(added: list[bool], references: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have many rows; where none can be in FP8, products of the dtype add."""
    model = TINY["qwen3_vl"].build()
    for why in ("no such GPU", None):
        monkeypatch.setattr(linears, "why_not", lambda device, dtype, *, grad: why)  # noqa: B023
        settings = hf_vit_accel.config.Settings(fp8=Fp8Config(attention=False, linears=True, min_rows=0))
        hf_vit_accel.patch(model)
        state = state_of(tower_of(model))
        state.settings = settings
        snapshot = state.snapshot(tower_of(model))
        spec = state.spec(snapshot, snapshot.weights()[1], torch.device("cpu"), fast=True, grad=False)
        layers = state.routes.get(tuple(GRID), spec).ops.layers
        assert [layer.adds for layer in layers] == [why is not None] * len(layers)
        hf_vit_accel.unpatch(model)


def test_what_fails_goes_on_without(references: list[str], added: list[bool], monkeypatch: Any, model: Any) -> None:
    """The call is right, though rows were written to in place; it is counted, and not tried again."""
    tower, tried = tower_of(model), []
    expected = run_tower(tower, GRID)

    def broken(h: Any, weight: Any, bias: Any, x: torch.Tensor, out: Any = None) -> torch.Tensor:
        tried.append(x.add_(1))
        if len(tried) < 3:
            return gemm_add_reference(h, weight, bias, x, out)
        raise RuntimeError("no such tile")

    monkeypatch.setattr(gemm_epilogue, "gemm_add", machine.guarded(machine.EPILOGUES, broken))
    hf_vit_accel.patch(model)
    for _ in range(2):
        assert_close(run_tower(tower, GRID), expected)
    assert len(tried) == 3 and state_of(tower).faults.keys() == {machine.EPILOGUES}
    assert "not fused  gemm_epilogues: failed when it ran: RuntimeError: no such tile" in str(
        hf_vit_accel.status(model)
    )
    hf_vit_accel.patch(model, strict=True)
    with pytest.raises(FallbackError, match="gemm_epilogues failed when it ran"):
        run_tower(tower, GRID)


def test_layers_of_several_nodes_are_trained_without(references: list[str], added: list[bool], model: Any) -> None:
    """Nothing is written in place there, and a product of its own would need a node of its own."""
    tower = tower_of(model).requires_grad_(True)
    _, expected = trained(tower)
    hf_vit_accel.patch(model, strict=True)
    _, found = trained(tower)
    assert not added and max(relative_error(found[name], expected[name]) for name in expected) < 1e-4


def trained(tower: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and the gradient of every parameter that has one."""
    tower.zero_grad(set_to_none=True)
    grid, dtype = [(1, 4, 4), (1, 2, 2)], next(tower.parameters()).dtype
    made = outputs_of(tower(pixels_for(tower, grid, dtype=dtype), grid_thw=torch.tensor(grid)))
    generator = torch.Generator().manual_seed(1)
    drawn = [(x, torch.randn(x.shape, generator=generator).to(x.dtype)) for x in made]
    kept = [(x, dx) for x, dx in drawn if x.requires_grad]
    torch.autograd.backward(*map(list, zip(*kept, strict=True)))
    grads = {name: p.grad.double() for name, p in tower.named_parameters() if p.grad is not None}
    return [x.detach().double() for x in made], grads


@pytest.mark.skipif(not INTERPRETED, reason="test_interpreted.py runs it")
@pytest.mark.matrix  # "layer gelu, adding" of test_backward.py every time
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_training_interpreted(added: list[bool], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, a layer being one node: with deepstack and in windows, checkpointed, and with parts of it frozen."""
    monkeypatch.setattr(gemm_epilogue, "LEAST_ROWS", 1)
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    nodes = one_node_a_layer(monkeypatch)
    model = TINY[family].build()
    tower = tower_of(model).requires_grad_(True)
    del tower.blocks[3 if family == "qwen3_vl" else 2 :]  # the interpreter is slow
    layers = len(tower.blocks)
    exact, exact_gradients = trained(tower)
    tower.half()
    stock, stock_gradients = trained(tower)
    hf_vit_accel.patch(tower, strict=True)
    found, gradients = trained(tower)
    assert len(nodes) == layers and added == [False] * 2 * layers
    assert gradients.keys() == exact_gradients.keys()

    def error(tensors: Any, true: Any) -> float:
        return relative_error(*(torch.cat([x.flatten() for x in each]) for each in (tensors, true)))

    eps = torch.finfo(torch.float16).eps
    assert error(found, exact) <= max(1.1 * error(stock, exact), eps)
    assert error(gradients.values(), exact_gradients.values()) <= 1.1 * error(
        stock_gradients.values(), exact_gradients.values()
    )
    checkpoint_layers(tower.train(), reentrant=family == "qwen3_vl")
    run_through_blocks(tower, monkeypatch)
    added.clear()
    again, regained = trained(tower)
    assert added == [False] * 4 * layers
    assert error(again, found) == 0 and error(regained.values(), gradients.values()) < 1e-3
    tower.eval()
    for index, parameter in enumerate(tower.parameters()):
        parameter.requires_grad_(index % 3 == 1)
    _, some = trained(tower)
    assert some.keys() == {name for name, p in tower.named_parameters() if p.requires_grad}
    assert max(relative_error(some[name], gradients[name]) for name in some) < 1e-3
