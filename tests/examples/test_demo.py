"""Run the demo and the benchmark of captioning as users do, and caption videos where decoders are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from captioner import checkpoints
from captioner.journal import Journal
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, ROOT
from read_once import load_processor_once, read_once
from transformers import AutoModelForImageTextToText

import hf_vit_accel

sys.path[:0] = [str(ROOT / "benchmarks")]

import captioning_benchmark  # noqa: E402
import demo  # noqa: E402
from tiny_captioner.scenes import draw, scene  # noqa: E402


def run(*command: str | Path, cwd: Path) -> str:
    """Run a Python script; return what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_captions_scenes_that_it_never_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "RUNS", 1)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # the demo changes it
    rows = (demo.SCENES / "metadata.jsonl").read_text().splitlines()[:7]
    scenes = tmp_path / "scenes"
    shutil.copytree(demo.SCENES, scenes)
    (scenes / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(demo, "SCENES", scenes)
    demo.main([f"--output={tmp_path / 'demo'}"])
    captions = [json.loads(line) for line in (tmp_path / "demo" / "captions.jsonl").read_text().splitlines()]
    assert captions == [json.loads(row) for row in rows]
    printed = capsys.readouterr().out
    steps = [line for line in printed.splitlines() if line.startswith("--- ")]
    assert [step[4:10] for step in steps] == [f"{number} of 3" for number in range(1, 4)]
    assert "7 of 7 stock, 7 of 7 patched; 0 differ between stock and patched" in printed
    assert "relative L2 error" in printed and "qwen2_5_vl, patched" in printed
    sheet = Image.open(tmp_path / "demo" / "contact_sheet.png")
    assert sheet.size == (demo.COLUMNS * demo.CELL[0], demo.HEADER + 2 * demo.CELL[1])


def test_its_own_folder_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / demo.MARKER).touch()
    (tmp_path / "contact_sheet.png").touch()
    monkeypatch.setattr(demo, "SCENES", tmp_path / "gone")  # it gets as far as these
    with pytest.raises(FileNotFoundError, match="gone"):
        demo.main([f"--output={tmp_path}"])


def test_every_slow_step_of_make_demo_is_announced(tmp_path: Path) -> None:
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    slow = [
        number
        for number, line in enumerate(printed)
        if not line.startswith("echo ") and any(part in line for part in (" -m venv", " install ", "demo.py"))
    ]
    assert len(slow) == 3
    for number in slow:
        assert printed[number - 1].startswith("echo "), printed[number]
    assert not any(" -q" in line for line in printed)  # pip shows what it downloads


@pytest.mark.parametrize("name", ["captions.jsonl", "scenes/other.txt", ""])
def test_the_demo_refuses_a_folder_with_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    output = tmp_path / "mine"
    other_file = output / name if name else output  # also a file in place of the folder
    other_file.parent.mkdir(parents=True, exist_ok=True)
    other_file.write_text("as it was")
    with pytest.raises(SystemExit) as stopped:
        demo.main([f"--output={output}"])
    assert stopped.value.code == 2 and "name another folder" in capsys.readouterr().err
    assert other_file.read_text() == "as it was"


def test_the_demo_installs_no_test_tools() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "\ndemo: $(VENV)/.installed-examples\n" in (ROOT / "Makefile").read_text()
    assert not {"mypy", "pytest", "pytest-xdist", "ruff", "hypothesis", "triton"} & set(extras["examples"])


