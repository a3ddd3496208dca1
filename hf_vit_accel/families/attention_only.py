"""Towers of other bodies, one line each: their own forward runs, on our attention, and is told its segments.

What stock computes beside attention (tables interpolated per image, 3-D rotations, mergers with loops) stays stock's.
"""

from __future__ import annotations

from typing import Any

from hf_vit_accel.families.base import Family
from hf_vit_accel.layout import Geometry


def _frames(tower: Any) -> Geometry:
    return Geometry(merge=1)


def _clips(tower: Any) -> Geometry:
    return Geometry(merge=1, clips=True)


def _windows(tower: Any) -> Geometry:
    return Geometry(merge=1, window=tower.config.pos_emb_height)


def _family(name: str, tower: str, geometry: Any = _frames, *more: tuple[str, str]) -> Family:
    towers = ((f"transformers.models.{name}.modeling_{name}", tower), *more)
    return Family(
        name=name, towers=towers, geometry=geometry, arguments=("pixel_values", "grid_thw"), attention_only=True
    )


_SPARK = "transformers.models.muse_spark.modeling_muse_spark", "MuseSparkVisionModel"

FAMILIES = (
    _family("video_llama_3", "VideoLlama3VisionModel"),
    _family("kimi_k25", "Kimi_K25VisionModel", _clips),
    _family("glm_image", "GlmImageVisionModel"),
    _family("minimax_m3_vl", "MiniMaxM3VLVisionModel", _clips),
    _family("muse_glimmer", "MuseGlimmerVisionModel", _windows, _SPARK),
    _family("hunyuan_vl", "HunYuanVLVisionTransformer"),
    _family("cosmos3_edge", "Cosmos3EdgeVisionModel"),
)
