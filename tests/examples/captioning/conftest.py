"""Provide pictures, an output folder and models that load once to the tests of captioning."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_captioning import batch_caption, load_once, put


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every checkpoint once."""
    monkeypatch.setattr(batch_caption, "load_model", load_once)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Draw three scenes, one of them in a subfolder."""
    put(tmp_path / "photos", "a.png", "b.png", "0/c.png")
    return tmp_path / "photos"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a folder for records."""
    return tmp_path / "captions"
