"""The modules of a tower, the dictionaries and the memory of its parameters, and the hooks that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.ops.base import class_of_own_weight
from hf_vit_accel.tower import fsdp
from hf_vit_accel.watch import Watch

_CAST_BY_AUTOCAST = {torch.bfloat16, torch.float16, torch.float32}


class WeightMemory:
    """Addresses, dtypes and sizes of a tower's parameters, adapters' last. It holds none of the parameters.

    Two that are equal were made of parameters at the same addresses, perhaps by two readings of one tower.

    Args:
        parameters: All of them, in the order of the snapshot: those that our operations read come first.
        pointers: See the attribute.
        offloaded: Whether accelerate moves weights or inputs itself.
        read: How many of the first parameters our operations read. The others belong to adapters and called modules.
        called: The ids of the dictionaries that belong to called modules.

    Attributes:
        indices: 0, 1, 2, ...: all parameters, for torch's comparison of addresses.
        pointers: The addresses of all parameters; None if a tensor class has none.
        dtype: Of the first parameter.
        dtypes: Of all parameters that our operations read.
        contiguous: Whether every parameter is contiguous.
        transposable: The indices of contiguous parameters with two equal sizes. Transposed, such a parameter keeps its
            address and its shape.
        count: The number of parameters.
        nbytes: Their bytes in all.
        key: Their part of the key of a spec: all dtypes, and which modules are called.
        reasons: Why kernels cannot read them.
        mixed: Why kernels cannot read them without autocast, which casts them to one dtype; None for one dtype.
        holds_plain_tensors: The answer of `Snapshot.holds_plain_tensors`; None before it was computed.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        pointers: list[int] | None,
        offloaded: bool,
        read: int = 0,
        called: tuple[int, ...] = (),
    ) -> None:
        self.indices = list(range(len(parameters)))
        self.pointers = pointers
        self.dtype = parameters[0].dtype if parameters else torch.float32
        self.contiguous = all(map(Tensor.is_contiguous, parameters))
        self.transposable = [
            index
            for index, parameter in enumerate(parameters)
            if len(set(parameter.shape)) < parameter.dim() and parameter.is_contiguous()
        ]
        self.count = len(parameters)
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        self.holds_plain_tensors: bool | None = None
        self.reasons: list[str] = []
        self.dtypes = frozenset(parameter.dtype for parameter in parameters[:read])
        dtypes = enumerate(parameter.dtype for parameter in parameters)
        self.key = frozenset([*dtypes, ("read", read), ("called", called)])  # a frozenset computes its hash once
        classes = {type(parameter) for parameter in parameters[:read]} - {nn.Parameter}
        self.mixed: str | None = None
        if len(self.dtypes) > 1:
            self.mixed = f"parameters of several dtypes ({', '.join(sorted(map(str, self.dtypes)))})"
        if self.mixed and not self.dtypes <= _CAST_BY_AUTOCAST:
            self.reasons.append(self.mixed)
        if classes:
            names = sorted(kind.__name__ for kind in classes)
            self.reasons.append(f"parameters of a class of their own ({', '.join(names)})")
        if hasattr(next(iter(parameters), None), "ds_id"):
            self.reasons.append("DeepSpeed ZeRO-3 gathers the weights of a module when it is called")
        if offloaded and len({parameter.device for parameter in parameters}) > 1:
            self.reasons.append("parameters on several devices")

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, WeightMemory)
            and self.pointers is not None
            and (self.pointers, self.dtype, self.contiguous, self.nbytes, self.key)
            == (other.pointers, other.dtype, other.contiguous, other.nbytes, other.key)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterDicts:
    """The `_parameters` of modules: the dictionaries that hold a tower's parameters.

    Attributes:
        complete: Of modules none of whose parameters is None.
        partial: Of modules with a parameter that is None.
        adapters: Of PEFT's modules beside a layer. PEFT casts their inputs and outputs.
        called: Of modules that are called as they are: of a third party's class, or with weights of a class of its own.
        sharded: Of modules that FSDP2 shards apart from the tower.
    """

    complete: list[dict[str, Any]] = field(default_factory=list)
    partial: list[dict[str, Any]] = field(default_factory=list)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    called: list[dict[str, Any]] = field(default_factory=list)
    sharded: list[dict[str, Any]] = field(default_factory=list)


