"""Tells whether graphs are stale: what they were captured with, beside the layout of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hf_vit_accel.engine.route import Spec


class Identity(NamedTuple):
    """The state that all graphs of a store share; another identity makes them stale.

    Attributes:
        spec: Stands for modules, settings, device and dtypes: one object while these stay. In inference it is that
            of padded calls, and an exact graph runs on the spec of its own call.
        memory: Equal while weights and buffers stay at their addresses.
        pixel_width: Values per patch (P).
        numerics: torch's settings of precision and determinism.
        requires_grad: Whether the pixels and every parameter require gradients; empty in inference.
    """

    spec: Spec
    memory: list[object]
    pixel_width: int
    numerics: tuple[object, ...]
    requires_grad: tuple[bool, ...] = ()


STALE_REASONS: Mapping[str, str] = {
    "spec": "the device or dtypes changed, or passes were halved after memory ran out",
    "memory": "weights or buffers moved, or were replaced",
    "pixel_width": "patches have another width",
    "numerics": "torch computes in another precision",
    "requires_grad": "other tensors require gradients",
}
"""Field of `Identity` -> why graphs captured under another value are stale."""


def stale_reason(captured: Identity, current: Identity) -> str | None:
    """Return why graphs are stale, or None if they may be replayed.

    Args:
        captured: The identity under which the graphs were captured.
        current: The identity of the call at hand.
    """
    if captured == current:
        return None
    return next(why for name, why in STALE_REASONS.items() if getattr(captured, name) != getattr(current, name))
