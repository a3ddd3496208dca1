"""One call that runs our operations: the plan of it, the batches that are encoded for it, and what has run.

An option (`options/`) wraps `encode`, a function from a `Batch` to outputs. It may encode other batches in its place:
a few frames, distinct images, the share of a rank. The innermost `encode` decides for the grid that it is given.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_vit_accel.engine.encoder import CalledBlock, Checkpoint
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.route import Route, Spec
from hf_vit_accel.families.base import Parts
from hf_vit_accel.layout import Geometry, Grid
from hf_vit_accel.machine import Fault, raise_if_any

HIDDEN_STATES_OF_STEP = "with gradients, hidden states are those that the layers take"
"""Why such calls are neither cut nor replayed: the gradients of these rows include those of later layers."""


class Weights(Protocol):
    """The memory of a tower's parameters: equal while no address, dtype or size changes."""

    pointers: list[int] | None
    dtype: torch.dtype
    contiguous: bool


class Reading(Protocol):
    """A tower as it was read. Attributes are those of `tower.snapshot.Snapshot`."""

    parts: Parts
    geometry: Geometry
    full_layers: tuple[bool, ...]
    sharded_layers: dict[int, nn.Module]
    offloaded: bool
    unpredictable: str | None
    mixing: list[str]
    called_linears: list[nn.Module]
    parameter_dicts: list[dict[str, Any]]

    def buffers(self) -> list[Tensor]:
        """Return every buffer as it is now."""

    def called_memory(self) -> object:
        """Return what third-party linears hold: the same object until they hold another tensor."""

    def is_trained(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether a parameter requires a gradient."""

    def in_training_mode(self) -> bool:
        """Return whether a module inside is in training mode."""

    def holds_plain_tensors(self) -> bool:
        """Return whether a module holds a tensor that is neither parameter nor buffer."""


class PassDone(NamedTuple):
    """A pass that was replayed or encoded, by which route, and how `status` reports it."""

    route: Route
    way: str


@dataclass(kw_only=True)
class Attempt:
    """One attempt to serve a call, with what it did so far.

    Attributes:
        disable: Disables the backend or kernel that failed, or raises what the caller gets.
        has_new_room: Returns whether memory was given back since the attempt began.
        exchanged: What other ranks heard of this call. They are through with it, and would not answer another attempt.
        is_prepared: Whether the cause of an error was disabled, so that another attempt follows.
    """

    disable: Callable[[Fault], None]
    has_new_room: Callable[[], bool]
    reasons: list[str] = field(default_factory=list)
    passes: list[PassDone] = field(default_factory=list)
    exchanged: str | None = None
    is_prepared: bool = False

    def prepare_another(self, error: Exception) -> None:
        """Prepare another attempt, which is to go without the cause of an error; else raise what the caller gets."""
        if self.is_prepared:
            return
        if isinstance(error, Fault):
            self.disable(error)
            self.is_prepared = True
        elif not isinstance(error, torch.OutOfMemoryError) or self.exchanged is not None or not self.has_new_room():
            raise error


@dataclass(frozen=True, kw_only=True)
class FastPlan:
    """The decisions about a call that runs our operations.

    Attributes:
        weights: Their addresses, dtypes and sizes.
        checkpoints: By layer, None for a layer that keeps what its gradient needs.
        called: The blocks that run by their own call, by the index of the layer.
        outputs_require_grad: Whether the outputs of a frozen tower must require gradients.
    """

    reasons: tuple[str, ...] = ()
    inputs: Inputs
    reading: Reading
    parameters: Sequence[nn.Parameter]
    weights: Weights
    spec: Spec
    checkpoints: Sequence[Checkpoint | None]
    called: Mapping[int, CalledBlock] = field(default_factory=dict)
    is_hooked: bool = False
    outputs_require_grad: bool = False
    output_class: Any = None
    as_tuple: bool = False

    @property
    def why_whole(self) -> str | None:
        """Why every image of the call is encoded here and now; None where parts of it need not be."""
        if self.is_hooked:
            return "hooks see each call of their module"
        return "hidden states are requested" if self.spec.hidden_states else None

    @property
    def has_reentrant_checkpoints(self) -> bool:
        """Whether gradients reach weights at each backward pass of a layer, past all nodes around the call."""
        return any(checkpoint is not None and checkpoint.is_reentrant for checkpoint in self.checkpoints)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Whole images and frames to be encoded.

    Attributes:
        is_part: Whether it is one of several passes of a call.
        output_slices: The slices of the call's outputs for this batch, where outputs may be written; else empty.
    """

    plan: FastPlan
    attempt: Attempt
    grid: Grid
    pixels_TP: Tensor
    is_part: bool = False
    output_slices: Sequence[Tensor] = ()

    def note(self, reasons: Sequence[str]) -> None:
        """Note why the call gets less than was requested; raise FallbackError under `strict`."""
        if self.plan.spec.settings.strict:
            raise_if_any(list(reasons))
        self.attempt.reasons += reasons


Encode = Callable[[Batch], list[Tensor]]
"""Returns the outputs of a batch: see `engine.encoder.encode`."""
