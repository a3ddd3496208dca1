"""Let a test fuse some operations of a tower alone, where `patch` knows all or none."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from hf_vit_accel.ops import PARTS
from hf_vit_accel.tower import state


def fuse_only(monkeypatch: pytest.MonkeyPatch, names: Collection[str]) -> None:
    """Build the other operations by the tower's modules, from the next `patch` on."""
    build = state.build
    left_out = {name: "left out here" for name in PARTS if name not in names}
    monkeypatch.setattr(
        state, "build", lambda parts, context, why_plain: build(parts, context, {**why_plain, **left_out})
    )
