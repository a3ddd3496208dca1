"""Qwen2.5-VL: RMSNorm, SwiGLU, most layers attend per window of 112 x 112 pixels; the output order is restored."""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families.base import Family
from hf_vit_accel.metadata import Geometry


def _geometry(tower: Any) -> Geometry:
    merge = tower.spatial_merge_size
    return Geometry(merge=merge, window=tower.window_size // merge // tower.patch_size)


FAMILY = Family(
    name="qwen2_5_vl",
    towers=(("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),),
    output="BaseModelOutputWithPooling",
    geometry=_geometry,
    windows=True,
    tiny=dict(
        depth=4,
        hidden_size=32,
        num_heads=2,
        intermediate_size=44,
        out_hidden_size=16,
        patch_size=2,
        spatial_merge_size=2,
        window_size=16,
        fullatt_block_indexes=[1, 3],
    ),
)
