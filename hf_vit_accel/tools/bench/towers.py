"""Builds what is timed: towers in the shapes of public checkpoints, inputs by name or literal; counts their FLOPs."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.utils.hub import has_file

from hf_vit_accel import machine
from hf_vit_accel.families import FAMILIES, Config, Family, Tower, family_of, find_towers
from hf_vit_accel.layout import Grid, build

PEAK = 790.0
"""TFLOP/s that the floor assumes on an H200: what large bf16 matrix products reach there."""

_QWEN2: dict[str, object] = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, patch_size=14)
_QWEN2_5: dict[str, object] = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14)
_QWEN2_5 |= dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
_QWEN3: dict[str, object] = dict(num_heads=16, patch_size=16, num_position_embeddings=2304)
_QWEN3_SMALL = _QWEN3 | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
_QWEN3_LARGE = _QWEN3 | dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])

_SHAPES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen2-vl-2b": ("Qwen2VLVisionConfig", _QWEN2 | dict(hidden_size=1536)),
    "qwen2-vl-7b": ("Qwen2VLVisionConfig", _QWEN2 | dict(hidden_size=3584)),
    "qwen2.5-vl-3b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(out_hidden_size=2048)),
    "qwen2.5-vl-7b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(out_hidden_size=3584)),
    "qwen2.5-vl-32b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=5120)),
    "qwen2.5-vl-72b": ("Qwen2_5_VLVisionConfig", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=8192)),
    "qwen3-vl-2b": ("Qwen3VLVisionConfig", _QWEN3_SMALL | dict(out_hidden_size=2048)),
    "qwen3-vl-4b": ("Qwen3VLVisionConfig", _QWEN3_SMALL | dict(out_hidden_size=2560)),
    "qwen3-vl-8b": ("Qwen3VLVisionConfig", _QWEN3_LARGE | dict(out_hidden_size=4096)),
    # From here on: the defaults of the configs in transformers, whose docstrings name the checkpoint.
    "qwen3.5": ("Qwen3_5VisionConfig", {}),  # Qwen3-VL-8B's without deepstack
    "glm-ocr": ("GlmOcrVisionConfig", {}),
    "glm-4.1v-9b": ("Glm4vVisionConfig", {}),
    "glm-4.5v": ("Glm4vMoeVisionConfig", {}),
    "glm-5.3-flash": ("Glm5NextVisionConfig", {}),
    "paddleocr-vl": ("PaddleOCRVisionConfig", {}),
    "ernie-4.5-vl": ("Ernie4_5_VLMoeVisionConfig", {}),
    "dots3-note": ("Dots3NoteVisionConfig", {}),
    # The defaults of the next two configs have a width of 3584, which no tower has. Omni's tower is Qwen2.5-VL's
    # (windows of 112, MLPs of 3420, head dim 80). EXAONE's shape is not published: assumed the same, 8 heads of keys.
    "qwen2.5-omni-7b": ("Qwen2_5OmniVisionEncoderConfig", _QWEN2_5 | dict(out_hidden_size=3584)),
    "exaone-4.5": ("Exaone4_5_VisionConfig", _QWEN2_5 | dict(out_hidden_size=5120)),
}


def _config_class(name: str) -> Callable[..., object] | None:
    """Return the class of a vision config by its name, also where transformers does not export it; None without one."""
    for family in FAMILIES:
        for module, _ in family.towers:
            try:
                configs = importlib.import_module(module.replace(".modeling_", ".configuration_"))
            except ImportError:  # this transformers lacks the model
                continue
            if hasattr(configs, name):
                kind: Callable[..., object] = getattr(configs, name)
                return kind
    return None


SHAPES = {model: shape for model, shape in _SHAPES.items() if _config_class(shape[0]) is not None}
"""Name -> class of the vision config in transformers and its arguments, if the installed transformers has the class."""

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
    """Return the name and the grid of a size.

    Args:
        text: A name of `SIZES` ("^2" stands for "²"), or a literal like `1x64x64*16+8x36x64`.
            In a literal, t x h x w count patches, `*n` repeats and `+` joins.

    Raises:
        ValueError: The text is neither.
    """
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
    """Return a vision config.

    Args:
        model: A built-in shape, a checkpoint (folder or hub id) or a config.json.

    Raises:
        ValueError: There is no such model.
    """
    if model in SHAPES:
        name, arguments = SHAPES[model]
        kind = _config_class(name)
        assert kind is not None
        return kind(**arguments)
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


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the TFLOP/s of large matrix products on a GPU, or None for a CPU.

    It is measured, except in bf16 on an H200 (`PEAK`).
    """
    if device.type != "cuda":
        return None
    if dtype == torch.bfloat16 and "H200" in machine.cuda_device_name():
        return PEAK
    size = 8192
    best_seconds = float("inf")
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.mm(a, b)
        torch.cuda.synchronize()
        best_seconds = min(best_seconds, time.perf_counter() - begin)
    return 2 * size**3 / best_seconds / 1e12


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
    """Build a tower as `from_pretrained` leaves it, without gradients. Buffers such as rotary frequencies stay fp32.

    Args:
        model: See `vision_config`.
        weights: Load the checkpoint's weights. Otherwise they are random, and equal for equal model and device.
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
    """Load a checkpoint and return its vision tower."""
    try:
        loaded = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"cannot load weights of {model!r}: pass a checkpoint's folder or hub id ({reason})"
        ) from error
    for _, tower, _ in find_towers(loaded):
        return tower
    raise ValueError(f"{model!r} has no supported vision tower: pass a checkpoint that has one")


def matrix_flops(tower: Tower, grid: Grid) -> int:
    """Count the floating-point operations of all matrix products of one forward, two per multiply-add.

    Counted are the patch embedding, every linear of the blocks and mergers (deepstack's included), and attention.
    Attention (q k^T, and weights times v) takes 4 L^2 E per segment of L rows. Segments are windows in window layers,
    and frames in the others.
    """
    family = family_of_tower(tower)
    metadata = build(grid, family.geometry(tower))
    squared_rows = {}
    for kind, segments in metadata.segments().items():
        squared_rows[kind] = int(np.square(segments.lengths_S, dtype=np.int64).sum())
    parts = family.parts(tower)
    flops = 2 * metadata.rows * parts.projection.weight.numel()
    for index, block in enumerate(parts.blocks):
        width = block.attention.num_heads * block.attention.head_dim
        flops += 2 * metadata.rows * _linear_weights(block.module)
        flops += 4 * width * squared_rows["full" if parts.full(index) else "window"]
    if parts.downsample is not None:
        flops += 2 * metadata.merged * parts.downsample.weight.numel()
    for merger in parts.mergers():
        flops += 2 * metadata.merged * _linear_weights(merger)
    return int(flops)


def _linear_weights(module: nn.Module) -> int:
    """Count the weights that a row is multiplied with; in a mixture of experts, those of the chosen experts."""
    experts = getattr(module, "experts", None)
    if experts is not None:
        weights_per_expert = sum(parameter[0].numel() for parameter in experts.parameters())
        return int(weights_per_expert * module.gate.top_k + module.gate.weight.numel())  # type: ignore[union-attr, operator]
    weights = module.weight.numel() if isinstance(module, nn.Linear) else 0
    for child in module.children():
        weights += _linear_weights(child)
    return weights


def family_of_tower(tower: nn.Module) -> Family:
    """Return the family of a supported tower."""
    family = family_of(tower)
    assert family is not None
    return family


def weight_of(tower: nn.Module) -> Tensor:
    """Return the weight of the patch embedding; a row of it is as wide as a patch."""
    return family_of_tower(tower).parts(tower).projection.weight
