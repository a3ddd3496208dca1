"""Qwen3-VL (dense, MoE), Qwen3-Omni, Cohere Compass.

Differs from Qwen2-VL: an MLP with GELU (tanh), a table of learned positions that is interpolated bilinearly, and
deepstack: mergers after chosen layers, whose features are returned, too.
"""

from __future__ import annotations

from hf_vit_accel.families.base import TINY, Family, Tower
from hf_vit_accel.layout import Geometry


def geometry(tower: Tower) -> Geometry:
    """Return a geometry with a square position table, whose corners lie on the corner patches of a frame."""
    mode = getattr(tower, "interpolation_mode", "bilinear")  # older towers do not say it
    align_corners = getattr(tower, "interpolation_align_corners", True)
    if (mode, align_corners) != ("bilinear", True):
        raise ValueError(f"positions are interpolated in a way that is not known, {mode!r}, {align_corners=}")
    # Stock interpolates by the config's merge size, and merges by the tower's.
    if tower.config.spatial_merge_size != tower.spatial_merge_size:
        raise ValueError("positions are interpolated in a way that is not known: two values of spatial_merge_size")
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
