"""Backends whose results a test spoils, or that cannot run here, and a machine without a GPU."""

from collections.abc import Callable, Sequence

import pytest
import torch

from hf_vit_accel import backends, machine
from hf_vit_accel.backends.base import Needs
from hf_vit_accel.backends.sdpa import Sdpa

Spoil = Callable[[torch.Tensor], object]


def hide_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package find no CUDA device, even if this machine has one."""
    monkeypatch.setattr(machine, "has_cuda", lambda: False)


def skip_for(reasons: Sequence[str]) -> None:
    """Skip a test if there are reasons why it cannot run here."""
    if reasons:
        pytest.skip("; ".join(reasons))


def add_spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, name: str = "spoiled", **needs: object) -> None:
    """Add sdpa with spoiled results before all other backends; it replaces a backend of the same name."""

    class Spoiled(Sdpa):
        def attend(self, *arguments: object) -> object:
            return spoil(super().attend(*arguments))

    Spoiled.name = name
    Spoiled.needs = Needs(cuda=False, **needs)
    others = [backend for backend in backends.BACKENDS if backend.name != name]
    monkeypatch.setattr(backends, "BACKENDS", (Spoiled(), *others))
