"""docs/migrate.md: its callback, and the ways to name the attention that it gives, on a tiny captioner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import hf_vit_accel

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text()
CHECKPOINT = ROOT / "tests" / "tiny_captioner" / "qwen2_5_vl"


def example(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the inputs and labels of one picture of 4 x 4 patches."""
    config = model.config
    tokens = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id, 5, 6]
    ids = torch.tensor([tokens])
    pixels = torch.randn(16, model.model.visual.patch_embed.proj.weight[0].numel())
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "labels": ids,
    }


def load_as_verl() -> torch.nn.Module:
    """Load with the settings of the page, by the steps of verl's engine."""
    (path, value) = re.search(r"override_config\.(\S+)=(\S+)", PAGE).groups()
    config = AutoConfig.from_pretrained(CHECKPOINT, attn_implementation="sdpa")
    part = config
    *parents, attribute = path.split(".")
    for parent in parents:
        part = getattr(part, parent)
    setattr(part, attribute, value)
    return AutoModelForImageTextToText.from_pretrained(CHECKPOINT, config=config)


def load_with_both_names() -> torch.nn.Module:
    names = eval(re.search(r"pass `(\{.*?\})`", PAGE)[1])
    assert names.keys() == {"text_config", "vision_config"}
    names["text_config"] = "eager"  # flash-attn is not everywhere
    return AutoModelForImageTextToText.from_pretrained(CHECKPOINT, attn_implementation=names)


@pytest.mark.parametrize(("load", "text"), [(load_as_verl, "sdpa"), (load_with_both_names, "eager")])
def test_a_name_for_the_tower_alone_patches_it_and_leaves_the_text(
    load: Callable[[], torch.nn.Module], text: str
) -> None:
    model = load().eval()
    with torch.no_grad():
        logits = model(**example(model)).logits
    assert model.model.language_model.config._attn_implementation == text
    assert "1 fast, 0 stock" in str(hf_vit_accel.status(model)) and torch.isfinite(logits).all()


def test_a_method_that_ms_swift_gives_the_tower_keeps_it_fast() -> None:
    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT).eval()
    tower = model.model.visual
    tower.get_input_embeddings = lambda: tower.patch_embed
    hf_vit_accel.patch(model)
    with torch.no_grad():
        model(**example(model))
    assert "1 fast, 0 stock" in str(hf_vit_accel.status(model))
