"""Qwen2-VL: the family that the others are described by.

LayerNorm, one Linear for q, k and v, rotary positions, an MLP with quick_gelu. Every layer attends per frame. A merger
makes one feature of every 2 x 2 patches.
"""

from __future__ import annotations

from hf_vit_accel.families.base import Family, Tower
from hf_vit_accel.layout import Geometry


def geometry(tower: Tower) -> Geometry:
    """Return a geometry without windows and without a position table: every frame is one segment."""
    return Geometry(merge=tower.spatial_merge_size)


FAMILY = Family(
    name="qwen2_vl",
    towers=(("transformers.models.qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),),
    geometry=geometry,
    tiny=dict(depth=4, embed_dim=32, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=2, spatial_merge_size=2),
)
