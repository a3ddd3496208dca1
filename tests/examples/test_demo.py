"""Run the demo and the benchmark of captioning as users do, and caption videos where decoders are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import demo
import numpy as np
import pytest
import torch
from PIL import Image
from programs import CAPTIONERS, EXAMPLES, ROOT
from scenes import draw, scene


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
