"""Test `like={"DotsVisionTransformer": "dots_ocr"}` on a tiny tower in the manner of dots.ocr's remote code."""

import copy

import pytest
import torch
from support import dots_ocr
from support.patching import status_of
from support.towers import alike
from tiny import relative_error
from torch import Tensor, nn

import hf_vit_accel

LIKE = {"DotsVisionTransformer": "dots_ocr"}
GRID = [(1, 4, 6), (1, 8, 10), (2, 2, 18)]
DEPTH = 2
"""All layers are alike, and a proof takes as long as the tower is deep."""


def build(dtype: torch.dtype = torch.bfloat16, **fields: object) -> dots_ocr.DotsVisionTransformer:
    return dots_ocr.build(dtype, depth=DEPTH, **fields)


def run(tower: nn.Module, **options: object) -> Tensor:
    """Run a tower on random patches of one frame."""
    rows = sum(t * h * w for t, h, w in GRID)
    weight = tower.patch_embed.patchifier.proj.weight
    pixels = torch.randn(rows, weight[0].numel(), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return tower(pixels.to(weight), torch.tensor(GRID), **options)


@pytest.mark.parametrize(
    ("attention", "post_norm"),
    alike(("flash_attention_2", True), ("flash_attention_2", False), ("sdpa", True), ("sdpa", False)),
)
def test_bf16_is_as_exact_as_the_remote_code(attention: str, post_norm: bool) -> None:
    """The proof in fp32 runs beside FlashAttention, too, which takes no fp32."""
    tower = build(attention=attention, post_norm=post_norm)
    exact = run(build(torch.float32, post_norm=post_norm), bf16=False)
    stock = run(tower)
    hf_vit_accel.patch(tower, like=LIKE, strict=True)
    ours = run(tower)
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, exact) <= max(1.25 * relative_error(stock, exact), 2e-3)
    status = status_of(tower)
    assert (status.calls, status.stock_calls, status.family) == (1, 0, "dots_ocr")
    hf_vit_accel.unpatch(tower)
    assert torch.equal(run(tower), stock)


@pytest.mark.usefixtures("quick_proof")
def test_gradients_in_fp32_are_those_of_the_remote_code() -> None:
    tower = build(torch.float32)
    gradients = []
    for patched in (False, True):
        model = copy.deepcopy(tower)
        if patched:
            hf_vit_accel.patch(model, like=LIKE, strict=True)
        pixels = torch.randn(24, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
        options = {} if patched else {"bf16": False}
        model(pixels, torch.tensor([(1, 4, 6)]), **options).square().sum().backward()
        gradients.append([pixels.grad, *(parameter.grad for parameter in model.parameters())])
    errors = [relative_error(ours, stock) for stock, ours in zip(*gradients, strict=True)]
    assert max(errors) < 1e-4, errors


@pytest.mark.usefixtures("quick_proof")
def test_every_part_is_fused_and_an_explicit_argument_reaches_the_remote_code(references: list[str]) -> None:
    """`references` stand in for the kernels: none of the parts falls back to a module."""
    tower = build(torch.float32)
    expected = run(tower, bf16=False)
    hf_vit_accel.patch(tower, like=LIKE)
    assert relative_error(run(tower), expected) < 1e-5
    assert {"patch_embed", "norms", "rope", "mlp", "mergers"} <= set(status_of(tower).fused)
    assert torch.equal(run(tower, bf16=False), expected)
    assert status_of(tower).fallbacks == {"the argument bf16 is given, which the proof of a copy does not cover": 1}


def test_patches_of_two_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="a patch has 2 frames, where 1 is known"):
        hf_vit_accel.patch(build(temporal_patch_size=2), like=LIKE)


@pytest.mark.usefixtures("quick_proof")
def test_flash_attention_that_is_wrong_in_bf16_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dots_ocr.flash_attn_varlen_func
    monkeypatch.setattr(dots_ocr, "flash_attn_varlen_func", lambda *args, **options: 1.2 * original(*args, **options))
    with pytest.raises(ValueError, match="in bfloat16"):
        hf_vit_accel.patch(build(attention="flash_attention_2"), like=LIKE)
