"""FSDP2 around the layers of a tower: what it adds to a block, and when a layer can run through one.

Its hooks on a block gather the weights of a layer before the block is called, and again before its gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_vit_accel.families.base import Part

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

VERSION_1 = (
    "FSDP 1 makes weights views of one flat tensor, which our operations do not read. FSDP2 is fast: set "
    "fsdp_version: 2 in accelerate's config, or call fully_shard"
)
"""Why a tower that `FullyShardedDataParallel` shards is not fast, and what to do."""


def is_version_1(module: nn.Module) -> bool:
    """Return whether FSDP 1 wraps a module, or has flattened its weight: a plain tensor within a forward."""
    weight = vars(module).get("weight", module._parameters.get("weight"))
    is_view = "_is_fsdp_managed_module" in vars(module) and type(weight) is torch.Tensor
    return is_view or hasattr(weight, "_fsdp_flattened") or "_fsdp_wrapped_module" in module._modules


def wrapper() -> Any:
    """Return the class that FSDP2 adds to modules; an empty tuple where nothing has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def class_of(module: nn.Module) -> type:
    """Return the class that a module was written as: FSDP2 derives a class of its own from it."""
    return type(module).__mro__[2] if isinstance(module, wrapper()) else type(module)


def holder_of(model: nn.Module, tower: nn.Module) -> nn.Module | None:
    """Return the innermost module around a tower that FSDP2 shards with its weights; None for none.

    It may leave the tower out (`ignored_params`), whose weights then are no shards.
    """
    shard_class: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if not any(isinstance(parameter, shard_class) for parameter in tower.parameters()):
        return None
    holders = [module for module in model.modules() if isinstance(module, wrapper()) and module is not tower]
    return next((holder for holder in reversed(holders) if tower in holder.modules()), None)


def hooked_by_fsdp(hook: Callable[..., object]) -> bool:
    """Return whether FSDP2 has set a hook."""
    return str(getattr(hook, "__module__", None)).startswith("torch.distributed.fsdp._fully_shard.")


def _policy_of(module: Part) -> MixedPrecisionPolicy | None:
    """Return the mixed-precision policy of a sharded module; None if this torch does not hold it there."""
    return getattr(module._get_fsdp_state(), "_mp_policy", None)


def gathered_dtype(module: nn.Module, default: torch.dtype) -> torch.dtype:
    """Return the dtype in which FSDP2 gathers the weights of a module."""
    shards: torch.dtype = next((value.dtype for value in module.parameters()), default)
    return getattr(_policy_of(module), "param_dtype", None) or shards


def reasons_against(blocks: Iterable[nn.Module], weights_dtype: torch.dtype) -> list[str]:
    """Return why layers cannot run through sharded blocks, beside other weights of this dtype."""
    for block in blocks:
        policy = _policy_of(block)
        if policy is None:
            return ["this torch does not report the dtype in which FSDP2 gathers weights"]
        gathered = gathered_dtype(block, weights_dtype)
        if gathered != weights_dtype:
            return [f"FSDP2 gathers a layer's weights in {gathered}, the others are in {weights_dtype}"]
        if policy.output_dtype not in (None, weights_dtype):
            return [f"FSDP2 casts the output of a layer to {policy.output_dtype}"]
    return []
