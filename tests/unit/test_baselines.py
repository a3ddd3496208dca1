"""Stock set-ups of the benchmark: whatever they compile, replace or pass in, results are those of plain stock."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from support.backends import hide_gpu
from support.families import tiny_tower
from torch import nn

from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tools.bench.measure import draw_pixels, outputs_of
from hf_vit_accel.tools.bench.ways import Run, stock

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import baselines
import training

GRID = ((1, 4, 6), (3, 8, 4))
Gradients = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's CUDA device, if it has one."""
    hide_gpu(monkeypatch)


def train(run: Run, seed: int = 0) -> Gradients:
    """Run a forward and backward; return outputs and gradients by name."""
    pixels_TP = draw_pixels(run.tower, GRID, seed)
    with torch.no_grad():
        incoming = [torch.ones_like(output) for output in outputs_of(run(pixels_TP))]
    return training.results(run, pixels_TP, incoming, pixel_grad=True)


def train_stock(tower: nn.Module) -> Gradients:
    """Do so with a copy of a tower as plain stock."""
    with stock("sdpa", deepcopy(tower), GRID) as run:
        return train(run)


def assert_same(gradients: Gradients, expected: Gradients) -> None:
    """Check that all outputs and gradients are there, and near."""
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        tiny.assert_close([gradients[name]], [value])


def attend_segments(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend within each segment, as varlen functions do."""
    assert q_THD.shape == k_THD.shape == v_THD.shape
    lengths = cu_seqlens.diff().tolist()
    outputs = []
    for q, k, v in zip(q_THD.split(lengths), k_THD.split(lengths), v_THD.split(lengths), strict=True):
        heads_first = [x.transpose(0, 1) for x in (q, k, v)]
        outputs.append(nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.matrix  # `training.py` itself compares with stock before it times
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_compiled_blocks_train_as_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are compiled, however many; none falls back to eager beyond a limit of recompiles."""
    compiled = []
    compile_stock = torch.compile

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        compiled.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(torch, "compile", lambda forward, **options: compile_stock(forward, backend=count, **options))
    tower = tiny.tower_of(tiny.TINY[name].build()).requires_grad_(True).train()
    expected = train_stock(tower)
    with baselines._compiled_blocks("sdpa", tower, GRID) as run:
        gradients = train(run)
        first = len(compiled)
        train(run, 1)
        assert 0 < first == len(compiled), "compiled again"
    assert {"pixels", "output 0"} < gradients.keys() and len(gradients) > len(tower.blocks) * 8
    assert_same(gradients, expected)


@pytest.mark.parametrize("name", ["Qwen2_5_VisionTransformerPretrainedModel", "Exaone4_5_VisionModel"])
def test_flash_attention_2_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package torch's own varlen function serves: one call a layer with all segments, and its backward.

    It takes as many heads of keys as of queries.
    """
    from torch.nn.attention import varlen

    longest_of_calls = []

    def attend(*args: Any, scale: float) -> torch.Tensor:
        q, k, v, cu_seqlens, _, longest, _ = args
        longest_of_calls.append(longest)
        return attend_segments(q, k, v, cu_seqlens, scale)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    tower = trained_tower(name)
    expected = train_stock(tower)
    with baselines._stock_without_syncs("flash_attention_2", tower, GRID) as run:
        gradients = train(run)
    assert len(longest_of_calls) == 2 * len(tower.blocks)  # once to learn the outputs' shapes
    assert_same(gradients, expected)


def trained_tower(name: str) -> nn.Module:
    """Build the tiny tower of a class."""
    for family in FAMILIES:
        for module, class_name in family.towers:
            if class_name == name:
                return tiny_tower(family, module, name).requires_grad_(True).train()
    raise AssertionError(f"no family has a tower {name}")


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_stock_with_metadata_passed_in_is_equal(name: str) -> None:
    tower = tiny.tower_of(tiny.TINY[name].build())
    pixels = tiny.pixels_for(tower, list(GRID))
    expected = tiny.run_tower(tower, list(GRID))
    with torch.no_grad(), baselines._stock_without_syncs("sdpa", tower, GRID) as run:
        tiny.assert_close(tiny.outputs_of(run(pixels)), expected, bound=1e-6)  # products round by the place in memory


def test_liger_is_applied_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake package replaces a function of the modeling module, as the real one does."""
    tower = tiny.tower_of(tiny.TINY["qwen3_vl"].build())
    module = sys.modules[type(tower).__module__]
    before = dict(vars(module))
    rotations = []

    def rotate(*arguments: object) -> object:
        rotations.append(None)
        return before["apply_rotary_pos_emb_vision"](*arguments)

    def apply(*, fused_linear_cross_entropy: bool) -> None:
        vars(module).update(apply_rotary_pos_emb_vision=rotate, a_new_name=1)

    liger = ModuleType("liger_kernel.transformers")
    vars(liger)["apply_liger_kernel_to_qwen3_vl"] = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    expected = tiny.run_tower(tower, list(GRID))
    with torch.no_grad(), baselines._liger("sdpa", tower, GRID) as run:
        assert vars(module) == before
        tiny.assert_close(tiny.outputs_of(run(tiny.pixels_for(tower, list(GRID)))), expected)
        assert len(rotations) == len(tower.blocks) and vars(module) == before
    vars(liger)["apply_liger_kernel_to_qwen3_vl"] = lambda **_: None
    with pytest.raises(RuntimeError, match="replaces nothing"), baselines._liger("sdpa", tower, GRID):
        pass
