"""Amax for FP8 attention, found over a user's own images: `calibrate`.

`T` packed patch rows, `P` pixels of a patch, `L` layers, `H` heads; 3 stands for q, k, v.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.api import patched, silent_layers
from hf_vit_accel.backends import FP8
from hf_vit_accel.config import Fp8Config
from hf_vit_accel.ops.fp8.scales import Amax
from hf_vit_accel.status import towers_of
from hf_vit_accel.tower.state import state_of

_PIXELS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


def calibrate(
    model: nn.Module, images: Iterable[Mapping[str, Any]], path: str | os.PathLike[str], *, margin: float = 2.0
) -> Path:
    """Find the absolute maxima of q, k and v over images of yours, and write a file for `Fp8Config(amax_file=...)`.

    images: what the model's processor returns, one call after the other, with pixel_values and image_grid_thw or with
    pixel_values_videos and video_grid_thw; rows as wide as the tower's patches. path: of the JSON file, whose path is
    returned. margin: what the amax are multiplied by before they are used; e4m3 loses nothing by a few powers of two.

    The tower runs with attention in FP8 at every length meanwhile; afterwards it is patched as it was, or not at all.

    Raises ValueError for a model with several towers, no images, images without pixels, too large for FP8 or without
    finite features, and a margin that is no finite number of at least 1; BackendUnavailableError where FP8 cannot run;
    FallbackError for a tower that cannot be served.
    """
    if not 1 <= margin < math.inf:
        raise ValueError(f"expected a finite margin of at least 1, got {margin!r}")
    (_, tower, family), *others = towers_of(model)
    if others:
        raise ValueError("expected a model with one vision tower, got several; pass the tower itself")
    largest = torch.zeros((), device="cpu")
    # Of a call in passes, only the last would be looked at.
    with patched(tower, fp8=Fp8Config(min_seqlen=0), max_rows=None, strict=True), torch.no_grad():
        weight, state = family.parts(tower).projection.weight, state_of(tower)
        assert state is not None
        scales = state.scales(state.snapshot(tower), weight.device)
        scales.watch()
        for each in images:
            given: Mapping[str, Any] = each if isinstance(each, Mapping) else {}
            found: list[Any] = [(given.get(pixels), given.get(grid)) for pixels, grid in _PIXELS]
            found = [one for one in found if one[0] is not None]
            if not found or not all(isinstance(pixels, Tensor) for pixels, _ in found):
                raise ValueError(
                    "expected a list of what a processor returns with return_tensors='pt', with 'pixel_values' and "
                    f"'image_grid_thw' or their videos' names, got {type(each).__name__} with {sorted(given)}"
                )
            for pixels_TP, grid_thw in found:
                tower(family.pixels(tower, pixels_TP.to(weight.device, weight.dtype).flatten(1)), grid_thw=grid_thw)
                assert state.last is not None
                choice = state.last.choices["full"]
                if choice.backend is not FP8:  # its amax were not looked at: zeros, or those of the call before
                    raise ValueError(f"expected images that FP8 can attend to: {choice.not_worth}; pass fewer at once")
                largest = largest.maximum(scales.seen())
    if not largest.dim():
        raise ValueError("expected at least one image to calibrate with, got none")
    amax = Amax(amax_L3H=largest, margin=float(margin), model=family.name)
    if silent := silent_layers(amax, tower, family):
        layers = ", ".join(map(str, silent))
        raise ValueError(
            f"expected images whose features are finite, got zeros or what is not finite in layers {layers}"
        )
    return amax.save(path)
