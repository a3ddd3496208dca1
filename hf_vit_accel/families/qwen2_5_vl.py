"""Qwen2.5-VL: RMSNorm, SwiGLU, most layers attend per window of 112 x 112 pixels; the output order is restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_vit_accel.metadata import Geometry
from hf_vit_accel.tower import Family


def _geometry(tower: Any) -> Geometry:
    merge = tower.spatial_merge_size
    return Geometry(merge=merge, window=tower.window_size // merge // tower.patch_size)


def _full_layers(tower: Any) -> Iterable[int]:
    layers: Iterable[int] = tower.fullatt_block_indexes
    return layers


FAMILY = Family(
    name="qwen2_5_vl",
    towers=(("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),),
    output="BaseModelOutputWithPooling",
    geometry=_geometry,
    full_layers=_full_layers,
)
