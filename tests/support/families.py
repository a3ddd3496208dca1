"""Build tiny towers of any class that a family supports."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import randomise
from torch import nn

from hf_vit_accel.families import Family


def tiny_tower(family: Family, module: str, name: str) -> nn.Module:
    """Build a tower with its real config's switches and tiny sizes; skip the test where transformers lacks it."""
    kind: Any = getattr(pytest.importorskip(module), name)
    config = kind.config_class()
    for field, value in family.tiny.items():
        setattr(config, field, value)
    config._attn_implementation_internal = "sdpa"
    return randomise(kind(config).eval())
