"""Locks of output folders, and the size of the captioner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


def test_the_captioner_is_short_and_uses_public_names() -> None:
    files = list((EXAMPLES / "captioner").iterdir())
    lines = {path.name: len(path.read_text().splitlines()) for path in files if path.is_file()}
    assert max(lines.values()) <= 300 and sum(lines.values()) <= 2500, lines
    for path in (EXAMPLES / "captioner").glob("*.py"):
        assert not re.search(r"(from|import) hf_vit_accel\.", path.read_text()), path.name
