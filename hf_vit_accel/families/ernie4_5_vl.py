"""ERNIE-4.5-VL: Qwen2-VL's layers; a Linear embeds one frame a patch; the resampler belongs to the model."""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families import qwen2_vl
from hf_vit_accel.families.base import TINY, Family, Parts, qwen_parts


def _parts(tower: Any) -> Parts:
    return qwen_parts(tower, final_norm=tower.ln)


FAMILY = Family(
    name="ernie4_5_vl",
    towers=(
        (
            "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe",
            "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        ),
    ),
    geometry=qwen2_vl.geometry,
    parts=_parts,
    tiny=TINY,
)
