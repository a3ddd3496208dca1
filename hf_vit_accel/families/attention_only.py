"""Towers of other structure, one line each: their own forward runs, with our attention.

Beside attention, all computation stays stock's: position tables that are interpolated per image, 3-D rotations, mergers
with loops. These towers have no parts that Qwen2-VL's operations could replace.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_vit_accel.families.base import Family, Tower
from hf_vit_accel.layout import Geometry


def _frames(tower: Tower) -> Geometry:
    """Return a geometry in which every frame is one segment, and rows are in raster order."""
    return Geometry(merge=1)


def _clips(tower: Tower) -> Geometry:
    """Return a geometry in which all frames of a grid entry are one segment."""
    return Geometry(merge=1, clips=True)


def _windows(tower: Tower) -> Geometry:
    """Return a geometry in which some layers attend per window, as large as the position table."""
    return Geometry(merge=1, window=tower.config.pos_emb_height)


def _family(
    name: str,
    tower: str,
    geometry: Callable[[Tower], Geometry] = _frames,
    other_towers: tuple[tuple[str, str], ...] = (),
) -> Family:
    """Return a family that is attention only.

    Args:
        name: The name of the family, and of its package in transformers.
        tower: The tower's class.
        geometry: Returns a tower's geometry.
        other_towers: (module, class) of further towers.
    """
    return Family(
        name=name,
        towers=((f"transformers.models.{name}.modeling_{name}", tower), *other_towers),
        geometry=geometry,
        arguments=("pixel_values", "grid_thw"),
        attention_only=True,
    )


_SPARK = ("transformers.models.muse_spark.modeling_muse_spark", "MuseSparkVisionModel")

FAMILIES = (
    _family("video_llama_3", "VideoLlama3VisionModel"),
    _family("kimi_k25", "Kimi_K25VisionModel", _clips),
    _family("glm_image", "GlmImageVisionModel"),
    _family("minimax_m3_vl", "MiniMaxM3VLVisionModel", _clips),
    _family("muse_glimmer", "MuseGlimmerVisionModel", _windows, (_SPARK,)),
    _family("hunyuan_vl", "HunYuanVLVisionTransformer"),
    _family("cosmos3_edge", "Cosmos3EdgeVisionModel"),
    _family("hy_v4_vl", "HYV4VLVisionModel"),
    _family("lfm3_vl", "Lfm3VlVisionModel"),
)
"""All families that are attention only."""
