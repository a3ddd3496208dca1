"""A call as it was read, and the plan of one that the stock forward runs (`engine.call.FastPlan` is the other)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hf_vit_accel.engine.call import FastPlan
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.route import Route
from hf_vit_accel.tower.checks import Reasons
from hf_vit_accel.tower.snapshot import Snapshot


class Way(Enum):
    """The way of a call: through our operations, or one of three ways through the stock forward.

    `checks.Reasons.stock` sends a call the way STOCK, `slow` the way METADATA, where stock calls the blocks one by one.
    `status` counts FAST as fast calls, and ATTENTION if a backend of ours has attended in any call so far. METADATA and
    STOCK are stock calls. A copy never goes METADATA, since its forward may take none.
    """

    FAST = "by our operations and attention"
    METADATA = "through the stock forward, with our metadata and attention"
    ATTENTION = "through the stock forward, with our attention alone: a family whose blocks we do not know"
    STOCK = "through the stock forward, on what it was called with"


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call, as it was read.

    Attributes:
        reasons: Why it is not fast, and what was read with them.
        inputs: Pixels and grid, checked; None for a call that goes STOCK.
        snapshot: The tower as it is now; None for a call that goes STOCK or ATTENTION.
    """

    reasons: Reasons
    inputs: Inputs | None = None
    snapshot: Snapshot | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StockPlan:
    """The decisions about a call that runs the stock forward.

    Attributes:
        way: STOCK, METADATA or ATTENTION.
        reasons: Why it is not fast, and why it gets less than was requested.
        raises: Why these reasons are raised instead; None where the call runs.
        injected: Keyword arguments that the stock forward is given.
        route: Of the layout, on the ways METADATA and ATTENTION.
        instead_of: The plan by which our operations would run the call; None where they cannot be told.
    """

    way: Way
    reasons: tuple[str, ...]
    raises: str | None = None
    injected: Mapping[str, object] = field(default_factory=dict)
    route: Route | None = None
    instead_of: FastPlan | None = None


CallPlan = StockPlan | FastPlan
