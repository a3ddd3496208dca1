"""Fixtures of unit tests, which alone may use private names."""

from __future__ import annotations

import pytest

from hf_vit_accel.tower import proof


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which warnings were given, as in a new process."""
    monkeypatch.setattr(proof, "_WARNED", set())


@pytest.fixture
def nothing_proven(nothing_said: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all proofs, too."""
    monkeypatch.setattr(proof, "_PROOFS", {})
