"""Fixtures that the tests of captioning share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_captioning import batch_caption, load_once, put


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are read once."""
    monkeypatch.setattr(batch_caption, "load_model", load_once)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three scenes, one of them in a folder."""
    put(tmp_path / "photos", "a.png", "b.png", "0/c.png")
    return tmp_path / "photos"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder for records."""
    return tmp_path / "captions"
