"""FSDP2 around the layers of a tower: its hooks on a block, and when a layer can run through a sharded block.

The hooks gather the layer's weights before its block is called, and again before the layer's gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def wrapper() -> Any:
    """Return the class that FSDP2 adds to the classes of modules; no class if nothing has imported FSDP2."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def class_of(module: nn.Module) -> type:
    """Return the class that a module was written as: FSDP2 derives one of its own from it."""
    return type(module).__mro__[2] if isinstance(module, wrapper()) else type(module)


def hooked_by_fsdp(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of FSDP2's."""
    return str(getattr(hook, "__module__", None)).startswith("torch.distributed.fsdp._fully_shard.")


def _policy_of(module: Any) -> Any:
    """Return the mixed-precision policy of a sharded module; None if this torch does not hold it there."""
    return getattr(module._get_fsdp_state(), "_mp_policy", None)


def gathered_dtype(module: Any, default: torch.dtype) -> torch.dtype:
    """Return the dtype in which FSDP2 gathers the weights of a module that it shards.

    Args:
        module: The sharded module.
        default: The dtype of a module without weights.
    """
    shard_dtype: torch.dtype = next((parameter.dtype for parameter in module.parameters()), default)
    return getattr(_policy_of(module), "param_dtype", None) or shard_dtype


def reasons_against(blocks: Iterable[Any], dtype: torch.dtype) -> list[str]:
    """List why layers cannot run through sharded blocks.

    Args:
        blocks: The sharded blocks.
        dtype: The dtype of the tower's other weights.
    """
    for block in blocks:
        policy = _policy_of(block)
        if policy is None:
            return ["this torch does not tell in which dtype FSDP2 gathers weights"]
        layer_dtype = gathered_dtype(block, dtype)
        if layer_dtype != dtype:
            return [f"FSDP2 gathers a layer's weights in {layer_dtype}, the others are in {dtype}"]
        if policy.output_dtype not in (None, dtype):
            return [f"FSDP2 casts the output of a layer to {policy.output_dtype}"]
    return []
