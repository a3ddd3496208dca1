"""Whole tiny models of every family: loaded by name in every spelling, and patched; their text part is untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composites import COMPOSITES, left_padded

import hf_vit_accel
from hf_vit_accel.families import FAMILIES, find_towers
from hf_vit_accel.tower import state_of

AUTO = "flash_vit_auto"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**left_padded()).logits


def names(model: Any) -> dict[str, str]:
    return {name: getattr(model.config, name)._attn_implementation for name in model.config.sub_configs}


def assert_patched(model: Any, text: dict[str, str]) -> None:
    [(_, tower, _)] = find_towers(model)
    assert state_of(tower) is not None
    assert names(model) == text | {"vision_config": AUTO}


@pytest.mark.parametrize("name", COMPOSITES)
def test_loading_by_name_leaves_text_alone(name: str) -> None:
    composite = COMPOSITES[name]
    stock = composite.make()
    expected, before = logits(stock), names(stock)
    for spelling in [{"vision_config": AUTO}, *([AUTO] if composite.by_name else [])]:
        model = composite.make(attn_implementation=spelling)
        assert_patched(model, before)
        assert torch.equal(logits(model), expected), spelling
        hf_vit_accel.unpatch(model)
        assert names(model) == before and torch.equal(logits(model), expected)
        model.set_attn_implementation(spelling)
        assert_patched(model, before)
        assert torch.equal(logits(model), expected), spelling
        model.set_attn_implementation("sdpa" if composite.by_name else {"vision_config": "sdpa"})
        assert all(state_of(module) is None for module in model.modules())
    hf_vit_accel.patch(stock)
    assert_patched(stock, before)
    assert torch.equal(logits(stock), expected)


def test_every_family_is_there() -> None:
    homes = {type(COMPOSITES[name].build()[1].vision_config).__module__ for name in COMPOSITES}
    known = {module.replace(".modeling_", ".configuration_") for family in FAMILIES for module, _ in family.towers}
    tiny = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"}
    tiny |= {"cohere_compass", "qwen3_omni_moe"}
    assert {each for each in known if each.split(".")[2] not in tiny} <= homes
