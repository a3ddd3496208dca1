"""Qwen3-VL (dense, MoE), Qwen3-Omni, Cohere Compass: LayerNorm, GELU MLP, interpolated positions, deepstack."""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families.base import TINY, Family
from hf_vit_accel.layout import Geometry


def geometry(tower: Any) -> Geometry:
    """A square table of positions, interpolated bilinearly between its corners; every frame attends by itself."""
    known = (tower.interpolation_mode, tower.interpolation_align_corners) == ("bilinear", True)
    if not known or tower.config.spatial_merge_size != tower.spatial_merge_size:  # stock interpolates by the config's
        raise ValueError("positions are interpolated in a way that is not known")
    return Geometry(merge=tower.spatial_merge_size, table=tower.num_grid_per_side)


FAMILY = Family(
    name="qwen3_vl",
    towers=(
        ("transformers.models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel"),
        ("transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
        ("transformers.models.cohere_compass.modeling_cohere_compass", "CohereCompassVisionModel"),
        ("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"),
    ),
    output="BaseModelOutputWithDeepstackFeatures",
    geometry=geometry,
    deepstack=True,
    tiny=dict(TINY, out_hidden_size=16, num_position_embeddings=36, deepstack_visual_indexes=[0, 2]),
)
