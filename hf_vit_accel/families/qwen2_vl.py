"""Qwen2-VL: LayerNorm, quick_gelu MLP, every layer attends per frame."""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families.base import Family
from hf_vit_accel.layout import Geometry


def geometry(tower: Any) -> Geometry:
    """Every frame attends by itself; no windows, no table of positions."""
    return Geometry(merge=tower.spatial_merge_size)


FAMILY = Family(
    name="qwen2_vl",
    towers=(("transformers.models.qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),),
    geometry=geometry,
    tiny=dict(depth=4, embed_dim=32, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=2, spatial_merge_size=2),
)
