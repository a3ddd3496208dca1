"""What an operation is: which modules it computes, what stands against it there, and how it is built from them.

Operations read weights from their modules at every call: what changes there is seen. What else they read, they read
through a `Context`, which remembers it: when one of those attributes changes, they are built anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Parts

Apply = Callable[[Tensor], Tensor]
"""Rows to rows."""
AddNorm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(x, delta), both (T, E), to (x + delta, what is made of it)."""


def placed_by_accelerate(module: nn.Module) -> Any:
    """The device to which accelerate's hook on a module brings inputs; None for no hook, or one that does more.

    With `device_map` such hooks are on every module. Inside a tower on one device they do nothing.
    """
    hook: Any = vars(module).get("_hf_hook")
    known = (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")
    return hook.execution_device if known and not hook.offload else None


def own_forward(module: nn.Module) -> Any:
    """A forward that was set on an instance; None for none, or the class's (which removed accelerate hooks leave)."""
    forward = vars(module).get("forward" if placed_by_accelerate(module) is None else "_old_forward")
    ours = getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module
    return None if ours else forward


def reasons_replaced(module: Any, kind: type[nn.Module] | None = None) -> list[str]:
    """Why a module may do something else than its class in torch (`kind`) or transformers was written to do."""
    name = type(module).__name__
    if kind is not None and type(module) is not kind:
        name = f"{type(module).__module__}.{name}" if name == kind.__name__ else name
        return [f"a {name} stands where a plain {kind.__name__} was"]
    if own_forward(module) is not None:
        return [f"a {name} has a forward of its own"]
    if not machine.is_upstream(type(module).forward):
        home = type(module).__module__
        if home.startswith(("torch.", "transformers.")):
            return [f"the forward of {name} was replaced by another"]
        return [f"a {home}.{name} is neither torch's nor transformers'"]
    return []


class Reads:
    """Attributes of modules, with the values that they had when they were read."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self._absent: list[tuple[str, dict[str, Any]]] = []
        self._values: list[Any] = []

    def read(self, module: Any, name: str, default: Any = None) -> Any:
        """An attribute that is no weight."""
        attributes = vars(module)
        if name in attributes:
            self._names.setdefault(id(attributes), (attributes, {}))[1][name] = None
        else:
            self._absent.append((name, attributes))
        return getattr(module, name, default)

    def all_of(self, module: nn.Module) -> None:
        """Every attribute of a module that is called as it is, and of those inside it; a Linear has none that count."""
        for each in module.modules():
            if type(each) is not nn.Linear:
                for name in vars(each).keys() - vars(_BARE).keys():
                    self.read(each, name)

    def seal(self) -> None:
        """All is read: remember the values."""
        self._getters = [(itemgetter(*names), attributes) for attributes, names in self._names.values()]
        self._values = [copied(get(attributes)) for get, attributes in self._getters]

    def unchanged(self) -> bool:
        """Whether all of them are still what they were when this was sealed."""
        try:
            return [get(attributes) for get, attributes in self._getters] == self._values and not any(
                name in attributes for name, attributes in self._absent
            )
        except (KeyError, RuntimeError):  # it is gone, or a tensor that now is another
            return False


def copied(value: Any) -> Any:
    """Copy nested containers, since callers may change them in place; other values stay as they are."""
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, MutableSet | MutableSequence | MutableMapping):
        return copy.copy(value)
    return value


def filled(weights: Sequence[Any], biases: Sequence[Any]) -> list[Any] | None:
    """The biases of products that are made as one, zeros for those that are missing; None where all are."""
    if all(bias is None for bias in biases):
        return None
    return [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]


Slots = Sequence[tuple[dict[str, Any], str]]
"""Where modules hold parameters, one by one: the dictionary, and the name in it."""


@contextmanager
def replaced(slots: Slots, by: Sequence[Any]) -> Iterator[None]:
    """Within the with block, modules hold others in the place of their parameters."""
    former = [place[name] for place, name in slots]
    try:
        for (place, name), each in zip(slots, by, strict=True):
            place[name] = each
        yield
    finally:
        for (place, name), each in zip(slots, former, strict=True):
            place[name] = each


_BARE = nn.Module()


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What operations are built for.

    dtype: of the rows; weights: of the weights, which are cast where that is another (autocast). no_kernels: why Triton
    kernels cannot run there, None if they can. reference: whether plain torch stands in for them, differentiable and on
    any device. grad: whether gradients flow through what is built. classes: those whose
    forwards are proven, None for any of transformers. fused: operations earlier in the table that are. activations:
    what was found by trying them.
    """

    device: torch.device
    dtype: torch.dtype
    weights: torch.dtype | None = None
    no_kernels: str | None = None
    reference: bool = False
    grad: bool = False
    classes: frozenset[type] | None = None
    reads: Reads = field(default_factory=Reads)
    fused: set[str] = field(default_factory=set)
    activations: dict[Any, str | None] = field(default_factory=dict)

    def read(self, module: Any, name: str, default: Any = None) -> Any:
        """An attribute of a module; see `Reads`."""
        return self.reads.read(module, name, default)

    def reader(self, *places: tuple[nn.Module, str], cast: bool = True) -> Callable[[], list[Any]]:
        """What reads weights, or biases that are None, as they are at that time. cast: to the dtype of the rows.

        From where modules hold them, and whoever replaces them puts others: `__getattr__` takes ten times as long.
        """
        held = [(vars(module), name) for module, name in places]

        def read() -> list[Any]:
            return [
                (of if name in (of := own["_parameters"]) or name in (of := own["_buffers"]) else own)[name]
                for own, name in held
            ]

        if not (cast and self.casts):
            return read
        to_rows = self.cast
        return lambda: list(map(to_rows, read()))

    def called(self, module: nn.Module) -> nn.Module:
        """A module that is to be called as it is."""
        self.reads.all_of(module)
        return module

    @property
    def trains_by_kernels(self) -> bool:
        """Whether gradients flow through kernels."""
        return self.grad and not self.reference and self.no_kernels is None

    @property
    def rows_dtype(self) -> torch.dtype | None:
        """What norms write rows in: of autocast's products, where they would be fp32; None for that of what is normed.

        (Of a block that FSDP2 shards by a policy, all is of another dtype than when operations were built.)
        """
        kind = self.device.type
        return self.dtype if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) else None

    @property
    def casts(self) -> bool:
        """Whether the rows are of another dtype than the weights."""
        return self.weights not in (None, self.dtype)

    @property
    def cast(self) -> Callable[[Any], Any]:
        """A weight, or a bias that is None, to the dtype of the rows; once per forward: each weight serves once."""
        dtype = self.dtype
        if not self.casts:
            return lambda weight: weight
        return lambda weight: None if weight is None else weight.to(dtype)

    def reasons_replaced(self, module: Any, kind: type[nn.Module] | None = None) -> list[str]:
        """As the function of that name; also for a class of transformers that the proven tower does not have there."""
        reasons = reasons_replaced(module, kind)
        if not reasons and kind is None and self.classes is not None and type(module) not in self.classes:
            return [f"a {type(module).__name__} is none of this tower's own modules"]
        return reasons


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a tower, as `fuse` names it.

    subjects: parts -> what it computes, one callable each (modules, or the parts themselves). reasons_against: why one
    of them is not what the operation computes. fused: one of them -> the operation. plain: the same by its module.
    triton: whether it is a Triton kernel. guards: whether it marks the kernel's errors itself, as it calls modules too.
    missing: what a tower without subjects lacks.
    """

    name: str
    summary: str
    subjects: Callable[[Parts], list[Any]]
    reasons_against: Callable[[Any, Context], list[str]]
    fused: Callable[[Any, Context], Any]
    plain: Callable[[Any, Context], Any]
    triton: bool = True
    guards: bool = False
    missing: str = ""

    def build(self, parts: Parts, context: Context, *, wanted: bool) -> tuple[list[Any], str | None]:
        """A callable for each subject, and why they are not fused; None if they are."""
        subjects = self.subjects(parts)
        why = next(self._reasons(subjects, context, wanted), None)
        if why is None:
            context.fused.add(self.name)
            made = [self.fused(subject, context) for subject in subjects]
            return [
                machine.guarded(machine.KERNELS, one) for one in made
            ] if self.triton and not self.guards else made, None
        return [self.plain(subject, context) for subject in subjects], why

    def _reasons(self, subjects: list[Any], context: Context, wanted: bool) -> Iterator[str]:
        if not wanted:
            yield "not asked for"
        if not subjects:
            yield self.missing
        if self.triton and not context.reference and context.no_kernels is not None:
            yield context.no_kernels
        for subject in subjects:
            yield from self.reasons_against(subject, context)
