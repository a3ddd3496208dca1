"""The state of a tower that graphs were captured under, which tells whether they are stale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hf_vit_accel.engine.route import Spec


class Identity(NamedTuple):
    """The state that graphs were captured under. They are replayed under an equal identity alone.

    Another memory makes the graphs of all identities stale. Otherwise those of several are kept beside each other.

    Attributes:
        spec: Stands for modules, settings, device and dtypes: one object while these stay.
        memory: Equal while weights and buffers stay at their addresses.
        requires_grad: Whether the pixels and every parameter require gradients; empty in inference.
    """

    spec: Spec
    memory: list[object]
    pixel_width: int
    numerics: tuple[object, ...]
    requires_grad: tuple[bool, ...] = ()


STALE_REASONS: Mapping[str, str] = {
    "spec": "the device, dtypes or requested hidden states changed, or passes were halved after memory ran out",
    "memory": "weights or buffers moved, or were replaced",
    "pixel_width": "patches have another width",
    "numerics": "torch computes in another precision",
    "requires_grad": "other tensors require gradients",
}
"""Field of `Identity` -> why graphs captured under another value cannot be replayed."""


def what_differs(captured: Identity, current: Identity) -> str:
    """Return what differs between two identities."""
    return next(why for name, why in STALE_REASONS.items() if getattr(captured, name) != getattr(current, name))
