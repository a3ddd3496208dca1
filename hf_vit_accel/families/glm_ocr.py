"""GLM-OCR and GLM-5.3's tower: RMSNorm, norms of q and k, SwiGLU, a convolution over each merge block, then a merger.

GLM-5.3 cuts off what its SwiGLUs multiply.
"""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families import qwen2_vl
from hf_vit_accel.families.base import TINY, Family, Parts, qwen_parts


def _parts(tower: Any) -> Parts:
    return qwen_parts(tower, final_norm=tower.post_layernorm, downsample=tower.downsample)


FAMILY = Family(
    name="glm_ocr",
    towers=(
        ("transformers.models.glm_ocr.modeling_glm_ocr", "GlmOcrVisionModel"),
        ("transformers.models.glm5_next.modeling_glm5_next", "Glm5NextVisionModel"),
    ),
    geometry=qwen2_vl.geometry,
    parts=_parts,
    tiny=dict(TINY, projection_intermediate_size=40, out_hidden_size=24, swiglu_limit=0.5),
)
