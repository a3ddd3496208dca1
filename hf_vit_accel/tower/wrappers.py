"""Modules that other code puts around the modules of a tower, and that compute what the module inside computes.

Our operations replace the module inside. A checkpointed layer runs by the `checkpoint_fn` of its wrapper (accelerate's
`fsdp_activation_checkpointing`, torchtitan). A compiled module (accelerate's `compile_regions`) is not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from hf_vit_accel.families.base import Block, Parts
from hf_vit_accel.tower import fsdp

CHECKPOINTED = "_checkpoint_wrapped_module"
_INSIDE = {
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"): CHECKPOINTED,
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
}
"""The classes, and the name of the module inside."""
WRAPPED = frozenset(_INSIDE.values())


def module_inside(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None for any other module.

    A checkpoint with a `context_fn` stores the results of some operations, which ours might write to: it is none.
    """
    kind = fsdp.class_of(module)
    name = _INSIDE.get((kind.__module__, kind.__name__))
    if name is None or "context_fn" in getattr(getattr(module, "checkpoint_fn", None), "keywords", ()):
        return None
    return module._modules[name]


def looked_through(value: Any) -> Any:
    """Return the parts of a tower, or some of them, with the module inside in the place of every wrapper."""
    if isinstance(value, nn.Module):
        inside = module_inside(value)
        return value if inside is None else looked_through(inside)
    if isinstance(value, tuple):
        return tuple(looked_through(item) for item in value)
    if isinstance(value, Mapping):
        return MappingProxyType({key: looked_through(item) for key, item in value.items()})
    if isinstance(value, Parts | Block):
        return replace(value, **{field.name: looked_through(getattr(value, field.name)) for field in fields(value)})
    return value
