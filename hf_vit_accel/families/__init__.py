"""The families of towers: one file each says how to find the tower and what differs, nothing that is shared.

A new family is one file here, its line in `FAMILIES`, and one tiny config in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_vit_accel.families import (
    attention_only,
    dots3_note,
    ernie4_5_vl,
    glm4v,
    glm_ocr,
    paddleocr_vl,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)
from hf_vit_accel.families.base import Block, Family, Parts

__all__ = ["FAMILIES", "Block", "Family", "Parts", "family_of", "find_towers"]

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


_BY_CLASS = {tower: family for family in FAMILIES for tower in family.towers}


def family_of(module: nn.Module) -> Family | None:
    """The family that a module is a tower of, or None."""
    classes = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    return next((_BY_CLASS[each] for each in classes if each in _BY_CLASS), None)


def find_towers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family]]:
    """Every tower inside a model (a wrapper, a full model, or the tower itself), with its path and family."""
    for path, module in model.named_modules():
        family = family_of(module)
        if family is not None:
            yield path, module, family
