"""ERNIE-4.5-VL.

Differs from Qwen2-VL: a Linear embeds patches of a single frame. A final LayerNorm takes the place of the merger,
because the resampler belongs to the model.
"""

from __future__ import annotations

from hf_vit_accel.families import qwen2_vl
from hf_vit_accel.families.base import TINY, Family, Parts, Tower, qwen_parts


def _parts(tower: Tower) -> Parts:
    return qwen_parts(tower, final_norm=tower.ln)


FAMILY = Family(
    name="ernie4_5_vl",
    towers=(
        (
            "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe",
            "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        ),
        (  # the former name of the same class
            "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe",
            "Ernie4_5_VL_MoeVisionTransformerPretrainedModel",
        ),
    ),
    geometry=qwen2_vl.geometry,
    parts=_parts,
    tiny=TINY,
)
