"""Test towers whose modules or functions other code has put in, as Liger and `kernels` do."""

from contextlib import nullcontext

import pytest
import torch
from support import substitutes
from support.patching import gradients
from support.substitutes import bind, exchanged
from support.towers import alike
from tiny import TINY, assert_close, pixels_for, randomise, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.tower.state import state_of

GRID = [(1, 4, 6), (2, 4, 4)]
pytestmark = pytest.mark.usefixtures("references")
NORM_CLASS = "Qwen2_5_VLRMSNorm"


def build(family: str = "qwen2_5_vl") -> nn.Module:
    return TINY[family].build()


def assert_same(tower: nn.Module, model: nn.Module, unfused: str | None = None) -> None:
    """Compare a patched tower with its own forward: calls are fast, norms and MLPs fused, and rows pass apart."""
    hf_vit_accel.patch(model, max_rows=30)
    actual = run_tower(tower, GRID)
    actual_gradients = gradients(tower, GRID)
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls) == (2, 0)
    assert unfused or (not status.fallbacks and status.passes)
    assert {"norms", "mlp"} - set(status.fused) == ({unfused} if unfused else set())
    hf_vit_accel.unpatch(model)
    assert_close(actual, run_tower(tower, GRID))
    assert_close(actual_gradients, gradients(tower, GRID), 1e-4)


OTHERS = "OffsetNorm", "OtherEpsilonNorm", "TrainedNorm", "MeanNorm"
"""Norms that compute something else."""


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "before") for name in ("RmsNorm", "Mlp", *OTHERS)),
        *alike(("LayerNorm", "after"), ("RmsNorm", "after"), ("LayerNorm", "before")),
    ],
)
def test_forwards_bound_by_liger_are_plain_or_called(name: str, when: str) -> None:
    """`apply_liger_kernel_to_qwen2_5_vl(model=model)` binds norms, that of GLM-4V a SwiGLU, too."""
    model = build("qwen2_vl" if name == "LayerNorm" else "qwen2_5_vl")
    tower = tower_of(model)
    if when == "after":
        hf_vit_accel.patch(model)
        run_tower(tower, GRID)
    for block in tower.blocks:
        for module in (block.mlp,) if name == "Mlp" else (block.norm1, block.norm2):
            bind(module, getattr(substitutes, name))
    hf_vit_accel.patch(model)
    assert_same(tower, model, unfused="norms" if name in OTHERS else None)
    if name in OTHERS:
        run_tower(tower_of(hf_vit_accel.patch(model)), GRID)
        assert "forward of its own" in hf_vit_accel.status(model).towers[0].unfused["norms"]


@pytest.mark.parametrize("proven_first", [True, False])
def test_a_tower_of_exchanged_classes(proven_first: bool) -> None:
    """The proof of the class may have run before Liger exchanged the class of the norms, or after it."""
    if proven_first:
        hf_vit_accel.patch(build())
    with exchanged(build(), NORM_CLASS, substitutes.RmsNorm):
        model = randomise(TINY["qwen2_5_vl"].build(fresh=True), 0)
        tower = tower_of(model)
        assert type(tower.blocks[0].norm1) is substitutes.RmsNorm
        hf_vit_accel.patch(model)
        assert_same(tower, model)


@pytest.mark.usefixtures("nothing_proven")
def test_a_tower_of_former_classes_after_liger_exchanged_them() -> None:
    """`apply_liger_kernel_to_qwen2_5_vl(model=model)` exchanges the class, too: the twin has norms of another class."""
    model = build()
    tower = tower_of(model)
    with exchanged(model, NORM_CLASS, substitutes.RmsNorm):
        for block in tower.blocks:
            bind(block.norm1, substitutes.RmsNorm)
            bind(block.norm2, substitutes.RmsNorm)
        hf_vit_accel.patch(model)
        assert_same(tower, model)


@pytest.mark.usefixtures("nothing_proven")
@pytest.mark.parametrize("exchange", ["the class", "its forward"])
@pytest.mark.parametrize("kind", [substitutes.Attention, substitutes.HalvedAttention])
@pytest.mark.filterwarnings("ignore:transformers .* stays stock")
def test_an_attention_exchanged_in_the_file_of_the_tower(
    exchange: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsloth writes a file with classes or their forwards, and puts these in transformers' before loading."""
    stock = build()
    name = type(tower_of(stock).blocks[0].attn).__name__
    if exchange == "its forward":
        monkeypatch.setattr(type(tower_of(stock).blocks[0].attn), "forward", kind.forward)
    with exchanged(stock, name, kind) if exchange == "the class" else nullcontext():
        model = randomise(TINY["qwen2_5_vl"].build(fresh=True), 0)
        tower = tower_of(hf_vit_accel.patch(model))
        if kind is substitutes.Attention:
            assert_same(tower, model)
            hf_vit_accel.patch(model)
            owner = type(tower.blocks[0].attn)
            monkeypatch.setattr(owner, "forward", substitutes.HalvedAttention.forward)  # noticed at the next call
        actual = run_tower(tower, GRID)
        [status] = hf_vit_accel.status(tower).towers
        assert (status.calls, status.stock_calls) == (0, 1)
        hf_vit_accel.unpatch(model)
        assert_close(actual, run_tower(tower, GRID))


def test_an_activation_of_the_hub_has_no_gradients() -> None:
    """`from_pretrained(use_kernels=True)` binds them for inference. With gradients, the blocks run as they are."""
    model = build("qwen3_vl")
    tower = tower_of(model)
    for block in tower.blocks:
        bind(block.mlp.act_fn, substitutes.InferenceActivation)
    hf_vit_accel.patch(model)
    actual = run_tower(tower, GRID)
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (1, 0)
    output = tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID)).pooler_output
    output.sum().backward()
    assert state_of(tower).stock_calls == 1
    assert "without gradients" in str(hf_vit_accel.status(tower))
    assert tower.blocks[0].mlp.linear_fc1.weight.grad is None
    hf_vit_accel.unpatch(model)
    assert_close(actual, run_tower(tower, GRID))
