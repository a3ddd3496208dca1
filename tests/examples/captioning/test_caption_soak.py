"""The soak of `soak_captioning.py`, small."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_captioning import soak


@pytest.mark.matrix  # eight processes; `test_examples` kills runs every time
def test_a_small_soak(tmp_path: Path) -> None:
    figures = soak(tmp_path / "soak", pictures=80, kills=2, seed=1)
    assert not figures["problems"], figures
    assert figures["records"] == 160
