"""Tiny shapes of the towers whose attention alone is ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SIGLIP = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=40, patch_size=2)


@dataclass(frozen=True)
class Tiny:
    """How to build and call a tiny tower.

    Args:
        config: Fields of the vision config.
        frames: Frames of a patch.
        square: Whether pixels come as (T, 3, side, side).
        clips: Whether stock takes clips of several frames.
        alike: Whether all clips must be equally long. (Kimi fails to concatenate others.)
        merge_sizes: Whether the forward takes a merge size per image.
    """

    config: dict[str, Any]
    frames: int = 1
    square: bool = False
    clips: bool = True
    alike: bool = False
    merge_sizes: bool = False


_MUSE = _SIGLIP | dict(pos_emb_height=4, pos_emb_width=4, max_position_embeddings=16)
_MUSE |= dict(layer_types=["window_attention", "full_attention"] * 2)
TINY = {
    "VideoLlama3VisionModel": Tiny(_SIGLIP, merge_sizes=True),
    "Kimi_K25VisionModel": Tiny(_SIGLIP | dict(pos_emb_height=6, pos_emb_width=6), square=True, alike=True),
    "GlmImageVisionModel": Tiny(
        dict(depth=4, hidden_size=32, num_heads=2, intermediate_size=40, patch_size=2, image_size=10), clips=False
    ),
    "MiniMaxM3VLVisionModel": Tiny(_SIGLIP, frames=2),
    "MuseGlimmerVisionModel": Tiny(_MUSE, frames=2),
    "MuseSparkVisionModel": Tiny(_MUSE, frames=2),
    "HunYuanVLVisionTransformer": Tiny(_SIGLIP | dict(max_image_size=12, out_hidden_size=16), clips=False),
    "Cosmos3EdgeVisionModel": Tiny(_SIGLIP | dict(num_patches=36)),
}
