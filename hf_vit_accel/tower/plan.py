"""A call as it was read, the plan that is made of it, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple

from torch import nn

from hf_vit_accel.engine.encoder import CalledBlock, Checkpoint
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.route import Route, Spec
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.layout import Grid
from hf_vit_accel.options.split import Assignment
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

    @property
    def why_whole(self) -> str | None:
        """Why every picture of the call is encoded here and now; None where parts of it need not be."""
        if self.hooked_parts:
            return "hooks see each call of their module"
        return "hidden states are requested" if self.hidden_states else None

    snapshot: Snapshot | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)
    weights: WeightMemory | None = None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Whole images and frames that are encoded in one pass.

    Attributes:
        grid: Their grid.
        rows: Their rows among those that this rank encodes.
    """

    grid: Grid
    rows: slice


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """Whether the ranks of `data_parallel` share a call.

    Attributes:
        assignment: Which rank encodes what; None for a call that is not shared.
        result: The result of the call for `Sharing.counts`; None if it is not counted.
        reasons: Why a call that would gain is not shared.
    """

    assignment: Assignment | None = None
    result: str | None = None
    reasons: tuple[str, ...] = ()


NOT_SHARED = SharedCall()


@dataclass(frozen=True, kw_only=True, eq=False)
class StockPlan:
    """The decisions about a call that runs the stock forward.

    Attributes:
        way: Any but `Way.FAST`.
        reasons: Why it is not fast, and why it gets less than was requested.
        injected: Keyword arguments that the stock forward is given.
        route: Of the layout, on the way METADATA.
        shared: Whether ranks share the call.
    """

    way: Way
    reasons: tuple[str, ...]
    injected: Mapping[str, object] = field(default_factory=dict)
    route: Route | None = None
    shared: SharedCall = NOT_SHARED


@dataclass(frozen=True, kw_only=True)
class FastPlan:
    """The decisions about a call that runs our operations.

    Attributes:
        reasons: Why the call gets less than was requested.
        inputs: Pixels and grid of the whole call, and which images are equal.
        snapshot: The tower as it is now.
        parameters: Of the tower, as they are now.
        weights: Their addresses, dtypes and sizes.
        spec: Of every route.
        passes: In order. More than one for a long call, none if there is nothing to encode.
        most_rows: Rows of a pass at most; None for a call that may not be cut.
        checkpoints: By layer, None for a layer that keeps what its gradient needs.
        called: The blocks that run by their own call, by the index of the layer.
        shared: Which rank encodes what, if ranks share the call.
        runner: Of the CUDA graphs that may serve the passes; None for a call that no runner counts.
        why_eager: Why no graph may.
        memory: Equal while weights and buffers stay at their addresses; of a call that graphs may serve.
        outputs_require_grad: Whether the outputs of a frozen tower must require gradients.
        way: Always `Way.FAST`.
    """

    reasons: tuple[str, ...]
    inputs: Inputs
    snapshot: Snapshot
    parameters: list[nn.Parameter]
    weights: WeightMemory
    spec: Spec
    passes: Sequence[Pass]
    most_rows: int | None
    checkpoints: Sequence[Checkpoint | None]
    called: Mapping[int, CalledBlock]
    shared: SharedCall
    runner: Runner | TrainingRunner | None
    why_eager: str | None
    memory: list[object]
    outputs_require_grad: bool
    way: ClassVar[Way] = Way.FAST


CallPlan = StockPlan | FastPlan


class PassDone(NamedTuple):
    """A pass that was replayed or encoded, by which route, and how `status` reports it."""

    route: Route
    way: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A call that is over.

    Attributes:
        plan: The decisions that it ran by.
        output: An object of the stock output class, or a tuple.
        reasons: More reasons why it got less than was requested, found while it ran.
        passes: Those that ran.
    """

    plan: CallPlan
    output: object
    reasons: tuple[str, ...] = ()
    passes: Sequence[PassDone] = ()
