"""Decode pictures of any format and mode to upright RGB, and videos to frames."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose
from transformers import video_utils
from transformers.video_utils import VideoMetadata

if TYPE_CHECKING:
    from transformers import ProcessorMixin
    from transformers.video_processing_utils import BaseVideoProcessor


REFUSE_ABOVE = 89_478_485
"""Pictures of more pixels are refused. Pillow warns of a decompression bomb above this limit, and refuses twice it."""
Resize = Callable[[int, int], tuple[int, int] | None]  # width and height to smaller ones; None keeps the picture
_DRAFT_SCALE = 2  # JPEGs are decoded at an eighth, quarter or half of their size if this many times the target remain
LARGE = 1 << 22  # pixels
_large_pictures = Semaphore(4)
"""Few large pictures are decoded at a time, which bounds the memory: one takes up to 24 bytes a pixel meanwhile."""
_DEFAULT_FPS = 2.0  # that of qwen-vl-utils, for the processors of Qwen2-VL and Qwen2.5-VL, which name none
_ORIENTATION = 0x0112
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# Pillow opens more formats. PostScript is not among these: Pillow would give such a file to Ghostscript to run.
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


def _open(file: BinaryIO) -> Image.Image:
    Image.init()
    try:
        # An open file, no name: by name, Pillow 13 scrambles uncompressed TIFFs whose orientation swaps the sides.
        image = Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        raise ValueError("not an image in a format that Pillow reads here") from None
    _check_size(*_upright(image))
    return image


def _check_size(width: int, height: int) -> None:
    if width * height > REFUSE_ABOVE:
        raise ValueError(f"{width} x {height} pixels, the limit is {REFUSE_ABOVE}")


def upright_size(file: BinaryIO) -> tuple[int, int]:
    """Return width and height of the upright picture, from its header. Raises as `read_image` does."""
    return _upright(_open(file))


def _upright(image: Image.Image) -> tuple[int, int]:
    # Pillow turns TIFFs itself, and reports their upright size.
    is_swapped = image.format != "TIFF" and _orientation(image) in range(5, 9)
    return (image.height, image.width) if is_swapped else (image.width, image.height)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 where there is none or the EXIF data is damaged."""
    try:
        # The base class's method: a PNG's own `getexif` decodes the picture first, to find EXIF data behind it.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # SyntaxError, struct.error and KeyError among others
        return 1


def read_image(file: BinaryIO, resize: Resize | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """Decode a picture to RGB, turned upright by its EXIF orientation; of an animation the first frame."""
    image = _open(file)
    size = _upright(image)
    target = resize(*size) if resize else None
    if target is not None:
        stored = target if size == image.size else target[::-1]
        image.draft(None, (_DRAFT_SCALE * stored[0], _DRAFT_SCALE * stored[1]))
    with _large_pictures if image.width * image.height > LARGE else nullcontext():
        image.load()
        # `ImageOps.exif_transpose` would write the EXIF data anew, and fails where that is odd.
        turn = _TURNS.get(_orientation(image))
        image = to_rgb(image if turn is None else image.transpose(turn))
        # A damaged file may hold a smaller picture than its header says: the processor resizes that one.
        if target is not None and target[0] <= image.width and target[1] <= image.height:
            image = image.resize(target, Image.Resampling.BICUBIC)
    return image, size


def read_bytes(file: BinaryIO, resize: Resize | None = None) -> tuple[torch.Tensor, tuple[int, int]]:
    """Read a picture as `read_image` does, as bytes (H, W, 3).

    torchvision decodes plain JPEGs to the same bytes, and leaves the interpreter to the model's thread meanwhile.
    """
    image = _open(file)
    size = _upright(image)
    is_plain = image.format == "JPEG" and image.mode == "RGB" and _orientation(image) == 1
    if is_plain and (resize is None or resize(*size) is None):
        from torchvision.io import decode_jpeg

        file.seek(0)
        encoded = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        with suppress(Exception), _large_pictures if image.width * image.height > LARGE else nullcontext():
            return decode_jpeg(encoded).permute(1, 2, 0), size
    file.seek(0)  # whatever torchvision refuses, Pillow reads or says why not
    image, size = read_image(file, resize)
    return torch.from_numpy(np.array(image)), size


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB, with 16-bit greys scaled to 8 bits and transparency laid on white."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined white")
    if image.mode.startswith("I"):  # Pillow opens a 16-bit PGM as "I"; `convert` would clip greys at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def read_frames(file: BinaryIO, suffix: str, processor: ProcessorMixin) -> tuple[np.ndarray, VideoMetadata]:
    """Decode the frames of a video that the processor samples, by one of transformers' decoders.

    Other frames are not kept: all frames of a minute in full HD are 11 GB.
    """
    has_torchcodec = video_utils.is_torchcodec_available()
    has_decoder = has_torchcodec or video_utils.is_av_available()
    if not has_decoder or getattr(processor, "video_processor", None) is None:
        raise ValueError("videos need a decoder (pip install av) and the torchvision that belongs to your torch")
    decoder = "torchcodec" if has_torchcodec else "pyav"
    if hasattr(file, "name"):
        return _load_video(str(file.name), decoder, processor.video_processor)
    # The decoders need a path, and this file is in memory.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{suffix}"
        path.write_bytes(file.read())
        try:
            return _load_video(str(path), decoder, processor.video_processor)
        except Exception as error:  # the folder has another name in every run, and records must be equal
            raise ValueError(f"{type(error).__name__}: {error}".replace(folder, "")) from None


def _load_video(path: str, decoder: str, video_processor: BaseVideoProcessor) -> tuple[np.ndarray, VideoMetadata]:
    def sample(metadata: VideoMetadata, **_: object) -> np.ndarray:
        # pyav finds no number of frames in most `.webm` and `.mkv` files.
        if not metadata.total_num_frames:
            reason = f"{decoder} does not find out how many frames there are"
            raise ValueError(f"{reason}: the file is damaged or no video, or needs torchcodec (pip install torchcodec)")
        _check_size(metadata.width, metadata.height)
        count = getattr(video_processor, "num_frames", None)
        if count:
            return video_processor.sample_frames(metadata, num_frames=count)
        return video_processor.sample_frames(metadata, fps=getattr(video_processor, "fps", None) or _DEFAULT_FPS)

    frames, metadata = video_utils.load_video(path, backend=decoder, sample_indices_fn=sample)
    expected = len(metadata.frames_indices)
    if len(frames) < expected - 1:  # containers often claim one frame too many
        raise ValueError(f"the video ends early: it has {len(frames)} of {expected} frames")
    metadata.frames_indices = metadata.frames_indices[: len(frames)]
    return frames, metadata
