"""Image processors that return bytes, for towers that rescale and normalise them.

Bytes take a quarter of the memory of fp32 pixels, and leave a processor on the CPU less to do.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from hf_vit_accel.config import Normalisation

Processor = Any
"""An image or video processor of transformers."""
References = tuple["weakref.ref[Processor]", ...]

FLAGS = ("do_rescale", "do_normalize")
_READ = (*FLAGS, "rescale_factor", "image_mean", "image_std", "model_input_names")
BYTES_UNKNOWN = (
    "expected normalised pixel values, got bytes (uint8), which the tower would take for pixel values; call "
    "hf_vit_accel.patch(model, processor=processor), or let the processor rescale and normalise"
)
_BAR = 1e-5
"""The largest difference of pixel values that is rounding of fp32."""


class LeftToTower(int):
    """The value of a processor's flag for work that its tower does: false, but 1 in a config that is saved.

    Trainers save their processor with each checkpoint (`Trainer._save`). Who loads it has another tower.
    """

    def __bool__(self) -> bool:
        return False


def parts_of(processor: Processor) -> list[Processor]:
    """Return the image processor and the video processor in a processor, or itself."""
    found = [getattr(processor, name, None) for name in ("image_processor", "video_processor")]
    parts = [part for part in found if part is not None] or [processor]
    for part in parts:
        if not all(hasattr(part, name) for name in _READ):
            raise ValueError(
                f"expected processor to be the model's processor or its image processor, got {type(part).__name__}"
            )
    return parts


def normalisation_of(processor: Processor) -> Normalisation:
    """Return how a processor normalises; each of its parts runs on noise both ways, and must agree."""
    normalisations = {_normalisation_of(part) for part in parts_of(processor)}
    if len(normalisations) > 1:
        raise ValueError("expected one mean and std in processor, but images and videos are normalised differently")
    return normalisations.pop()


def _normalisation_of(part: Processor) -> Normalisation:
    name = type(part).__name__
    if any(not getattr(part, flag) and not isinstance(getattr(part, flag), LeftToTower) for flag in FLAGS):
        raise ValueError(f"expected a processor that rescales and normalises, but {name} is set to leave that out")
    scale = 1 / part.rescale_factor
    mean, std = ((torch.tensor(values) * scale).tolist() for values in (part.image_mean, part.image_std))
    normalisation = Normalisation(mean=tuple(mean), std=tuple(std))
    pixels = _run(part, do_rescale=True, do_normalize=True)
    in_bytes = _run(part, do_rescale=False, do_normalize=False)
    if in_bytes.dtype != torch.uint8 or in_bytes.dim() != 2:
        raise ValueError(
            f"{name} returns no bytes without rescaling; install torchvision, whose processors do, or patch without "
            "`processor`"
        )
    if in_bytes.shape != pixels.shape or (normalisation(in_bytes, pixels.dtype) - pixels).abs().max() > _BAR:
        raise ValueError(f"{name} does more than (x - mean) / std for every channel; patch without `processor`")
    return normalisation


def _run(part: Processor, **flags: bool) -> torch.Tensor:
    """Return what an image or video processor makes of noise."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 112, 140, 3), dtype=np.uint8)
    name = part.model_input_names[0]
    if name.endswith("videos"):
        output = part(videos=[frames], return_tensors="pt", do_sample_frames=False, **flags)
    else:
        output = part(images=[frames[0]], return_tensors="pt", **flags)
    pixels: torch.Tensor = output[name]
    return pixels


def leave_to_tower(references: References) -> None:
    """Let processors return bytes."""
    for part in _alive(references):
        for flag in FLAGS:
            setattr(part, flag, LeftToTower(1))


def put_back(references: References) -> None:
    """Let processors rescale and normalise again, unless somebody has set them anew."""
    for part in _alive(references):
        for flag in FLAGS:
            if isinstance(getattr(part, flag), LeftToTower):
                setattr(part, flag, True)


def _alive(references: References) -> list[Processor]:
    return [part for part in (reference() for reference in references) if part is not None]
