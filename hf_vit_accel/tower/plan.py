"""A call as it was read, and the plan of one that the stock forward runs (`engine.call.FastPlan` is the other)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from hf_vit_accel.engine.call import FastPlan
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.route import Route
from hf_vit_accel.tower.modules import WeightMemory
from hf_vit_accel.tower.snapshot import Snapshot


class Way(Enum):
    """The way of a call: through our operations, or one of three ways through the stock forward.

    `reasons_stock` (of a `Snapshot`, of `checks`, of a `Call`) send a call the way STOCK. `reasons_slow` send it the
    way METADATA, where stock calls the blocks one by one. `status` counts FAST as fast calls, and
    ATTENTION if a backend of ours has attended in any call so far. METADATA and STOCK are stock calls. A copy never
    goes METADATA, since its forward may take none.
    """

    FAST = "by our operations and attention"
    METADATA = "through the stock forward, with our metadata and attention"
    ATTENTION = "through the stock forward, with our attention alone: a family whose blocks we do not know"
    STOCK = "through the stock forward, on what it was called with"


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call, as it was read.

    Attributes:
        inputs: Pixels and grid, checked; None for a call that `read` sends STOCK.
        reasons_stock: Why it does.
        reasons_slow: Why the blocks must be called one by one.
        hidden_states: Whether hidden states are returned, too.
        hooked_parts: The `id` of every part that runs as a module, since hooks are on or in it.
        snapshot: The tower as it is now; None for a call that goes STOCK or ATTENTION.
        parameters: Of the tower, as they are now.
        weights: Their addresses, dtypes and sizes.
    """

    inputs: Inputs | None = None
    reasons_stock: Sequence[str] = ()
    reasons_slow: Sequence[str] = ()
    hidden_states: bool = False
    hooked_parts: frozenset[int] = frozenset()

    snapshot: Snapshot | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)
    weights: WeightMemory | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StockPlan:
    """The decisions about a call that runs the stock forward.

    Attributes:
        way: STOCK, METADATA or ATTENTION.
        reasons: Why it is not fast, and why it gets less than was requested.
        raises: Why these reasons are raised instead; None where the call runs.
        injected: Keyword arguments that the stock forward is given.
        route: Of the layout, on the way METADATA.
        instead_of: The plan by which our operations would run the call; None where they cannot be told.
    """

    way: Way
    reasons: tuple[str, ...]
    raises: str | None = None
    injected: Mapping[str, object] = field(default_factory=dict)
    route: Route | None = None
    instead_of: FastPlan | None = None


CallPlan = StockPlan | FastPlan
