"""Whole files, locks, fingerprints and checksums of checkpoints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from captioner.checkpoints import checksums_of
from captioner.files import lock
from programs import EXAMPLES


def test_locks_are_shared_within_a_run(tmp_path: Path) -> None:
    with lock(tmp_path / "new", alone=True) as share:
        with pytest.raises(ValueError, match="another run"), lock(tmp_path / "new", alone=False):
            pass
        share()
        with lock(tmp_path / "new", alone=False):
            pass
        with pytest.raises(ValueError, match="another run"), lock(tmp_path / "new", alone=True):
            pass


def test_file_systems_without_locks_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock(tmp_path, alone=True) as share:
        share()


def test_a_checkpoint_is_identified_by_its_content(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    checksums = [checksums_of(model)]
    for name in ("model.safetensors", "config.json", "preprocessor_config.json", "chat_template.jinja", "merges.txt"):
        (model / name).write_text("{}")
        checksums.append(checksums_of(model))
    (model / "config.json").write_text("[]")  # the same length as before
    checksums.append(checksums_of(model))
    assert len({json.dumps(by_name) for by_name in checksums}) == 7
    (model / "notes.md").touch()
    (model / "trainer_state.json").touch()
    os.utime(model / "config.json", (0, 0))
    model.rename(tmp_path / "moved")
    assert checksums_of(tmp_path / "moved") == checksums[-1]


def test_the_captioner_is_short_and_uses_public_names() -> None:
    files = list((EXAMPLES / "captioner").iterdir())
    lines = {path.name: len(path.read_text().splitlines()) for path in files if path.is_file()}
    assert max(lines.values()) <= 300 and sum(lines.values()) <= 2500, lines
    for path in (EXAMPLES / "captioner").glob("*.py"):
        assert not re.search(r"(from|import) hf_vit_accel\.", path.read_text()), path.name
