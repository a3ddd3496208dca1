"""Qwen3-VL, dense and MoE: LayerNorm, GELU MLP, interpolated positions, deepstack; every layer attends per frame."""

from __future__ import annotations

from typing import Any

from hf_vit_accel.metadata import Geometry
from hf_vit_accel.tower import Family


def _geometry(tower: Any) -> Geometry:
    known = (tower.interpolation_mode, tower.interpolation_align_corners) == ("bilinear", True)
    known = known and tower.config.spatial_merge_size == tower.spatial_merge_size  # stock interpolates by the config's
    return Geometry(merge=tower.spatial_merge_size, table=tower.num_grid_per_side if known else None)


FAMILY = Family(
    name="qwen3_vl",
    towers=(
        ("transformers.models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel"),
        ("transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
    ),
    output="BaseModelOutputWithDeepstackFeatures",
    geometry=_geometry,
    deepstack=True,
)
