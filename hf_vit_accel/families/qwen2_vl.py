"""Qwen2-VL: LayerNorm, quick_gelu MLP, every layer attends per frame."""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families.base import Family
from hf_vit_accel.metadata import Geometry


def _geometry(tower: Any) -> Geometry:
    return Geometry(merge=tower.spatial_merge_size)


FAMILY = Family(
    name="qwen2_vl",
    towers=(("transformers.models.qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),),
    output="BaseModelOutputWithPooling",
    geometry=_geometry,
    tiny=dict(depth=4, embed_dim=32, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=2, spatial_merge_size=2),
)
