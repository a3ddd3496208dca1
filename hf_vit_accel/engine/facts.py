"""The facts of a tower that passes and ranks need, read once and handed down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.layout import Geometry


@dataclass(frozen=True, kw_only=True, eq=False)
class TowerFacts:
    """A tower as its snapshot read it. Holds modules of the tower, but not the tower itself.

    Attributes:
        parts: The modules that compute, by their role.
        geometry: Merge size, window size and what else turns a grid into metadata.
        full_layers: Whether each layer attends within whole frames, not within windows.
        sharded_layers: Blocks that FSDP2 shards, by the index of their layer.
        unpredictable: Why every call may compute something else (see `Snapshot`); None for a predictable tower.
        mixing: Reasons why rows of several images may influence each other.
    """

    parts: Parts
    geometry: Geometry
    full_layers: tuple[bool, ...]
    sharded_layers: Mapping[int, nn.Module]
    unpredictable: str | None
    mixing: Sequence[str]