def parameter_dicts_of(
    modules: Sequence[nn.Module], wrapped: Sequence[nn.Module], known: Collection[type]
) -> ParameterDicts:
    """Group the dictionaries of parameters by kind."""
    dicts = ParameterDicts()
    sharded_ids = {id(inner) for module in wrapped for inner in module.modules()}
    adapter_ids = {id(adapter) for module in modules for adapter in _adapters_of(module)}
    for module in modules:
        parameters = module._parameters
        if id(module) in sharded_ids:
            dicts.sharded.append(parameters)
        elif id(module) in adapter_ids:
            dicts.adapters.append(parameters)
        elif parameters and _is_called(module, known):
            dicts.called.append(parameters)
        elif parameters and any(value is None for value in parameters.values()):
            dicts.partial.append(parameters)
        elif parameters:
            dicts.complete.append(parameters)
    return dicts


def _is_called(module: nn.Module, known: Collection[type]) -> bool:
    kind = fsdp.class_of(module)
    is_known = kind in known or kind.__module__.startswith("torch.nn.")
    return not is_known or class_of_own_weight(module) is not None


def _adapters_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield PEFT's modules beside the layer that a module of its own wraps.

    Copies of whole modules are left out: PEFT casts nothing around them.
    """
    names = getattr(module, "adapter_layer_names", ()) if "base_layer" in module._modules else ()
    for name in names:
        part = module._modules.get(name)
        if part is not None:
            yield from part.modules()


_OPAQUE = (nn.Module, type, FunctionType, ModuleType)


def watch_called(modules: Sequence[nn.Module]) -> Watch:
    """Watch the tensors that called modules hold, as attributes of whatever object, for graphs that read them.

    The watch keeps them alive, so that no other tensor takes their address.
    """
    watch = Watch()
    watch.add("the mode of a linear", attrgetter("training"), modules)
    pending: list[dict[str, Any]] = []
    for module in modules:
        pending += [module._parameters, module._buffers, vars(module)]
    slots: list[tuple[dict[str, Any], str, object]] = []
    seen: set[int] = set()
    for attributes in pending:  # which grows
        for name, value in attributes.items():
            holds_attributes = hasattr(value, "__dict__") and not isinstance(value, _OPAQUE)
            if holds_attributes and id(value) not in seen:
                seen.add(id(value))
                pending.append(vars(value))
            if holds_attributes or value is None or isinstance(value, Tensor):
                slots.append((attributes, name, value))
    watch.add("a tensor of a linear", _hold_the_same, [slots])
    watch.add("the memory of a linear", Tensor.data_ptr, [value for *_, value in slots if isinstance(value, Tensor)])
    watch.remember()
    return watch


def _hold_the_same(slots: Sequence[tuple[dict[str, Any], str, object]]) -> bool:
    """Return whether dictionaries hold these very values."""
    return all(attributes.get(name) is value for attributes, name, value in slots)


def is_inert(hook: Callable[..., object]) -> bool:
    """Return whether a hook is one of transformers' that does nothing unless hidden states or attentions are requested.

    Output-capturing hooks stay on after one use.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing" or is_output_marker(hook)


def is_output_marker(hook: Callable[..., object]) -> bool:
    """Return whether a hook is the one that makes outputs require gradients, for checkpointing."""
    return (
        getattr(hook, "__module__", None) == "transformers.modeling_utils"
        and getattr(hook, "__name__", None) == "make_inputs_require_grads"
    )
