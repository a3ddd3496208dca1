"""A projection: the module itself, or the product of a Linear that may have LoRA adapters."""

from __future__ import annotations

from torch import nn

from hf_vit_accel.families.base import Part
from hf_vit_accel.ops.base import Apply, Context
from hf_vit_accel.ops.lora.modules import lora_of
from hf_vit_accel.ops.product import product


def is_foreign(module: Part, context: Context) -> bool:
    """Return whether a module has weights that no plain Linear holds: autocast may not decide the dtypes inside."""
    inner_modules = [inner for inner in module.modules() if inner._parameters]
    return any(context.reasons_replaced(inner, nn.Linear) for inner in inner_modules)


def build(module: Part, context: Context) -> Apply:
    """Build a projection: a product, or the module itself where it is none."""
    lora = lora_of(module, context)
    return context.called(module) if lora is None else product([lora], context)
