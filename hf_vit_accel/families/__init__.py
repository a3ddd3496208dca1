"""The families of towers. One file each says how to find the parts of a tower and what differs from other families.

A new family is one file here and its line in `FAMILIES`; CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_vit_accel.families import (
    attention_only,
    dots3_note,
    dots_ocr,
    ernie4_5_vl,
    glm4v,
    glm_ocr,
    paddleocr_vl,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)
from hf_vit_accel.families.base import Block, Config, Family, Model, Parts, Tower

__all__ = [
    "FAMILIES",
    "FAMILIES_OF_COPIES",
    "Block",
    "Config",
    "Family",
    "Model",
    "Parts",
    "Tower",
    "family_of",
    "find_towers",
]

FAMILIES: tuple[Family, ...] = (
    qwen2_vl.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3_vl.FAMILY,
    qwen3_5.FAMILY,
    glm_ocr.FAMILY,
    glm4v.FAMILY,
    paddleocr_vl.FAMILY,
    ernie4_5_vl.FAMILY,
    dots3_note.FAMILY,
    *attention_only.FAMILIES,
)
"""All families of towers in transformers."""

FAMILIES_OF_COPIES = (*(family for family in FAMILIES if not family.attention_only), dots_ocr.FAMILY)
"""The families that `like` may name. Towers of the last come with checkpoints only, as remote code."""

_BY_CLASS = {tower: family for family in FAMILIES for tower in family.towers}


def family_of(module: nn.Module) -> Family | None:
    """Return the family of a tower, or None if the module is no supported tower."""
    for kind in type(module).__mro__:
        family = _BY_CLASS.get((kind.__module__, kind.__name__))
        if family is not None:
            return family
    return None


def find_towers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family]]:
    """Yield the path, the module and the family of every tower inside a model, or of the model itself."""
    for path, module in model.named_modules():
        family = family_of(module)
        if family is not None:
            yield path, module, family