def test_the_contact_sheet_shows_right_captions_green_and_wrong_ones_red() -> None:
    image = Image.new("RGB", (112, 112))
    captions = {"stock": ["a large red star"], "patched": ["a small red circle"]}
    sheet = np.asarray(demo.contact_sheet([image], ["a large red star"], captions)).astype(int)
    stock_top = demo.HEADER + 212
    halves = (sheet[stock_top : stock_top + 66], sheet[stock_top + 68 :])
    greens = [(half[:, :, 1] - half[:, :, 0] > 60).sum() for half in halves]
    reds = [(half[:, :, 0] - half[:, :, 1] > 60).sum() for half in halves]
    assert greens[0] > 50 > greens[1] and reds[1] > 50 > reds[0]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos_are_captioned(tmp_path: Path, family: str) -> None:
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("torchvision")
    side = 7 * (32 if family == "qwen3_vl" else 28)
    expected = {}
    for index in range(8):
        drawn = scene((1 << 41) + index, video=True)
        name = f"{index}.mp4"
        writer = cv2.VideoWriter(str(tmp_path / name), cv2.VideoWriter_fourcc(*"mp4v"), 2, (side, side))
        for frame in draw(drawn, side, side):
            writer.write(np.asarray(frame)[:, :, ::-1].copy())
        writer.release()
        expected[name] = drawn.caption
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "0.mp4").read_bytes()[:200])
    script = EXAMPLES / "captioner" / "main.py"
    checkpoint = CAPTIONERS / family
    options = ["--prompt", "describe this {kind} .", "--max-new-tokens", "24", "--model", checkpoint]
    run(script, "caption", tmp_path, "--output", tmp_path / "out", *options, cwd=tmp_path)
    run(script, "merge", tmp_path / "out", tmp_path / "out.jsonl", cwd=tmp_path)
    merged = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    records = {record["key"]: record for record in merged}
    assert records.pop("cut.mp4")["status"] == "error"
    assert {key: record["status"] for key, record in records.items()} == dict.fromkeys(expected, "ok")
    right = sum(records[key]["caption"] == caption for key, caption in expected.items())
    assert right >= 6, {key: (records[key]["caption"], caption) for key, caption in expected.items()}


@pytest.mark.matrix  # a benchmark, which users do not run
def test_the_captioning_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All runs of the benchmark end, with a tiny model in place of the full-size one."""
    runs = captioning_benchmark.runs_of([1, 5])
    captioning_benchmark.load_model.cache_clear()
    monkeypatch.setattr(captioning_benchmark, "_load_processor", load_processor_once)
    read_once(monkeypatch, checkpoints)
    tiny = AutoModelForImageTextToText.from_pretrained(captioning_benchmark.CHECKPOINTS["qwen2.5-vl-7b"])
    built: list[tuple[str, tuple[int, ...]]] = []

    def build(name: str, *tokens: int, device: torch.device) -> torch.nn.Module:
        built.append((name, tokens))
        return tiny

    monkeypatch.setattr(captioning_benchmark, "build", build)
    monkeypatch.setattr(captioning_benchmark, "LONGEST", 16)
    for name in ("load_model", "load_processor", "Progress"):
        monkeypatch.setattr(
            captioning_benchmark.batch_caption, name, None
        )  # restores them after the test: the benchmark replaces them
    monkeypatch.setattr(PartialState, "destroy_process_group", None)
    path = tmp_path / "rates.json"
    captioning_benchmark.main(tmp_path, pictures=5, tokens="1,5", rounds=2, json_path=path)
    assert built == [("qwen2.5-vl-7b", (tiny.config.image_token_id, tiny.config.video_token_id, *built[0][1][2:]))]
    stdout = capsys.readouterr().out
    assert stdout.count(": 5 of 5 items in") == 2 * len(runs), "a summary for every run, which takes all pictures"
    for name_of_run in runs:
        folder = tmp_path / "qwen2.5-vl-7b" / name_of_run.replace(", ", "_").replace(" ", "_")
        assert [record.status for record in Journal(folder).records()] == ["ok"] * 5 * 2
    names = list(runs)
    assert [f"to warm up, {name}" for name in names[1::2]] == names[::2], "each run warms up right before it"
    assert hf_vit_accel.status(tiny).towers[0].calls
    document = json.loads(path.read_text())
    assert document["images"] == 5 and document["gpus"] == 1
    assert [(row["model"], row["tokens"]) for row in document["rows"]] == [("qwen2.5-vl-7b", 1), ("qwen2.5-vl-7b", 5)]
    printed = stdout.split("### ")
    for row in document["rows"]:
        for way in ("stock", "patched"):
            summaries = [text for text in printed if text.startswith(f"{way}, {row['tokens']} token")]
            for summary, rate in zip(summaries, row["all"][way], strict=True):
                assert f" {rate:.2f} items/s" in summary
            assert row[way] == sum(row["all"][way]) / 2
            assert 0 <= row["ms waiting"][way] <= 1e3 / min(row["all"][way])
