"""Build what is timed: towers in the shapes of public checkpoints, and inputs by name or literal."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.hub import has_file

from hf_vit_accel import machine
from hf_vit_accel.families import FAMILIES, Config, Family, Tower, family_of, find_towers
from hf_vit_accel.layout import Grid

_QWEN2: dict[str, Any] = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, patch_size=14)
_QWEN2_5: dict[str, Any] = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14)
_QWEN2_5 |= dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
_QWEN3: dict[str, Any] = dict(num_heads=16, patch_size=16, num_position_embeddings=2304)
_QWEN3_SMALL = _QWEN3 | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
_QWEN3_LARGE = _QWEN3 | dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-vl-2b": ("qwen2_vl", _QWEN2 | dict(hidden_size=1536)),
    "qwen2-vl-7b": ("qwen2_vl", _QWEN2 | dict(hidden_size=3584)),
    "qwen2.5-vl-3b": ("qwen2_5_vl", _QWEN2_5 | dict(out_hidden_size=2048)),
    "qwen2.5-vl-7b": ("qwen2_5_vl", _QWEN2_5 | dict(out_hidden_size=3584)),
    "qwen2.5-vl-32b": ("qwen2_5_vl", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=5120)),
    "qwen2.5-vl-72b": ("qwen2_5_vl", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=8192)),
    "qwen3-vl-2b": ("qwen3_vl", _QWEN3_SMALL | dict(out_hidden_size=2048)),
    "qwen3-vl-4b": ("qwen3_vl", _QWEN3_SMALL | dict(out_hidden_size=2560)),
    "qwen3-vl-8b": ("qwen3_vl", _QWEN3_LARGE | dict(out_hidden_size=4096)),
}
"""Name -> type of the model, and arguments of its vision config."""

SIZES: Mapping[str, Grid] = {
    "one 448²": ((1, 28, 28),),
    "one 1024²": ((1, 64, 64),),
    "one page": ((1, 136, 106),),
    "16 x 512²": ((1, 32, 32),) * 16,
    "8 mixed": (
        *((1, 28, 28), (1, 64, 64), (1, 46, 82), (1, 20, 30)),
        *((1, 96, 54), (1, 36, 36), (1, 72, 68), (1, 12, 46)),
    ),
    "video 8 x 36x64": ((8, 36, 64),),
}
"""Captioning and document workloads: a small image, a medium one, a page, a batch, a mixed batch, a short video."""
_LITERAL = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:\*([1-9]\d*))?")


def parse_size(text: str) -> tuple[str, Grid]:
    """Return the name and the grid of a size: a name of `SIZES`, or patches such as `1x64x64*16+8x36x64`."""
    name = text.strip().replace("^2", "²")
    if name in SIZES:
        return name, SIZES[name]
    grid: list[tuple[int, int, int]] = []
    for term in name.split("+"):
        match = _LITERAL.fullmatch(term.strip())
        if match is None:
            raise ValueError(
                f"unknown size {text!r}: choose one of {', '.join(SIZES)}, or frames x height x width in patches such "
                "as 1x64x64*16+8x36x64"
            )
        t, h, w, repeats = (int(number or 1) for number in match.groups())
        grid += [(t, h, w)] * repeats
    return name, tuple(grid)


def vision_config(model: str) -> Config:
    """Return the vision config of a built-in shape, a checkpoint (folder or hub id) or a config.json."""
    if model in SHAPES:
        model_type, arguments = SHAPES[model]
        return transformers.AutoConfig.for_model(model_type, vision_config=dict(arguments)).vision_config
    try:
        # `from_pretrained` would ask the hub again and again for a repository that does not exist.
        is_repository = model.count("/") == 1 and has_file(model, "config.json")
        if not Path(model).exists() and not is_repository:
            raise ValueError("no such folder or file, and no config.json by that name on the hub or in its cache")
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # also errors of the hub's HTTP client
        raise ValueError(
            f"unknown model {model!r}: pass a built-in shape ({', '.join(SHAPES)}), a checkpoint's folder or hub id, "
            f"or a config.json ({machine.one_line(error)[:300]})"
        ) from error
    return getattr(config, "vision_config", config)


def tower_class(config: object) -> type[nn.Module]:
    """Return the tower class of a vision config. Raises ValueError for a family that is not supported."""
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    families = [family for family in FAMILIES if not family.attention_only]
    for family in families:
        for module, name in family.towers:
            if module == home:
                return getattr(importlib.import_module(module), name)
    names = ", ".join(family.name for family in families)
    raise ValueError(f"{type(config).__name__} is no config of a vision tower of {names}: choose a model of these")


def build_tower(model: str, device: torch.device, dtype: torch.dtype, *, weights: bool = False) -> Tower:
    """Build a tower as `from_pretrained` leaves it, without gradients: buffers such as rotary frequencies stay fp32.

    Weights are random, and equal for equal model and device, unless the checkpoint's are asked for.
    """
    if weights:
        loaded = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=dtype)
        tower: nn.Module = next(tower for _, tower, _ in find_towers(loaded)).to(device)
    else:
        config = vision_config(model)
        torch.manual_seed(0)
        with device:
            tower = tower_class(config)(config)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(dtype)
    return tower.eval().requires_grad_(False)


def family_of_tower(tower: nn.Module) -> Family:
    """Return the family of a supported tower."""
    family = family_of(tower)
    assert family is not None
    return family


def weight_of(tower: nn.Module) -> Tensor:
    """Return the weight of the patch embedding; a row of it is as wide as a patch."""
    return family_of_tower(tower).parts(tower).projection.weight
