"""Decodes pictures of any format and mode to upright RGB, and videos to frames."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Condition
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

__all__ = ["REFUSE_ABOVE", "Gate", "Resize", "TooLarge", "read_frames", "read_image", "to_rgb", "upright_size"]

# Pillow's own limit: beyond it, it warns of a decompression bomb; beyond twice as many pixels, it refuses to open.
REFUSE_ABOVE = 89_478_485
Resize = Callable[[int, int], tuple[int, int] | None]
"""From a picture's upright width and height: those that it may be reduced to; None to keep it as it is."""
_GAP = (
    2  # a JPEG is decoded at an eighth, a quarter or half its size if that leaves so many pixels for each that is kept
)
_FPS = 2.0  # qwen-vl-utils' own, for processors that name none (Qwen2-VL's and Qwen2.5-VL's)
_ORIENTATION = 0x0112
_TURNS = dict(
    enumerate(
        (
            *(Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE),
            *(Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90),
        ),
        start=2,
    )
)
# Not all that Pillow opens: a file with a picture's name may be PostScript, which Pillow gives to Ghostscript to run.
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


class TooLarge(ValueError):
    """A picture that is not decoded, as it has more pixels than are allowed. width, height: None where unknown."""

    def __init__(self, limit: int, width: int | None = None, height: int | None = None, pixels: str = "") -> None:
        super().__init__(f"{pixels or f'{width} x {height}'} pixels, the limit is {limit}")
        self.width, self.height = width, height


class Gate:
    """Lets only so many bytes be in use at a time; who wants more than there are is let in alone."""

    def __init__(self, size: int) -> None:
        self.size, self.used, self._changed = size, 0, Condition()

    @contextmanager
    def __call__(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self.size)
        with self._changed:
            self._changed.wait_for(lambda: self.used + wanted <= self.size)
            self.used += wanted
        try:
            yield
        finally:
            with self._changed:
                self.used -= wanted
                self._changed.notify_all()


def _open(file: BinaryIO, refuse_above: int) -> Image.Image:
    if not file.seek(0, 2):
        raise ValueError("the file is empty")
    file.seek(0)
    Image.init()
    try:
        # Given an open file: by name, Pillow 13 scrambles uncompressed TIFFs whose orientation swaps the sides.
        image = Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        raise ValueError("not an image in a format that Pillow reads here") from None
    except Image.DecompressionBombError as error:
        found = re.search(r"\((\d+) pixels\)", str(error))
        raise TooLarge(refuse_above, pixels=found[1] if found else "too many") from None
    if image.width * image.height > refuse_above:
        raise TooLarge(refuse_above, *_upright(image))
    return image


def upright_size(file: BinaryIO, refuse_above: int = REFUSE_ABOVE) -> tuple[int, int]:
    """Width and height of the upright picture, from its header. Raises as `read_image` does."""
    return _upright(_open(file, refuse_above))


def _upright(image: Image.Image) -> tuple[int, int]:
    # Pillow turns TIFFs itself, and gives their upright size.
    swapped = image.format != "TIFF" and _orientation(image) in range(5, 9)
    return (image.height, image.width) if swapped else (image.width, image.height)


def _orientation(image: Image.Image) -> int:
    """By the EXIF data, 1 without. Damaged EXIF data is no reason to do without the picture."""
    try:
        # The base class's: a PNG's own `getexif` decodes the picture first, to find what stands behind it.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # among them SyntaxError, struct.error, KeyError
        return 1


def read_image(
    file: BinaryIO, refuse_above: int = REFUSE_ABOVE, resize: Resize | None = None, gate: Gate | None = None
) -> tuple[Image.Image, tuple[int, int]]:
    """The picture (of an animation the first), turned upright by its EXIF orientation, as RGB; and its full size.

    resize: what it is reduced to, JPEGs in part while they are decoded. gate: waits until the memory is free.
    Raises ValueError for a file that is empty or not an image, TooLarge for one above `refuse_above`, and whatever
    Pillow's decoders raise for damaged data.
    """
    image = _open(file, refuse_above)
    size = _upright(image)
    target = resize(*size) if resize else None
    if target is not None:
        stored = target if size == image.size else target[::-1]
        image.draft(None, (_GAP * stored[0], _GAP * stored[1]))
    channels = 4 if image.mode in ("RGB", "L", "P", "1") and not image.has_transparency_data else 12
    with gate(image.width * image.height * channels * 2) if gate else nullcontext():
        image.load()
        # Not `ImageOps.exif_transpose`, which writes the EXIF data anew and fails where that is odd.
        turn = _TURNS.get(_orientation(image))
        image = to_rgb(image if turn is None else image.transpose(turn))
        # A damaged file may hold another size than it says: that is left to the processor.
        if target is not None and target[0] <= image.width and target[1] <= image.height:
            image = image.resize(target, Image.Resampling.BICUBIC)
    return image, size


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to RGB, with 16-bit greys scaled to 8 bits and transparency laid on white."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined white")
    if image.mode.startswith("I"):  # 16-bit grey ("I" is how Pillow opens a 16-bit PGM); `convert` would clip at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def read_frames(file: BinaryIO, suffix: str, processor: Any, refuse_above: int = REFUSE_ABOVE) -> tuple[Any, Any]:
    """The frames of a video that the processor samples, and their metadata, by one of transformers' decoders.

    No other frame is kept: all those of a minute in full HD are 11 GB. Raises ValueError where a package is missing,
    for a file that is empty, TooLarge for frames above `refuse_above`, and whatever the decoder raises for damaged
    data.
    """
    if getattr(processor, "video_processor", None) is None:
        raise ValueError("videos need torchvision and a decoder: pip install torchvision av")
    from transformers import video_utils

    available = [
        name
        for name, present in (
            ("torchcodec", video_utils.is_torchcodec_available()),
            ("pyav", video_utils.is_av_available()),
            ("opencv", video_utils.is_cv2_available()),
        )
        if present
    ]
    if not available:
        raise ValueError("videos need a decoder: pip install av")

    if not file.seek(0, 2):
        raise ValueError("the file is empty")

    def sample(metadata: Any, **_: Any) -> Any:
        # pyav finds none in most of `.webm` and `.mkv`, opencv -1 in damaged data.
        if (metadata.total_num_frames or 0) <= 0:
            raise ValueError(f"{available[0]} does not find out how many frames there are: pip install torchcodec")
        if metadata.width * metadata.height > refuse_above:
            raise TooLarge(refuse_above, metadata.width, metadata.height)
        videos = processor.video_processor
        if count := getattr(videos, "num_frames", None):
            return videos.sample_frames(metadata, num_frames=count)
        return videos.sample_frames(metadata, fps=getattr(videos, "fps", None) or _FPS)

    def load(path: str) -> tuple[Any, Any]:
        frames, metadata = video_utils.load_video(path, backend=available[0], sample_indices_fn=sample)
        wanted = len(metadata.frames_indices)
        if len(frames) < wanted - 1:  # one frame too many is what containers often tell
            raise ValueError(f"the video ends early: it has {len(frames)} of {wanted} frames")
        metadata.frames_indices = metadata.frames_indices[: len(frames)]
        return frames, metadata

    if hasattr(file, "name"):  # the decoders want a path
        return load(str(file.name))
    file.seek(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{suffix}"
        path.write_bytes(file.read())
        try:
            return load(str(path))
        except TooLarge:
            raise
        except Exception as error:  # the folder's name is another in every run, its records are not
            raise ValueError(f"{type(error).__name__}: {error}".replace(folder, "")) from None
