"""The contract of an operation: which modules it computes, why it may not, and how it is built from them.

Operations read weights from their modules at every call, so they see changes. All other attributes are read once,
through a `Context` that watches them: when one of them changes, the operations are built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Parts
from hf_vit_accel.watch import Attributes, Watch

Apply = Callable[[Tensor], Tensor]
"""Rows to rows."""
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(packed projection (T, 3, H, D), cos (T, D), sin (T, D)) to the projection with rotated q and k."""
ReadWeights = Callable[[], list[Any]]
"""Reads weights as they are now, in the order of a function's arguments; biases may be None."""
AddThen = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Function from (x, delta), both (T, E), to x + delta and what is computed from it: normed rows, or merged ones."""
FunctionContext = Any
"""autograd's context of a function, which takes any attribute; or an `InnerContext` of `ops.training.nodes`."""
Gradients = tuple[Tensor | None, ...]
"""What a backward returns: one gradient for every argument of the forward."""


def accelerate_device(module: nn.Module) -> object:
    """Return the device to which accelerate's hook moves a module's inputs; None for no hook, or one that offloads.

    With `device_map`, accelerate puts such a hook on every module. Inside a tower on one device it does nothing.
    """
    hook: Any = vars(module).get("_hf_hook")
    return None if getattr(hook, "offload", True) else hook.execution_device


def is_class_forward(forward: object, module: nn.Module) -> bool:
    """Return whether a callable is the forward of a module's class: bound to it, or the function of the class.

    A removed accelerate hook leaves it on the instance.
    """
    function = type(module).forward
    is_bound = getattr(forward, "__func__", None) is function and getattr(forward, "__self__", None) is module
    return forward is function or is_bound


def own_forward(module: nn.Module) -> object:
    """Return a forward other than its class's that was set on an instance; None for none."""
    is_hooked = accelerate_device(module) is not None  # such a hook sets `forward`, and keeps the former one beside it
    forward = vars(module).get("_old_forward" if is_hooked else "forward")
    return None if is_class_forward(forward, module) else forward


def reasons_replaced(
    module: nn.Module, kind: type[nn.Module] | None = None, trusted: Collection[type | nn.Module] = ()
) -> list[str]:
    """Report why a module may compute something else than its class in torch (`kind`) or transformers.

    `trusted` holds further classes, whose code a proof has run, and modules that are proven by themselves.
    """
    if module in trusted:
        return []
    name = type(module).__name__
    if kind is not None and type(module) is not kind:
        name = f"{type(module).__module__}.{name}" if name == kind.__name__ else name
        return [f"a {name} stands where a plain {kind.__name__} was"]
    if own_forward(module) is not None:
        return [f"a {name} has a forward of its own"]
    kind_of_weight = class_of_own_weight(module)
    if kind_of_weight is not None:
        return [f"a {name} holds a {kind_of_weight.__name__}"]
    if type(module) not in trusted and not machine.is_upstream(type(module).forward):
        module_name = type(module).__module__
        if module_name.startswith(("torch.", "transformers.")):
            return [f"the forward of {name} was replaced by another"]
        return [f"a {module_name}.{name} is neither torch's nor transformers'"]
    return []


def class_of_own_weight(module: nn.Module) -> type | None:
    """Return a class that computes with a module's parameters in its own way, as those of quantisers do; or None."""
    for parameter in module._parameters.values():
        kind = type(parameter)
        if parameter is not None and kind not in (nn.Parameter, Tensor) and kind.__name__ != "DTensor":
            return kind
    return None


