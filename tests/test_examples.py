"""The example scripts, run as a user runs them: on folders with good and bad files, in one process and in two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import batch_caption  # noqa: E402
import tiny_model  # noqa: E402

PHOTOGRAPHS = ROOT / "examples" / "images"
RUNNER = CliRunner(env={"ACCELERATE_USE_CPU": "true"})
GOOD = {  # path: width and height of the upright image
    "astronaut.jpg": (448, 448),
    "cat.jpg": (451, 300),
    "cmyk.jpg": (96, 64),
    "grey16.png": (96, 64),
    "rgba.png": (96, 64),
    "sub/palette.PNG": (96, 64),
    "sub/rotated.jpg": (64, 96),
}
BAD = {  # path: what its error says
    "empty.jpg": "ValueError: the file is empty",
    "large.png": "ValueError: 600 x 600 pixels, the limit is 300000",
    "noise.jpg": "ValueError: not an image",
    "strip.png": "aspect ratio",
    "truncated.jpg": "OSError: image file is truncated",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files of GOOD and BAD, and others that are no images."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "sub").mkdir()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))
    for name in ("astronaut.jpg", "cat.jpg"):
        (folder / name).write_bytes((PHOTOGRAPHS / name).read_bytes())
    picture.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.linspace(0, 65535, 64 * 96).astype(np.uint16).reshape(64, 96)).save(folder / "grey16.png")
    picture.convert("RGBA").save(folder / "rgba.png")
    picture.convert("P").save(folder / "sub/palette.PNG")
    exif = Image.Exif()
    exif[0x0112] = 8
    picture.save(folder / "sub/rotated.jpg", exif=exif)
    (folder / "empty.jpg").touch()
    Image.new("RGB", (600, 600)).save(folder / "large.png")
    (folder / "noise.jpg").write_bytes(bytes(range(256)))
    Image.new("RGB", (1000, 2)).save(folder / "strip.png")
    (folder / "truncated.jpg").write_bytes((PHOTOGRAPHS / "coffee.jpg").read_bytes()[:20_000])
    (folder / "notes.txt").write_text("not listed")
    (folder / "folder.jpg").mkdir()
    return folder


def arguments(model: Path, folder: Path, output: Path) -> list[str]:
    options = {"model": model, "images": folder, "output": output, "batch-size": 4, "max-new-tokens": 8}
    return [f"--{name}={value}" for name, value in options.items()] + ["--max-pixels=300000"]


def run(*command: str | Path, cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_records(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def records(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What one process writes with the patched model."""
    output = tmp_path_factory.mktemp("output") / "new" / "captions.jsonl"
    result = RUNNER.invoke(batch_caption.app, arguments(model, folder, output))
    assert result.exit_code == 0, result.output
    assert f"{len(GOOD)} of {len(GOOD) + len(BAD)} images" in result.stdout
    assert "model.visual" in result.stdout  # the tower, in the status
    assert list(output.parent.iterdir()) == [output]  # no part file is left
    return read_records(output)


def test_one_line_per_image_in_order(records: list[dict]) -> None:
    assert [record["path"] for record in records] == sorted(GOOD | BAD)


def test_good_images_have_captions_and_upright_sizes(records: list[dict]) -> None:
    good = {record["path"]: record for record in records if record["status"] == "ok"}
    assert {path: (record["width"], record["height"]) for path, record in good.items()} == GOOD
    assert all(record["caption"] and record["error"] is None for record in good.values())
    assert len({record["caption"] for record in good.values()}) > len(GOOD) // 2  # the model looks at the images


def test_bad_images_have_reasons(records: list[dict]) -> None:
    bad = {record["path"]: record for record in records if record["status"] == "error"}
    assert bad.keys() == BAD.keys()
    assert all(record["caption"] is None for record in bad.values())
    for path, reason in BAD.items():
        assert reason in bad[path]["error"]


def test_stock_tower_gives_the_same_tokens(records: list[dict], model: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "captions.jsonl"
    result = RUNNER.invoke(batch_caption.app, [*arguments(model, folder, output), "--no-patch"])
    assert result.exit_code == 0, result.output
    assert read_records(output) == records  # one token is one word


def test_two_processes_give_the_same_records(records: list[dict], model: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "captions.jsonl"
    launch = ["-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--cpu"]
    script = ROOT / "examples" / "batch_caption.py"
    stdout = run(*launch, "--main_process_port=0", script, *arguments(model, folder, output), cwd=tmp_path)
    assert read_records(output) == records
    assert stdout.count("images captioned") == 1
    assert list(tmp_path.iterdir()) == [output]


def test_folder_without_images_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    result = RUNNER.invoke(batch_caption.app, arguments(model, tmp_path, tmp_path / "captions.jsonl"))
    assert result.exit_code == 2
    assert "No images in" in result.output


def test_unknown_attention_is_an_error(model: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "captions.jsonl"
    result = RUNNER.invoke(batch_caption.app, [*arguments(model, folder, output), "--attention=unknown"])
    assert result.exit_code == 2
    assert "unknown" in result.output
    assert not output.exists()


def test_no_readable_image_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    output = tmp_path / "captions.jsonl"
    result = RUNNER.invoke(batch_caption.app, arguments(model, tmp_path, output))
    assert result.exit_code == 1
    assert [record["status"] for record in read_records(output)] == ["error"]


@pytest.mark.parametrize("suffix", [".png", ".pgm", ".tif"])
def test_16_bit_greys_are_scaled(tmp_path: Path, suffix: str) -> None:
    grey = np.array([[0, 257], [32768, 65535]], dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / f"grey{suffix}")
    image = batch_caption.read_image(tmp_path / f"grey{suffix}")
    assert np.asarray(image).tolist() == [[[0] * 3, [1] * 3], [[127] * 3, [255] * 3]]


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    colour, clear = (10, 20, 30), (40, 50, 60)
    rgba = Image.new("RGBA", (2, 1), (*colour, 255))
    rgba.putpixel((1, 0), (*clear, 0))
    rgba.save(tmp_path / "rgba.png")
    palette = Image.new("P", (2, 1))
    palette.putpalette(colour + clear)
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "palette.png", transparency=1)
    for name in ("rgba.png", "palette.png"):
        assert np.asarray(batch_caption.read_image(tmp_path / name)).tolist() == [[[10, 20, 30], [255] * 3]]


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_orientation_turns_the_pixels(tmp_path: Path, suffix: str, mode: str) -> None:
    stored = Image.new(mode, (48, 32), "black")
    stored.paste("white", (0, 0, 48, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    stored.save(tmp_path / f"image{suffix}", exif=exif)
    upright = np.asarray(batch_caption.read_image(tmp_path / f"image{suffix}"))
    assert np.abs(upright - np.rot90(np.asarray(stored.convert("RGB")), k=-1).astype(int)).max() < 8


def test_demo(tmp_path: Path) -> None:
    stdout = run(ROOT / "examples" / "demo.py", "--output", "demo", cwd=tmp_path)
    assert all(path.name in stdout for path in PHOTOGRAPHS.glob("*.jpg"))
    assert [record["status"] for record in read_records(tmp_path / "demo" / "captions.jsonl")] == ["ok"] * 6
