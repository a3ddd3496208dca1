"""PaddleOCR-VL.

Differs from Qwen2-VL: GELU (tanh), three Linears for q, k and v, a final LayerNorm and no merger. A position table is
interpolated bilinearly and added. Rows are in raster order, modules have the names of SigLIP, pixels have 5 dimensions.
"""

from __future__ import annotations

import math

from hf_vit_accel.families.base import Family, Parts, Tower, block_of
from hf_vit_accel.layout import Geometry


def _geometry(tower: Tower) -> Geometry:
    embeddings = tower.embeddings
    mode = getattr(embeddings, "interpolation_mode", "bilinear")  # older towers do not say it
    if mode != "bilinear":
        raise ValueError(f"positions are interpolated in a way that is not known, {mode!r}")
    side = math.isqrt(embeddings.num_positions)
    return Geometry(merge=1, table=side, align_corners=getattr(embeddings, "interpolation_align_corners", False))


def _parts(tower: Tower) -> Parts:
    embeddings = tower.embeddings
    blocks = [
        block_of(layer, "self_attn", "out_proj", ("layer_norm1", "layer_norm2")) for layer in tower.encoder.layers
    ]
    return Parts(
        patch_embed=embeddings.patch_embedding,
        projection=embeddings.patch_embedding,
        table=embeddings.position_embedding,
        rotary=tower.encoder.rotary_pos_emb,
        blocks=tuple(blocks),
        final_norm=tower.post_layernorm,
        around=(embeddings, tower.encoder),
    )


FAMILY = Family(
    name="paddleocr_vl",
    towers=(("transformers.models.paddleocr_vl.modeling_paddleocr_vl", "PaddleOCRVisionTransformer"),),
    geometry=_geometry,
    parts=_parts,
    arguments=("pixel_values", "attention_mask", "grid_thw"),
    pixel_dims=5,
    tiny=dict(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=40, image_size=10, patch_size=2
    ),
)
