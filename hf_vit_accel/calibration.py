"""`calibrate`: measure the absolute maxima (amax) that scale FP8 attention, over a user's own images.

`T` packed patch rows, `P` pixels of a patch, `L` layers, `H` heads; 3 stands for q, k, v.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.api import patched
from hf_vit_accel.backends import FP8, require_fp8
from hf_vit_accel.backends.cudnn_fp8 import silent_layers
from hf_vit_accel.config import Amax, Fp8Config
from hf_vit_accel.status import towers_of
from hf_vit_accel.tower.state import state_of

_INPUT_NAMES = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


def calibrate(
    model: nn.Module, images: Iterable[Mapping[str, object]], path: str | os.PathLike[str], *, margin: float = 2.0
) -> Path:
    """Measure the absolute maxima of q, k and v over your images, and write a file for `Fp8Config(amax_file=...)`.

    Meanwhile the tower runs with attention in FP8 at every length. Afterwards it is patched as before, or not at all.

    Args:
        model: A model with one vision tower, or the tower itself.
        images: The outputs of the model's processor, one call after the other. Each has pixel_values and
            image_grid_thw, or pixel_values_videos and video_grid_thw; the rows are as wide as the tower's patches.
        path: The JSON file to write.
        margin: The factor by which the maxima are multiplied when they are used. e4m3 loses no precision by a few
            powers of two.

    Returns:
        The path of the file.

    Raises:
        ValueError: If the model has several towers, if there are no images, or if the margin is below 1 or infinite.
            Also if images have no pixels, no finite features, or are too large for FP8.
        BackendUnavailableError: If FP8 cannot run on this machine.
        FallbackError: If the tower cannot take the fast path.
    """
    if not isinstance(margin, Real) or not 1 <= margin < math.inf:
        raise ValueError(f"expected a finite margin of at least 1, got {margin!r}")
    towers = towers_of(model)
    if len(towers) > 1:
        raise ValueError(f"expected a model with one vision tower, got {len(towers)}; pass the tower itself")
    require_fp8()
    _, tower, family = towers[0]
    largest_L3H: Tensor | None = None
    # One pass, since the scales would hold the maxima of the last pass only.
    with patched(tower, fp8=Fp8Config(min_seqlen=0), max_rows=None, strict=True), torch.no_grad():
        state = state_of(tower)
        assert state is not None
        weight = family.parts(tower).projection.weight
        scales = state.kept(state.snapshot(tower), weight.device)
        scales.record_amax()
        for call in images:
            for pixels_TP, grid_thw in _pixels_and_grids(call):
                tower(family.pixels(tower, pixels_TP.to(weight.device, weight.dtype).flatten(1)), grid_thw=grid_thw)
                assert state.last_route is not None
                choice = state.last_route.choices["full"]
                if choice.backend is not FP8:  # the scales hold zeros, or the maxima of the call before
                    raise ValueError(f"expected images that FP8 can attend to: {choice.not_worth}; pass fewer at once")
                seen_L3H = scales.recorded_amax()
                largest_L3H = seen_L3H if largest_L3H is None else largest_L3H.maximum(seen_L3H)
    if largest_L3H is None:
        raise ValueError("No images given: `images` is empty. Pass at least one image or video.")
    amax = Amax(amax_L3H=largest_L3H, margin=float(margin), model=family.name)
    silent = silent_layers(amax, family.parts(tower))
    if silent:
        layers = ", ".join(str(layer) for layer in silent)
        raise ValueError(
            f"expected images whose features are finite, got zeros or what is not finite in layers {layers}"
        )
    return amax.save(path)


def _pixels_and_grids(call: object) -> list[tuple[Tensor, object]]:
    """Return the pixels and the grid of the images, and of the videos, in one output of a processor."""
    inputs: Mapping[str, Any] = call if isinstance(call, Mapping) else {}
    pairs = [(inputs[pixels], inputs.get(grid)) for pixels, grid in _INPUT_NAMES if inputs.get(pixels) is not None]
    if not pairs or not all(isinstance(pixels, Tensor) for pixels, _ in pairs):
        raise ValueError(
            "expected a list of what a processor returns with return_tensors='pt', with 'pixel_values' and "
            f"'image_grid_thw' or their videos' names, got {type(call).__name__} with {sorted(inputs)}"
        )
    return pairs
