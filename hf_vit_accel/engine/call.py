"""One call that runs our operations: the plan of it, the batches that are encoded for it, and what has run.

An option (`options/`) wraps `encode`, a function from a `Batch` to outputs. It may encode other batches in its place:
a few frames, distinct images, the share of a rank. The innermost `encode` decides for the grid that it is given.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_vit_accel.engine.encoder import CalledBlock, Checkpoints
from hf_vit_accel.engine.route import Route, Spec
from hf_vit_accel.families.base import Parts
from hf_vit_accel.families.interface import Form, Inputs
from hf_vit_accel.layout import Grid
from hf_vit_accel.machine import Fault, raise_if_any
from hf_vit_accel.watch import Memory

HIDDEN_STATES_OF_STEP = "with gradients, hidden states are those that the layers take"
"""Why such calls are neither cut nor replayed: the gradients of these rows include those of later layers."""
HOOKED = "hooks see each call of their module"
"""Why calls of a tower with hooks inside are neither cut, replayed, shared nor reused."""


_CAST_BY_AUTOCAST = {torch.bfloat16, torch.float16, torch.float32}


class WeightMemory(Memory):
    """The memory of a tower's parameters, and what follows from their dtypes and classes.

    Attributes:
        dtype: Of the first parameter.
        dtypes: Of all parameters that our operations read.
        all_contiguous: Whether all parameters are contiguous.
        key: Their part of the key of a spec: all dtypes, and which modules are called.
        mixed: Why kernels cannot read them without autocast, which casts them to one dtype; None for one dtype.
    """

    def __init__(
        self, own: Sequence[nn.Parameter], others: Sequence[nn.Parameter], called: tuple[int, ...], offloaded: bool
    ) -> None:
        parameters = [*own, *others]
        super().__init__(parameters)
        self.dtype = parameters[0].dtype if parameters else torch.float32
        self.dtypes = frozenset(parameter.dtype for parameter in own)
        self.all_contiguous = all(map(Tensor.is_contiguous, parameters))
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        dtypes = enumerate(parameter.dtype for parameter in parameters)
        self.key = frozenset([*dtypes, ("own", len(own)), ("called", called)])  # a frozenset computes its hash once
        self.mixed: str | None = None
        if len(self.dtypes) > 1:
            self.mixed = f"parameters of several dtypes ({', '.join(sorted(map(str, self.dtypes)))})"
        self.reasons: list[str] = []
        if self.mixed and not self.dtypes <= _CAST_BY_AUTOCAST:
            self.reasons.append(self.mixed)
        names = sorted({type(parameter).__name__ for parameter in own if type(parameter) is not nn.Parameter})
        if names:
            self.reasons.append(f"parameters of a class of their own ({', '.join(names)})")
        if hasattr(next(iter(parameters), None), "ds_id"):
            self.reasons.append("DeepSpeed ZeRO-3 gathers the weights of a module when it is called")
        if offloaded and len({parameter.device for parameter in parameters}) > 1:
            self.reasons.append("parameters on several devices")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WeightMemory) and self.key == other.key and super().__eq__(other))

    __hash__ = None


class Reading(Protocol):
    """A tower as it was read: see `tower.snapshot.Snapshot`."""

    parts: Parts
    sharded_layers: dict[int, nn.Module]
    offloaded: bool
    unpredictable: str | None
    mixing: list[str]
    parameter_dicts: list[dict[str, nn.Parameter | None]]

    def buffers(self) -> list[Tensor]: ...
    def called_memory(self) -> object: ...
    def is_trained(self, parameters: Sequence[nn.Parameter]) -> bool: ...
    def in_training_mode(self) -> bool: ...
    def holds_plain_tensors(self) -> bool: ...


@dataclass(kw_only=True)
class Attempt:
    """One attempt to serve a call, with what it did so far.

    Attributes:
        disable: Disables the backend or kernel that failed, or raises what the caller gets.
        passes: By which route each pass was replayed or encoded, and how `status` reports it.
        has_new_room: Returns whether memory was given back since the attempt began.
        exchanged: What other ranks heard of this call. They are through with it, and would not answer another attempt.
        is_prepared: Whether the cause of an error was disabled, so that another attempt follows.
    """

    disable: Callable[[Fault], None]
    has_new_room: Callable[[], bool]
    reasons: list[str] = field(default_factory=list)
    passes: list[tuple[Route, str]] = field(default_factory=list)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class FastPlan:
    """The decisions about a call that runs our operations.

    Attributes:
        checkpoints: Of the modules that do not keep what their gradient needs.
        called: The blocks that run by their own call, by the index of the layer.
        hidden_states: Whether hidden states are returned, too.
        outputs_require_grad: Whether the outputs of a frozen tower must require gradients.
    """

    reasons: tuple[str, ...] = ()
    inputs: Inputs
    reading: Reading
    parameters: tuple[nn.Parameter, ...]
    weights: WeightMemory
    spec: Spec
    checkpoints: Checkpoints
    called: Mapping[int, CalledBlock]
    is_hooked: bool = False
    hidden_states: bool = False
    outputs_require_grad: bool = False
    form: Form | None = None
    as_tuple: bool = False

    @property
    def why_whole(self) -> str | None:
        """Why every image of the call is encoded here and now; None where parts of it need not be."""
        if self.is_hooked:
            return HOOKED
        return "hidden states are requested" if self.hidden_states else None

    @property
    def has_reentrant_checkpoints(self) -> bool:
        """Whether gradients reach weights at each backward pass of a module, past all nodes around the call."""
        return any(checkpoint.is_reentrant for checkpoint in self.checkpoints.values())


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
            raise_if_any(reasons)
        self.attempt.reasons += reasons


Encode = Callable[[Batch], list[Tensor]]
"""Returns the outputs of a batch: see `engine.encoder.encode`."""
