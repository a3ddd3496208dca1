"""What is timed: towers in the shapes of public checkpoints, inputs by name or literal, and their matrix FLOPs."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.utils.hub import has_file

from hf_vit_accel import machine
from hf_vit_accel.families import FAMILIES, Family, family_of, find_towers
from hf_vit_accel.layout import Grid, build

PEAK = 790.0
"""TFLOP/s that the floor assumes on an H200: what large bf16 matrix products reach there."""

_QWEN2 = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, patch_size=14)
_QWEN2_5: dict[str, Any] = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14)
_QWEN2_5 |= dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
_QWEN3: dict[str, Any] = dict(num_heads=16, patch_size=16, num_position_embeddings=2304)
_QWEN3_SMALL = _QWEN3 | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
_QWEN3_LARGE = _QWEN3 | dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])

_SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2-vl-2b": ("Qwen2VLVisionConfig", _QWEN2 | dict(hidden_size=1536)),
    "qwen2-vl-7b": ("Qwen2VLVisionConfig", _QWEN2 | dict(hidden_size=3584)),
    "qwen2.5-vl-3b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(out_hidden_size=2048)),
    "qwen2.5-vl-7b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(out_hidden_size=3584)),
    "qwen2.5-vl-32b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=5120)),
    "qwen2.5-vl-72b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=8192)),
    "qwen3-vl-2b": ("Qwen3VLVisionConfig", _QWEN3_SMALL | dict(out_hidden_size=2048)),
    "qwen3-vl-4b": ("Qwen3VLVisionConfig", _QWEN3_SMALL | dict(out_hidden_size=2560)),
    "qwen3-vl-8b": ("Qwen3VLVisionConfig", _QWEN3_LARGE | dict(out_hidden_size=4096)),
    # What follows is the default of each config in transformers, which says whose shape that is where one is named.
    "qwen3.5": ("Qwen3_5VisionConfig", {}),  # Qwen3-VL-8B's without deepstack
    "glm-ocr": ("GlmOcrVisionConfig", {}),
    "glm-4.1v-9b": ("Glm4vVisionConfig", {}),
    "glm-4.5v": ("Glm4vMoeVisionConfig", {}),
    "glm-5.3-flash": ("Glm5NextVisionConfig", {}),
    "paddleocr-vl": ("PaddleOCRVisionConfig", {}),
    "ernie-4.5-vl": ("Ernie4_5_VLMoeVisionConfig", {}),
    "dots3-note": ("Dots3NoteVisionConfig", {}),
    # Not the defaults of the next two configs, whose width of 3584 is no tower's. Omni's is Qwen2.5-VL's (windows
    # of 112, MLPs of 3420, head dim 80); EXAONE's was not to be found, and is taken as the same, with 8 heads of keys.
    "qwen2.5-omni-7b": ("Qwen2_5OmniVisionEncoderConfig", _QWEN2_5 | dict(out_hidden_size=3584)),
    "exaone-4.5": ("Exaone4_5_VisionConfig", _QWEN2_5 | dict(out_hidden_size=5120)),
}
_KNOWN = frozenset(transformers.__all__)  # type: ignore[attr-defined]  # 5.15 lacks GLM-5.3 and dots3
SHAPES = {model: shape for model, shape in _SHAPES.items() if shape[0] in _KNOWN}
"""Name -> the class of the vision config in transformers, and its arguments; those that this transformers has."""

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
    """The name and grid of a size: one of SIZES ("^2" for "²" will do) or a literal like `1x64x64*16+8x36x64`.

    In a literal, t x h x w count patches, `*n` repeats and `+` joins. Raises ValueError for anything else.
    """
    name = text.strip().replace("^2", "²")
    if name in SIZES:
        return name, SIZES[name]
    grid: list[tuple[int, int, int]] = []
    for term in name.split("+"):
        found = _LITERAL.fullmatch(term.strip())
        if found is None:
            raise ValueError(
                f"expected a size out of {', '.join(SIZES)}, or frames x height x width in patches such as "
                f"1x64x64*16+8x36x64, got {text!r}"
            )
        t, h, w, repeats = (int(number or 1) for number in found.groups())
        grid += [(t, h, w)] * repeats
    return name, tuple(grid)


def vision_config(model: str) -> Any:
    """The vision config of a built-in shape, a checkpoint (folder or hub id) or a config.json; else ValueError."""
    if model in SHAPES:
        name, arguments = SHAPES[model]
        return getattr(transformers, name)(**arguments)
    try:
        # Asked once: where there is none, `from_pretrained` would try again and again.
        if not Path(model).exists() and not (model.count("/") == 1 and has_file(model, "config.json")):
            raise ValueError("no such folder or file, and no config.json by that name on the hub or in its cache")
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # also what the hub's HTTP client raises
        raise ValueError(
            f"expected a built-in shape ({', '.join(SHAPES)}), a checkpoint's folder or hub id, or a config.json, got "
            f"{model!r}: {machine.one_line(error)[:300]}"
        ) from error
    return getattr(config, "vision_config", config)


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """TFLOP/s of large matrix products in a dtype on a GPU, for the floor: measured, but on an H200. None for a CPU."""
    if device.type != "cuda":
        return None
    if dtype == torch.bfloat16 and "H200" in machine.cuda_device_name():
        return PEAK
    size, best = 8192, float("inf")
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.mm(a, b)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / 1e12


def tower_class(config: Any) -> type[nn.Module]:
    """The tower class that a vision config belongs to; ValueError for a family that is not supported."""
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    fast = [family for family in FAMILIES if not family.attention_only]
    for module, name in (tower for family in fast for tower in family.towers if tower[0] == home):
        return getattr(importlib.import_module(module), name)
    supported = ", ".join(family.name for family in fast)
    raise ValueError(f"expected a model with a vision tower of {supported}, got {type(config).__name__}")


def build_tower(model: str, device: torch.device, dtype: torch.dtype, *, weights: bool = False) -> Any:
    """A tower as `from_pretrained` leaves it (buffers such as rotary frequencies stay fp32), without gradients.

    weights: load the checkpoint's tower; otherwise the weights are random, always the same for a model and device.
    """
    if weights:
        tower = _load_tower(model, dtype).to(device)
    else:
        config = vision_config(model)
        torch.manual_seed(0)
        with device:
            tower = tower_class(config)(config)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(dtype)
    return tower.eval().requires_grad_(False)


def _load_tower(model: str, dtype: torch.dtype) -> nn.Module:
    try:
        loaded = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"expected a checkpoint's folder or hub id for its weights, got {model!r}: {reason}"
        ) from error
    found = next(find_towers(loaded), None)
    if found is None:
        raise ValueError(f"expected a checkpoint with a supported vision tower, found none in {model!r}")
    return found[1]


def matrix_flops(tower: Any, grid: Grid) -> int:
    """Floating-point operations of all matrix products of one forward, two per multiply-add.

    Patch embed, every linear of the blocks and mergers (deepstack's included), and for attention q k^T and weights v:
    4 L^2 E per segment of L rows, segments being windows in window layers and frames in the others.
    """
    family = family_of_tower(tower)
    metadata = build(grid, family.geometry(tower))
    squares = {
        kind: int(np.square(segments.lengths_S, dtype=np.int64).sum()) for kind, segments in metadata.segments().items()
    }
    parts = family.parts(tower)
    flops = 2 * metadata.rows * parts.projection.weight.numel()
    for index, block in enumerate(parts.blocks):
        width = block.attention.num_heads * block.attention.head_dim
        flops += 2 * metadata.rows * _linear_weights(block.module)
        flops += 4 * width * squares["full" if parts.full(index) else "window"]
    if parts.downsample is not None:
        flops += 2 * metadata.merged * parts.downsample.weight.numel()
    return int(flops + 2 * metadata.merged * sum(map(_linear_weights, parts.mergers())))


def _linear_weights(module: nn.Module) -> int:
    """Weights that each row meets: of a mixture of experts, those of the chosen ones."""
    experts = getattr(module, "experts", None)
    if experts is not None:
        each = sum(parameter[0].numel() for parameter in experts.parameters())
        return int(each * module.gate.top_k + module.gate.weight.numel())  # type: ignore[union-attr, operator]
    own = module.weight.numel() if isinstance(module, nn.Linear) else 0
    return own + sum(map(_linear_weights, module.children()))


def family_of_tower(tower: nn.Module) -> Family:
    """The family of what is known to be a tower."""
    family = family_of(tower)
    assert family is not None
    return family


def weight_of(tower: nn.Module) -> Tensor:
    """The weight of the patch embedding: a row of it is as wide as a patch."""
    return family_of_tower(tower).parts(tower).projection.weight
