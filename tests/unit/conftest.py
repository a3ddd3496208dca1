"""Fixtures of unit tests, which alone may use private names."""

from pathlib import Path

import pytest
from support.backends import hide_gpu
from support.ranks import OnRanks, runner

from hf_vit_accel.tower import proof


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which warnings were given, as in a new process."""
    monkeypatch.setattr(proof, "_WARNED", set())


@pytest.fixture
def nothing_proven(nothing_said: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all proofs, too."""
    monkeypatch.setattr(proof, "_PROOFS", {})


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's CUDA device, if it has one."""
    hide_gpu(monkeypatch)


@pytest.fixture
def on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnRanks:
    """Return the function that runs a check on a number of ranks, which share every call."""
    return runner(tmp_path, monkeypatch)
