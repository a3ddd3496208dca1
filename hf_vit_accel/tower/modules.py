"""The memory of a tower's parameters, what called modules hold, and the hooks that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.ops.base import class_of_own_weight
from hf_vit_accel.tower import fsdp
from hf_vit_accel.watch import Watch

# Only CUDA builds have it. `data_ptr` takes 25 us for 400 parameters, five times as long.
_SAME_POINTERS: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_CAST_BY_AUTOCAST = {torch.bfloat16, torch.float16, torch.float32}


class WeightMemory:
    """Addresses, dtypes and sizes of a tower's parameters. It holds none of the parameters.

    Two that are equal were made of parameters at the same addresses, perhaps by two readings of one tower.

    Args:
        own: Those that our operations read.
        others: Those of adapters and called modules.
        called: The ids of the dictionaries that hold the others.

    Attributes:
        pointers: The addresses of all parameters; None if a tensor class has none.
        dtype: Of the first parameter.
        dtypes: Of all parameters that our operations read.
        contiguous: Whether every parameter is contiguous.
        nbytes: Their bytes in all.
        key: Their part of the key of a spec: all dtypes, and which modules are called.
        reasons: Why kernels cannot read them.
        mixed: Why kernels cannot read them without autocast, which casts them to one dtype; None for one dtype.
    """

    def __init__(
        self, own: Sequence[nn.Parameter], others: Sequence[nn.Parameter], called: tuple[int, ...], offloaded: bool
    ) -> None:
        parameters = [*own, *others]
        self.indices = list(range(len(parameters)))
        try:
            self.pointers: list[int] | None = list(map(Tensor.data_ptr, parameters))
        except RuntimeError:  # a tensor class without memory
            self.pointers = None
        self.dtype = parameters[0].dtype if parameters else torch.float32
        self.dtypes = frozenset(parameter.dtype for parameter in own)
        self.contiguous = all(map(Tensor.is_contiguous, parameters))
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

    def are(self, parameters: list[nn.Parameter]) -> bool:
        """Return whether these are the parameters, at the same addresses."""
        try:
            if _SAME_POINTERS is not None and self.pointers and len(parameters) == len(self.indices):
                is_same: bool = _SAME_POINTERS(parameters, self.pointers, self.indices)
            else:
                is_same = list(map(Tensor.data_ptr, parameters)) == self.pointers
        except (RuntimeError, TypeError):  # a tensor class without memory
            return False
        return is_same and (not parameters or parameters[0].dtype == self.dtype)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, WeightMemory)
            and self.pointers is not None
            and (self.pointers, self.dtype, self.contiguous, self.nbytes, self.key)
            == (other.pointers, other.dtype, other.contiguous, other.nbytes, other.key)
        )

    __hash__ = None  # type: ignore[assignment]


def is_called(module: nn.Module, known: Collection[type]) -> bool:
    """Return whether a module is called as it is: of a third party's class, or with weights of a class of its own."""
    kind = fsdp.class_of(module)
    is_known = kind in known or kind.__module__.startswith("torch.nn.")
    return not is_known or class_of_own_weight(module) is not None


def adapters_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield PEFT's modules beside the layer that a module of its own wraps. PEFT casts their inputs and outputs.

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
