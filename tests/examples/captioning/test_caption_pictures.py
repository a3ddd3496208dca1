"""Decoding: every format and mode to upright RGB; damaged, hostile and huge files to errors."""

import io
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import PIL
import pytest
from captioner import pictures
from captioner.batches import Task
from captioner.items import Item
from captioner.pictures import read_bytes, read_image, upright_size
from captioner.worker import Row, decode
from PIL import Image, ImageFile, PngImagePlugin
from programs import encode, png
from support_captioning import PICTURE_PROMPT
from transformers import video_utils

pytestmark = pytest.mark.filterwarnings("ignore::Warning:PIL")  # warns of damaged metadata, and of bombs


@pytest.fixture(scope="module")
def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))


def read(data: bytes) -> np.ndarray:
    return np.asarray(read_image(io.BytesIO(data))[0])


def decoded(tmp_path: Path, data: bytes, name: str = "file.png", processor: object = None) -> Row:
    """Write a file and decode it as the worker does."""
    (tmp_path / name).write_bytes(data)
    item = Item(key=name, file=str(tmp_path / name), kind="video" if name.endswith("mp4") else "image")
    return decode(Task(item=item, prompts=(PICTURE_PROMPT,), tokens=0), processor)


@pytest.mark.parametrize("format", ["PNG", "PPM", "TIFF", "JPEG2000"])
def test_16_bit_greys_are_scaled(format: str) -> None:
    grey = np.array([[0, 257], [32768, 65535]], dtype=np.uint16)
    options = {"irreversible": False} if format == "JPEG2000" else {}
    assert read(encode(Image.fromarray(grey), format, **options)).tolist() == [
        [[0] * 3, [1] * 3],
        [[127] * 3, [255] * 3],
    ]


