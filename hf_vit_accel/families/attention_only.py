"""Towers of other structure, one line each: their own forward runs, with our attention.

Beside attention, all computation stays stock's: position tables that are interpolated per image, 3-D rotations, mergers
with loops. These towers have no parts that Qwen2-VL's operations could replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_vit_accel.families.base import Family, Tower, frames_and_sides
from hf_vit_accel.layout import Geometry, Grid


def _frames(tower: Tower) -> Geometry:
    """Return a geometry in which every frame is one segment, and rows are in raster order."""
    return Geometry(merge=1)


def _clips(tower: Tower) -> Geometry:
    """Return a geometry in which all frames of a grid entry are one segment."""
    return Geometry(merge=1, clips=True)


def _windows(tower: Tower) -> Geometry:
    """Return a geometry in which some layers attend per window, as large as the position table."""
    if hasattr(tower, "window_size"):
        return Geometry(merge=1, window=tower.window_size // tower.patch_size)
    return Geometry(merge=1, window=tower.config.pos_emb_height)  # older towers read it from the config at every call


def _quartered(tower: Tower) -> Geometry:
    """Return a geometry with a merger between two layers, which attends per window and makes one row of each."""
    return Geometry(merge=1, window=tower.vit_merger.window_kernel_size[0], quarters=True)


def _clips_with_class_token(tower: Tower) -> Geometry:
    """Return a geometry in which a class token and all frames of a grid entry are one segment."""
    return Geometry(merge=1, clips=True, class_tokens=1)


def _sides(tower: Tower, sizes: Sequence[Sequence[int]]) -> Grid:
    """Return a grid from rows of height and width, in patches."""
    return tuple((1, h, w) for h, w in sizes)


def _merged_sides(tower: Tower, sizes: Sequence[Sequence[int]]) -> Grid:
    """Return a grid from rows of frames, height and width, in merged tokens."""
    merge = tower.config.spatial_merge_size
    return tuple((t, h * merge, w * merge) for t, h, w in sizes)


def _family(
    name: str,
    tower: str,
    geometry: Callable[[Tower], Geometry] = _frames,
    other_towers: tuple[tuple[str, str], ...] = (),
    grid_name: str = "grid_thw",
    grid: Callable[[Tower, Sequence[Sequence[int]]], Grid] = frames_and_sides,
) -> Family:
    """Return a family that is attention only, by its name and that of its package in transformers."""
    return Family(
        name=name,
        towers=((f"transformers.models.{name}.modeling_{name}", tower), *other_towers),
        geometry=geometry,
        arguments=("pixel_values", grid_name),
        attention_only=True,
        grid=grid,
    )


_SPARK = ("transformers.models.muse_spark.modeling_muse_spark", "MuseSparkVisionModel")
_MINICPM_4_7 = ("transformers.models.minicpmv4_7.modeling_minicpmv4_7", "MiniCPMV4_7VisionModel")
_MINICPM_OCR = ("transformers.models.minicpm_ocr.modeling_minicpm_ocr", "MiniCPMOcrVisionModel")

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
    _family("minicpmv4_6", "MiniCPMV4_6VisionModel", _quartered, (_MINICPM_4_7, _MINICPM_OCR), "target_sizes", _sides),
    _family(
        "inkling2",
        "Inkling2VisionModel",
        _clips_with_class_token,
        grid_name="image_grid_thw",
        grid=_merged_sides,
    ),
)
"""All families that are attention only."""
