"""Build tiny towers of which only the attention is ours, and draw inputs for them."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import randomise
from torch import nn

from hf_vit_accel.families import FAMILIES, family_of
from hf_vit_accel.tower.code import names_of_forwards
from hf_vit_accel.versions import popped_by

GRID = [(1, 4, 6), (2, 6, 4), (1, 2, 12), (2, 8, 8)]
CLASSES = [(family, *tower) for family in FAMILIES if family.attention_only for tower in family.towers]
"""Family, module and name of every such class."""
NO_SEGMENTS = "before transformers 5.23 the layers of MiniMax-M3 know no segments: its pictures attend to each other"

_SIGLIP = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=40, patch_size=2)


@dataclass(frozen=True)
class Tiny:
    """How to build and call a tiny tower."""

    config: dict[str, Any]  # fields of the vision config
    frames: int = 1  # of a patch
    square: bool = False  # pixels come as (T, 3, side, side)
    strip: bool = False  # pixels come as (1, 3, side, T * side)
    merge: int = 0  # patches per merged token along one side, where pixels come as (T / merge**2, side, side, 3)
    clips: bool = True  # stock takes clips of several frames
    alike: bool = False  # all clips must be equally long: Kimi fails to concatenate others
    merge_sizes: bool = False  # the forward takes a merge size per image


_MUSE = _SIGLIP | dict(pos_emb_height=4, pos_emb_width=4, max_position_embeddings=16)
_MUSE |= dict(layer_types=["window_attention", "full_attention"] * 2)
_MINICPM = Tiny(_SIGLIP | dict(image_size=12, insert_layer_id=1), strip=True, clips=False)
_INKLING = _SIGLIP | dict(posemb_grid_size=4, projection_hidden_dim=16, text_hidden_size=32)
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
    "HYV4VLVisionModel": Tiny(_SIGLIP | dict(max_image_size=12, out_hidden_size=16)),
    "Lfm3VlVisionModel": Tiny(
        _SIGLIP | dict(num_key_value_heads=1, layer_types=["conv", "full_attention"] * 2), frames=2
    ),
    "MiniCPMV4_6VisionModel": _MINICPM,
    "MiniCPMV4_7VisionModel": _MINICPM,
    "MiniCPMOcrVisionModel": _MINICPM,
    "Inkling2VisionModel": Tiny(_INKLING, merge=2),
}


def takes_segments(layer: nn.Module) -> bool:
    """Return whether a layer's attention takes the offsets of segments."""
    return "cu_seqlens" in inspect.signature(layer.self_attn.forward).parameters


def make_tower(module: str, name: str) -> nn.Module:
    """Make a tower; skip the test where transformers lacks it."""
    kind: Any = getattr(pytest.importorskip(module), name)
    config = kind.config_class()
    for field, value in TINY[name].config.items():
        setattr(config, field, copy.deepcopy(value))
    config._attn_implementation_internal = "sdpa"
    return randomise(kind(config).eval())


def build(module: str, name: str, *, without_segments: bool = False) -> nn.Module:
    """Make a tower; skip the test where transformers lacks it, or its layers know no segments, and these are needed."""
    tower = make_tower(module, name)
    names = names_of_forwards({type(part) for part in tower.modules()})
    if "get_vision_merged_shape" in names:
        pytest.skip("in this transformers MiniCPM-V takes images of one size only")
    if "cu_seqlens" not in popped_by(names):
        pytest.skip(
            "this transformers computes segments by itself; test_uses_by_version.py shows that the tower stays stock"
        )
    if name.startswith("MiniMax") and not without_segments and not takes_segments(tower.layers[0]):
        pytest.skip(NO_SEGMENTS)
    return tower


def grid_name(tower: nn.Module) -> str:
    """Return the name of the argument that holds the sizes of images."""
    family = family_of(tower)
    assert family is not None
    return family.arguments[1]


def inputs(tower: nn.Module, seed: int = 0, images: Sequence[tuple[int, int, int]] = GRID) -> dict[str, torch.Tensor]:
    """Draw the arguments of a call: pixels, which require gradients, the grid, and merge sizes where they are taken."""
    tiny = TINY[type(tower).__name__]
    weight = next(tower.parameters())
    grid = list(images)
    if tiny.alike:
        grid = [(2, h, w) for _, h, w in images]
    elif not tiny.clips:
        grid = [(1, h, w) for t, h, w in images for _ in range(t)]
    rows = sum(t * h * w for t, h, w in grid)
    sizes = torch.tensor(grid, device=weight.device)
    shape: tuple[int, ...] = (rows, 3 * 4 * tiny.frames)
    if tiny.square:
        shape = (rows, 3, 2, 2)
    elif tiny.strip:
        shape = (1, 3, 2, 2 * rows)
        sizes = sizes[:, 1:]
    elif tiny.merge:
        shape = (rows, 2 * tiny.merge, 2 * tiny.merge, 3)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    arguments = {"pixel_values": pixels.to(weight.device, weight.dtype).requires_grad_(), grid_name(tower): sizes}
    if tiny.merge_sizes:
        arguments["merge_sizes"] = torch.tensor([2, 1, 2, 2], device=weight.device)
    return arguments
