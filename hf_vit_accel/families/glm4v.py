"""GLM-4.1V, GLM-4.5V and GLM-4.6V.

Differs from Qwen2-VL as GLM-OCR does, but without norms of q and k and without biases. A norm follows the patch
embedding, then a position table is interpolated bicubically and added. Videos come as images, frame by frame.
"""

from __future__ import annotations

from hf_vit_accel.families.base import TINY, Family, Parts, Tower, qwen_parts
from hf_vit_accel.layout import Geometry


def _geometry(tower: Tower) -> Geometry:
    embeddings = tower.embeddings
    mode = getattr(embeddings, "interpolated_method", "bicubic")  # older towers do not say it
    if mode != "bicubic":
        raise ValueError(f"positions are interpolated in a way that is not known, {mode!r}")
    side = embeddings.image_size // embeddings.patch_size
    return Geometry(merge=tower.spatial_merge_size, table=side, taps=4, align_corners=False)


def _parts(tower: Tower) -> Parts:
    return qwen_parts(
        tower,
        embed_norm=tower.post_conv_layernorm,
        table=tower.embeddings.position_embedding,
        final_norm=tower.post_layernorm,
        downsample=tower.downsample,
        around=(tower.embeddings,),
    )


FAMILY = Family(
    name="glm4v",
    towers=(
        ("transformers.models.glm4v.modeling_glm4v", "Glm4vVisionModel"),
        ("transformers.models.glm4v_moe.modeling_glm4v_moe", "Glm4vMoeVisionModel"),
    ),
    geometry=_geometry,
    parts=_parts,
    videos=False,
    tiny=dict(TINY, out_hidden_size=24, image_size=10),
)