def test_transparency_is_laid_on_white() -> None:
    colour = (10, 20, 30)
    clear = (40, 50, 60)
    rgba = Image.new("RGBA", (2, 1), (*colour, 255))
    rgba.putpixel((1, 0), (*clear, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette(colour + clear)
    palette.putpixel((1, 0), 1)
    grey = Image.new("LA", (2, 1), (20, 255))
    grey.putpixel((1, 0), (40, 0))
    for data in (encode(rgba), encode(palette, transparency=1), encode(palette, "GIF", transparency=1)):
        assert read(data).tolist() == [[[10, 20, 30], [255] * 3]]
    assert read(encode(rgba, "WEBP", lossless=True)).tolist() == [[[10, 20, 30], [255] * 3]]
    assert read(encode(grey)).tolist() == [[[20] * 3, [255] * 3]]
    rgba.putpixel((1, 0), (0, 0, 0, 51))
    assert read(encode(rgba)).tolist() == [[[10, 20, 30], [204] * 3]]


_YCBCR = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow reads no such TIFF before 13")


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", pytest.param("YCbCr", marks=_YCBCR), "I", "F", "LAB"])
def test_modes(noise: Image.Image, mode: str) -> None:
    image = noise.convert("RGB" if mode == "LAB" else mode)
    if mode == "LAB":
        image = Image.frombytes("LAB", image.size, image.tobytes())
    data = encode(image, "TIFF")
    if mode == "F":
        with pytest.raises(ValueError):
            read(data)
    else:
        assert read(data).shape == (64, 96, 3)
    if mode == "CMYK":  # in JPEG files the inks are stored the other way round
        assert np.abs(read(encode(image, "JPEG", quality=100)).astype(int) - read(data)).mean() < 3


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
def test_orientations_turn_the_pixels(format: str) -> None:
    upright = Image.new("RGB", (48, 32), "black")
    upright.paste("white", (0, 0, 48, 8))
    upright.paste("grey", (0, 0, 12, 32))
    turns = [None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM]
    turns += [
        Image.Transpose.TRANSPOSE,
        Image.Transpose.ROTATE_90,
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_270,
    ]
    for number, turn in enumerate(turns, start=1):
        stored = upright if turn is None else upright.transpose(turn)
        exif = Image.Exif()
        exif[0x0112] = number
        data = encode(stored, format, exif=exif, **({"quality": 95} if format == "JPEG" else {}))
        assert np.abs(read(data) - np.asarray(upright).astype(int)).mean() < 3
        assert upright_size(io.BytesIO(data)) == (48, 32)


def test_damaged_exif_data_costs_no_picture(noise: Image.Image) -> None:
    chance = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x8298] = "somebody"
    exif.get_ifd(0x8769)[0x9003] = "2020:01:01 00:00:00"
    blob = exif.tobytes()
    for _ in range(100):
        broken = bytearray(blob)
        for _ in range(chance.randint(1, 6)):
            broken[chance.randrange(6, len(blob))] = chance.randrange(256)
        for format in ("PNG", "WEBP", "JPEG"):
            data = encode(noise, format, exif=bytes(broken))
            assert read(data).shape in ((64, 96, 3), (96, 64, 3))
            assert upright_size(io.BytesIO(data)) in ((96, 64), (64, 96))


def test_headers_are_enough_for_sizes(noise: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {format: encode(noise, format, exif=exif) for format in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")}
    plain = {format: encode(noise, format) for format in (*turned, "BMP", "PPM", "JPEG2000")}
    loads: list[str] = []
    for kind in (ImageFile.ImageFile, PngImagePlugin.PngImageFile):
        monkeypatch.setattr(kind, "load", lambda image: loads.append(image.format))
    assert {upright_size(io.BytesIO(data)) for data in turned.values()} == {(64, 96)}
    assert {upright_size(io.BytesIO(data)) for data in plain.values()} == {(96, 64)}
    assert not loads


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_animations_give_their_first_frame(format: str) -> None:
    colours = ["red", "lime", "blue"] * 20
    first, *other_frames = (Image.new("RGB", (8, 8), colour) for colour in colours)
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(first, format, save_all=True, append_images=other_frames, **options)
    assert Image.open(io.BytesIO(data)).n_frames == 60
    assert np.abs(read(data).astype(int) - (255, 0, 0)).max() < 8


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {}),
    "progressive jpeg": ("JPEG", {"progressive": True}),
    "cmyk jpeg": ("JPEG", {}),
    "png": ("PNG", {}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "lzw tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "webp": ("WEBP", {}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "ppm": ("PPM", {}),
    "avif": ("AVIF", {}),
    "jpeg 2000": ("JPEG2000", {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_files_are_errors_and_damaged_ones_never_stop_the_run(
    tmp_path: Path, noise: Image.Image, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, options = FORMATS[name]
    data = encode(noise.convert("CMYK") if "cmyk" in name else noise, format, **options)
    assert decoded(tmp_path, data).errors[0] is None
    for share in (0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9):
        row = decoded(tmp_path, data[: int(share * len(data))])
        assert row.errors[0] and row.medium is None and row.bytes == int(share * len(data)), share
    monkeypatch.setattr(pictures, "REFUSE_ABOVE", 100_000)
    data = encode(noise.resize((24, 16)), format, **options)
    chance = random.Random(0)
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(chance.choice([1, 1, 4, 20])):
            broken[chance.randrange(len(data))] = chance.randrange(256)
        row = decoded(tmp_path, bytes(broken))
        assert row.errors[0] or (row.medium.mode == "RGB" and row.medium.size == (row.width, row.height))


# --- JPEGs by torchvision --------------------------------------------------------------------------------------------


JPEGS: dict[str, tuple[str, dict[str, Any]]] = {
    "quality 30": ("RGB", {"quality": 30}),
    "quality 100": ("RGB", {"quality": 100}),
    "4:4:4": ("RGB", {"subsampling": 0}),
    "4:2:0": ("RGB", {"subsampling": 2}),
    "progressive": ("RGB", {"progressive": True}),
    "grey": ("L", {}),
    "cmyk": ("CMYK", {}),
    "turned": ("RGB", {"exif": Image.Exif()}),
}
JPEGS["turned"][1]["exif"][0x0112] = 6


def check_as_pillow(data: bytes) -> None:
    """Check that `read_bytes` gives the bytes and size, or the error, that Pillow gives."""
    try:
        expected, expected_size = read_image(io.BytesIO(data))
    except OSError as error:
        with pytest.raises(type(error)) as raised:
            read_bytes(io.BytesIO(data))
        assert str(raised.value) == str(error)
    else:
        pixels, size = read_bytes(io.BytesIO(data))
        assert np.array_equal(pixels, np.asarray(expected)) and size == expected_size


def check_whole_and_damaged(data: bytes) -> None:
    """Check a JPEG that is whole, cut off, and damaged in the middle. Pillow decodes most of the latter."""
    check_as_pillow(data)
    for share in (0.3, 0.6, 0.9):
        check_as_pillow(data[: int(share * len(data))])
        damage = int(share * len(data))
        check_as_pillow(data[:damage] + bytes(range(100, 120)) + data[damage + 20 :])


@pytest.mark.gpu  # machines with a GPU have torchvision
@pytest.mark.parametrize("name", JPEGS)
def test_torchvision_gives_the_bytes_and_errors_of_pillow(noise: Image.Image, name: str) -> None:
    pytest.importorskip("torchvision")
    mode, options = JPEGS[name]
    check_whole_and_damaged(encode(noise.convert(mode), "JPEG", **options))


def test_bombs_are_refused_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> NoReturn:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    gif = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x00\x00\x00" + b"\x2c" + struct.pack("<HHHH", 0, 0, 9, 9)
    for data in (png(100_000, 100_000), png(12_000, 12_000), png(1 << 30, 1), gif + bytes(9)):
        error = decoded(tmp_path, data).errors[0]
        assert "limit" in error and "pixels" in error, error
        with pytest.raises((ValueError, Image.DecompressionBombError)):
            upright_size(io.BytesIO(data))
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 60000, 60000) + b"\x00\x02\x02\x4c\x01\x00\x3b"
    assert decoded(tmp_path, b"GIF89a" + struct.pack("<HH", 10, 10) + b"\x00\x00\x00" + frame).errors[0]
    monkeypatch.setattr(pictures, "REFUSE_ABOVE", 300_000)
    assert decoded(tmp_path, png(600, 600)).errors[0] == "ValueError: 600 x 600 pixels, the limit is 300000"


def test_videos_need_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_videos = SimpleNamespace(video_processor=SimpleNamespace())
    for has_decoder, processor in ((True, SimpleNamespace()), (False, with_videos)):
        for name in ("torchcodec", "av"):
            monkeypatch.setattr(video_utils, f"is_{name}_available", lambda answer=has_decoder: answer)
        (error,) = decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors
        assert "pip install av" in error and "the torchvision that belongs to your torch" in error


def test_videos_are_read_as_the_processor_samples_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = video_utils.VideoMetadata(total_num_frames=100, fps=25.0, width=6, height=4)
    lost = 0

    def load_video(path: str, backend: str, sample_indices_fn: Callable[..., range]) -> tuple[np.ndarray, object]:
        assert Path(path).read_bytes() == b"clip" and path.endswith(".mp4") and backend == "pyav"
        if not Path(path).is_relative_to(tmp_path):
            raise RuntimeError(f"no video in {path}")
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        return np.zeros((len(metadata.frames_indices) - lost, 4, 6, 3)), metadata

    monkeypatch.setattr(video_utils, "is_torchcodec_available", lambda: False)
    monkeypatch.setattr(video_utils, "is_av_available", lambda: True)
    monkeypatch.setattr(video_utils, "load_video", load_video)
    requests: list[dict[str, float]] = []

    def sample_frames(metadata: object, **options: float) -> range:
        requests.append(options)
        return range(0, 100, 20)

    videos = SimpleNamespace(sample_frames=sample_frames)
    processor = SimpleNamespace(video_processor=videos)
    row = decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    assert row.errors[0] is None and (row.width, row.height) == (6, 4) and len(row.medium.frames) == 5
    videos.fps = 4
    decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    videos.num_frames = 8
    decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    assert requests == [{"fps": 2.0}, {"fps": 4}, {"num_frames": 8}]
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "REFUSE_ABOVE", 20)
        assert "limit is 20" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors[0]
    assert "the file is empty" in decoded(tmp_path, b"", "clip.mp4", processor=processor).errors[0]
    lost = 1
    row = decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    assert len(row.medium.frames) == len(row.medium.metadata.frames_indices) == 4
    lost = 2
    assert "has 3 of 5 frames" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors[0]
    (tmp_path / "clip.tar").write_bytes(b"..clip..")
    member = Item(key="x/clip.mp4", file=str(tmp_path / "clip.tar"), kind="video", offset=2, length=4)
    row = decode(Task(item=member, prompts=("p",), tokens=0), processor)
    assert row.errors == ("ValueError: RuntimeError: no video in /video.mp4",)  # equal in every run
    metadata.total_num_frames = 0
    assert "how many frames" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors[0]