def biases_or_zeros(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Return the biases of joined products, zeros in the place of missing ones; None where all are missing."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs]


Slots = Sequence[tuple[Attributes, str]]
"""Where modules store values: a dictionary of a module, and the name in it."""


@contextmanager
def replaced(slots: Slots, by: Sequence[object]) -> Iterator[None]:
    """Replace entries of modules' dictionaries within the with block. `ABSENT` stands for no entry, here and there."""
    former = [entries.get(name, ABSENT) for entries, name in slots]
    try:
        _put(slots, by)
        yield
    finally:
        _put(slots, former)


def _put(slots: Slots, values: Sequence[object]) -> None:
    for (entries, name), value in zip(slots, values, strict=True):
        if value is ABSENT:
            entries.pop(name, None)
        else:
            entries[name] = value


ABSENT = object()
"""The value of a name that a dictionary does not have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The target that operations are built for: device, dtypes, gradients. Watches the attributes that they read.

    Attributes:
        device, dtype: of the rows.
        weights_dtype: of the weights. Where it differs from the rows' (autocast), weights are cast.
        no_kernels: why Triton kernels cannot run; None if they can.
        reference: build plain torch instead of kernels, differentiable and on any device.
        classes: classes whose forwards the proof covers; None for all of transformers.
        trusted: those of them that belong to a copy's own code, and modules that are proven by themselves.
        fused: operations earlier in the table that are fused.
        activations: results of `ops.mlp.activation_of`.
        hooked_parts: the `id` of modules that are called, since hooks on or in them must run.
    """

    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype | None = None
    no_kernels: str | None = None
    reference: bool = False
    grad: bool = False
    classes: frozenset[type] | None = None
    trusted: frozenset[type | nn.Module] = frozenset()
    watch: Watch = field(default_factory=Watch)
    fused: set[str] = field(default_factory=set)
    activations: dict[tuple[object, ...], str | None] = field(default_factory=dict)
    hooked_parts: frozenset[int] = frozenset()

    def read(self, module: nn.Module, name: str, default: object = None) -> Any:
        """Return an attribute of a module that is no weight, and watch it."""
        return self.watch.read(module, name, default)

    def reader(self, *names: tuple[nn.Module, str], cast: bool = True) -> ReadWeights:
        """Build a function that reads weights, and biases that may be None, as they are at its call."""
        # The dictionaries hold any replacement of a weight, too, and `__getattr__` takes ten times as long.
        named = [(vars(module), name) for module, name in names]

        def read() -> list[Any]:
            weights = []
            for attributes, name in named:
                parameters = attributes["_parameters"]
                if name in parameters:
                    weights.append(parameters[name])
                elif name in attributes["_buffers"]:
                    weights.append(attributes["_buffers"][name])
                else:
                    weights.append(attributes[name])
            return weights

        if not (cast and self.casts_weights):
            return read
        dtype = self.dtype
        return lambda: [None if weight is None else weight.to(dtype) for weight in read()]

    def called(self, module: nn.Module) -> nn.Module:
        """Watch all attributes of a module that is called as it is, and return it."""
        self.watch.read_all(module)
        return module

    @property
    def trains_by_kernels(self) -> bool:
        """Whether gradients flow through kernels."""
        return self.grad and not self.reference and self.no_kernels is None

    @property
    def rows_dtype(self) -> torch.dtype | None:
        """Return the dtype in which norms write rows: under autocast that of its products; None for the input's.

        (FSDP2's policy of a block may give its rows another dtype than the one that operations were built for.)
        """
        kind = self.device.type
        return self.dtype if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) else None

    @property
    def casts_weights(self) -> bool:
        """Whether the rows have another dtype than the weights."""
        return self.weights_dtype not in (None, self.dtype)

    def reasons_replaced(self, module: nn.Module, kind: type[nn.Module] | None = None) -> list[str]:
        """Report what `reasons_replaced` of this file does, and a class that the proof of the tower does not cover."""
        reasons = reasons_replaced(module, kind, self.trusted)
        is_known = self.classes is None or type(module) in self.classes or module in self.trusted
        if not reasons and kind is None and not is_known:
            return [f"a {type(module).__name__} is none of this tower's own modules"]
        return reasons


Subject = Any
"""A module of transformers, a `Block` or all `Parts`, as an operation needs it."""
BuiltOperation = Any
"""A callable, with the arguments that the field of `Ops` documents."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a tower.

    Attributes:
        subjects: finds the modules in a tower's parts that it computes, or the parts themselves.
        reasons_against: reports why a subject is not what the operation computes.
        fused: builds the operation for a subject.
        plain: builds the same by the subject's module.
        guards: whether it guards its kernel by itself, since it calls modules too.
        missing: why a tower has no subject.
    """

    name: str
    summary: str
    subjects: Callable[[Parts], list[Subject]]
    reasons_against: Callable[[Subject, Context], list[str]]
    fused: Callable[[Subject, Context], BuiltOperation]
    plain: Callable[[Subject, Context], BuiltOperation]
    triton: bool = True
    guards: bool = False
    missing: str = ""

    def build(
        self, parts: Parts, context: Context, why_plain: str | None = None
    ) -> tuple[dict[int, BuiltOperation], str | None]:
        """Build the operation for every subject, by the subject's `id`; also why none is fused, or None."""
        subjects = self.subjects(parts)
        reason = why_plain or next(self._reasons(subjects, context), None)
        if reason is not None:
            return {id(subject): self.plain(subject, context) for subject in subjects}, reason
        context.fused.add(self.name)
        operations = {}
        for subject in subjects:
            operation = self.fused(subject, context)
            if self.triton and not self.guards:
                operation = machine.guarded(machine.KERNELS, operation)
            operations[id(subject)] = operation
        return operations, None

    def _reasons(self, subjects: list[Subject], context: Context) -> Iterator[str]:
        if not subjects:
            yield self.missing
        if self.triton and not context.reference and context.no_kernels is not None:
            yield context.no_kernels
        for subject in subjects:
            yield from self.reasons_against(subject, context)
