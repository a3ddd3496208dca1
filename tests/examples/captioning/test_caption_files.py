"""Whole files, locks, fingerprints and checksums of checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from captioner.checkpoints import checksums_of
from captioner.files import fingerprint, lock, replace_file
from programs import EXAMPLES


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new")
    assert path.read_text() == "old"


def test_fingerprints_differ_with_settings() -> None:
    assert fingerprint({"a": 1, "b": [2, None]}) == fingerprint({"b": [2, None], "a": 1})
    assert len({fingerprint({"a": value}) for value in (1, 2, "1", None, 0.5)}) == 5


LOCKED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from captioner.files import lock
with lock(Path(sys.argv[2]), alone=sys.argv[3] == "alone"):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "with others"])
def test_the_lock_dies_with_its_process(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", LOCKED, str(EXAMPLES), str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another run is writing to"), lock(tmp_path, alone=True):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with lock(tmp_path, alone=True):
        pass


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
