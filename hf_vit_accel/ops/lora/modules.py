"""Linears with PEFT's LoRA around them: which they are, and what acts of them now.

What PEFT's class computes, x W^T + b + (x A^T) (s B)^T, is proven by running a tiny one beside this formula.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_vit_accel import machine
from hf_vit_accel.ops.base import Context, own_forward


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A Linear, and PEFT's module around it, if there is one."""

    base: nn.Linear
    owner: Any = None

    @property
    def drops(self) -> bool:
        """Whether an adapter drops out some of its input in training."""
        dropouts = () if self.owner is None else self.owner.lora_dropout.values()
        return any(type(dropout) is nn.Dropout for dropout in dropouts)

    def active(self) -> list[tuple[nn.Linear, nn.Linear, nn.Module, float]]:
        """(A, B, dropout, scaling) of the adapters that act now: which do may change at every call."""
        owner = self.owner
        if owner is None:
            return []
        if owner.disable_adapters and owner.merged:
            owner.unmerge()  # as PEFT's own forward
        if owner.disable_adapters or owner.merged:
            return []
        names = [name for name in owner.active_adapters if name in owner.lora_A]
        return [
            (owner.lora_A[name], owner.lora_B[name], owner.lora_dropout[name], owner.scaling[name]) for name in names
        ]


def lora_of(module: Any, context: Context) -> Lora | None:
    """What a module is as a Linear with adapters; None for what computes anything else, or in another dtype."""
    if not context.reasons_replaced(module, nn.Linear):
        return Lora(base=module)
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or own_forward(module) is not None:
        return None
    code = getattr(kind.forward, "__code__", None)  # of somebody else's, it might act otherwise at another call
    if code is None or code.co_filename != sys.modules[kind.__module__].__file__ or not _known(kind.forward):
        return None
    if context.grad and not context.trains_by_kernels:
        return None
    variants = [*getattr(module, "lora_variant", ()), *(n for n, on in getattr(module, "use_dora", {}).items() if on)]
    each = [*module.lora_A.values(), *module.lora_B.values()]
    strange = context.read(module, "fan_in_fan_out") or variants or len(each) != 2 * len(module.lora_A)
    strange = strange or any(context.reasons_replaced(one, nn.Linear) or one.bias is not None for one in each)
    strange = strange or any(type(one) not in (nn.Identity, nn.Dropout) for one in module.lora_dropout.values())
    strange = strange or any(getattr(scaling, "requires_grad", False) for scaling in module.scaling.values())
    # Outside of autocast adapters of another dtype are computed in theirs, and the result is cast.
    strange = strange or (context.rows_dtype is None and {one.weight.dtype for one in each} != {context.dtype})
    if strange or context.reasons_replaced(module.base_layer, nn.Linear):
        return None
    return Lora(base=module.base_layer, owner=module)


@machine.probe
def _known(forward: Any) -> bool:
    """Whether PEFT's forward computes, in this version, the formula above."""
    with suppress(Exception):  # whatever another version wants
        return machine.run_isolated(_try, forward)
    return False


def _try(forward: Any) -> bool:
    import peft

    with torch.device("meta"):  # which draws no random numbers
        tiny = nn.Sequential(nn.Linear(6, 4))
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, tiny)
    tiny = tiny.to_empty(device="cpu").double()
    with torch.no_grad():
        for start, parameter in enumerate(tiny.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float64, device="cpu")
            parameter.copy_((count + start).sin().view_as(parameter))
        x_TE = torch.arange(18.0, dtype=torch.float64, device="cpu").cos().view(3, 6)
        owner: Any = tiny[0]
        [(a, b, _, scaling)] = Lora(base=owner.base_layer, owner=owner).active()
        made = owner.base_layer(x_TE) + x_TE @ a.weight.t() @ b.weight.t() * 1.5
        return type(owner).forward is forward and scaling == 1.5 and torch.allclose(owner(x_TE), made)
