"""Run the demo as users do."""

import shutil
from pathlib import Path

import demo
import pytest
import torch
from PIL import Image
from programs import lines


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
    assert lines(tmp_path / "demo" / "captions.jsonl") == lines(scenes / "metadata.jsonl")
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
