"""GLM-OCR and the tower of GLM-5.3.

Differs from Qwen2-VL: RMSNorm, norms of the heads of q and k, a SwiGLU MLP. After a final norm, a convolution over
every merge block comes before the merger. GLM-5.3 clamps the inputs of its SwiGLUs.
"""

from __future__ import annotations

from hf_vit_accel.families import qwen2_vl
from hf_vit_accel.families.base import TINY, Family, Parts, Tower, qwen_parts


def _parts(tower: Tower) -> Parts:
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
