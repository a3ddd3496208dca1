"""Linears with PEFT's LoRA beside them: x W^T + b + (x A^T) (s B)^T, where s is an adapter's scaling.

PEFT makes the adapter's share a tensor of its own, scales it to another, adds it to a third, and casts on the way; here
one small product adds to the result of the large one, in both directions, and the gradient of W is made only where it
is trained. What PEFT's class computes is proven by running a tiny one beside this formula.

`T` rows, `E` width of the input, `F` width of the output, `G` that width rounded up to a multiple of 8, `R` the ranks
of all adapters of some products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hf_vit_accel import env
from hf_vit_accel.ops.activation import quick_gelu_reference, swiglu, swiglu_reference
from hf_vit_accel.ops.base import Context, own_forward
from hf_vit_accel.ops.column_sum import column_sum
from hf_vit_accel.ops.gelu_backward import gelu, gelu_gradient
from hf_vit_accel.ops.norm_backward import Norm, keep, kept, norm_of
from hf_vit_accel.ops.swiglu_backward import swiglu_gradient

Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A Linear, and PEFT's module around it, if there is one."""

    base: nn.Linear
    owner: Any = None

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
    if (context.grad and not context.trains_by_kernels) or not _known(kind.forward):
        return None
    variants = [*getattr(module, "lora_variant", ()), *(n for n, on in getattr(module, "use_dora", {}).items() if on)]
    each = [*module.lora_A.values(), *module.lora_B.values()]
    strange = context.read(module, "fan_in_fan_out") or variants or len(each) != 2 * len(module.lora_A)
    strange = strange or any(context.reasons_replaced(one, nn.Linear) or one.bias is not None for one in each)
    strange = strange or any(type(one) not in (nn.Identity, nn.Dropout) for one in module.lora_dropout.values())
    # Outside of autocast adapters of another dtype are computed in theirs, and the result is cast.
    strange = strange or (context.rows_dtype is None and {one.weight.dtype for one in each} != {context.dtype})
    if strange or context.reasons_replaced(module.base_layer, nn.Linear):
        return None
    return Lora(base=module.base_layer, owner=module)


@env.probe
def _known(forward: Any) -> bool:
    """Whether PEFT's forward, of this version or patched by somebody, computes the formula above."""
    return env.apart(_try, forward)


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


# --- products ---------------------------------------------------------------------------------------------------------


def adapted_reference(
    x_TE: torch.Tensor,
    weight_FE: torch.Tensor,
    bias_F: torch.Tensor | None,
    a_RE: torch.Tensor,
    b_FR: torch.Tensor,
    norm: Norm | None = None,
) -> torch.Tensor:
    """x W^T + b + (x A^T) B^T, (T, F)."""
    return F.linear(x_TE, weight_FE, bias_F) + F.linear(F.linear(x_TE, a_RE), b_FR)


class AdaptedFunction(torch.autograd.Function):
    """`adapted` as autograd runs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: torch.Tensor,
        weight_FE: torch.Tensor,
        bias_F: torch.Tensor | None,
        a_RE: torch.Tensor,
        b_FR: torch.Tensor,
        norm: Norm | None,
    ) -> torch.Tensor:
        needs_x, needs_weight, _, needs_a, needs_b, _ = ctx.needs_input_grad
        u_TR = F.linear(x_TE, a_RE)
        tensors, ctx.settings = keep(x_TE, norm) if needs_weight or needs_a else ((), None)
        of_x = (weight_FE, a_RE) if needs_x else (None, None)
        ctx.save_for_backward(*of_x, b_FR, u_TR if needs_b else None, *tensors)
        return F.linear(x_TE, weight_FE, bias_F).addmm_(u_TR, b_FR.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        weight_FE, a_RE, b_FR, u_TR, *tensors = ctx.saved_tensors
        dy_TF = dy_TF.contiguous()
        du_TR = dy_TF @ b_FR
        x_TE: Any = kept(tensors, ctx.settings, len(dy_TF)) if needs_weight or needs_a else None
        return (
            (dy_TF @ weight_FE).addmm_(du_TR, a_RE) if needs_x else None,
            dy_TF.t() @ x_TE if needs_weight else None,
            column_sum(dy_TF) if needs_bias else None,
            du_TR.t() @ x_TE if needs_a else None,
            dy_TF.t() @ u_TR if needs_b else None,
            None,
        )


def adapted(
    x_TE: torch.Tensor,
    weight_FE: torch.Tensor,
    bias_F: torch.Tensor | None,
    a_RE: torch.Tensor,
    b_FR: torch.Tensor,
    norm: Norm | None = None,
) -> torch.Tensor:
    """`adapted_reference`, rounded after both products; all of one dtype. norm: see `linear`."""
    out_TF: torch.Tensor = AdaptedFunction.apply(x_TE, weight_FE, bias_F, a_RE, b_FR, norm)
    return out_TF


def product(loras: Sequence[Lora], context: Context, inner: int | None = None) -> Rows:
    """Rows (T, E) to what Linears make of them, side by side, each of some filled up with zeros to `G`.

    inner: how many columns the rows have, where that is more than E; those beyond are zeros.
    """
    weights = context.reader(*((lora.base, name) for name in ("weight", "bias") for lora in loras))
    dtype, more = context.dtype, (inner or loras[0].base.in_features) - loras[0].base.in_features
    widths = [len(lora.base.weight) for lora in loras]
    spare = [-width % 8 if len(loras) > 1 else 0 for width in widths]
    starts = [sum(widths[:at]) + sum(spare[:at]) for at in range(len(loras))]
    total = sum(widths) + sum(spare)

    def joined() -> tuple[torch.Tensor, torch.Tensor | None]:
        each = weights()
        whole, biases = [_padded(w, more, 0, rows) for w, rows in zip(each, spare, strict=False)], each[len(loras) :]
        if all(bias is None for bias in biases):
            return _cat(whole, 0), None
        some = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(each, biases, strict=False)]
        return _cat(whole, 0), _cat(
            [F.pad(b, (0, rows)) if rows else b for b, rows in zip(some, spare, strict=True)], 0
        )

    def run(x_TE: torch.Tensor) -> torch.Tensor:
        a_RE: list[torch.Tensor] = []
        b_FR: list[torch.Tensor] = []
        dropouts: list[nn.Module] = []
        for lora, start, width in zip(loras, starts, widths, strict=True):
            for a, b, dropout, scaling in lora.active():
                share, rank = b.weight if scaling == 1 else b.weight * scaling, -len(a.weight) % 8
                a_RE.append(_padded(a.weight.to(dtype), more, 0, rank))
                b_FR.append(_padded(share.to(dtype), rank, start, total - start - width))
                dropouts.append(dropout)
        weight_FE, bias_F = joined()  # now that none is to be unmerged
        if not a_RE:
            return F.linear(x_TE, weight_FE, bias_F)
        if torch.is_grad_enabled() and not any(type(each) is nn.Dropout and each.training for each in dropouts):
            return adapted(x_TE, weight_FE, bias_F, _cat(a_RE, 0), _cat(b_FR, 1), norm_of(x_TE))
        u_TR = _cat([F.linear(dropout(x_TE), a) for dropout, a in zip(dropouts, a_RE, strict=True)], 1)
        return F.linear(x_TE, weight_FE, bias_F).addmm_(u_TR, _cat(b_FR, 1).t())

    return run


def _cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _padded(x: torch.Tensor, columns: int, above: int, below: int) -> torch.Tensor:
    return F.pad(x, (0, columns, above, below)) if columns or above or below else x


# --- MLPs -------------------------------------------------------------------------------------------------------------


def activated_reference(z: torch.Tensor, kind: str, limit: float | None = None) -> torch.Tensor:
    """The activation of rows (T, F); of a SwiGLU, kind "silu", of gate and up side by side, (T, 2 F)."""
    if kind == "silu":
        return swiglu_reference(*z.chunk(2, dim=-1), limit=limit)
    return quick_gelu_reference(z) if kind == "quick_gelu" else F.gelu(z, approximate="tanh")


class ActivatedFunction(torch.autograd.Function):
    """`activated` as autograd runs it."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, kind: str, limit: float | None) -> torch.Tensor:
        ctx.save_for_backward(z)
        ctx.kind, ctx.limit = kind, limit
        return swiglu(*z.chunk(2, dim=-1), limit=limit) if kind == "silu" else gelu(z, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_TF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        dz = torch.empty_like(z)
        if ctx.kind == "silu":
            swiglu_gradient(z, dh_TF.clone(memory_format=torch.contiguous_format), dz, ctx.limit)
        else:
            gelu_gradient(z, dh_TF.contiguous(), dz, z, ctx.kind)
        return dz, None, None


def activated(z: torch.Tensor, kind: str, limit: float | None = None) -> torch.Tensor:
    """`activated_reference` as one kernel in each direction, that keeps its input only."""
    out_TF: torch.Tensor = ActivatedFunction.apply(z, kind, limit)
    return out_TF


def mlp(before: Sequence[Lora], after: Lora, kind: str, limit: float | None, context: Context) -> Rows:
    """An MLP whose Linears have adapters: two products with an activation between them, or a SwiGLU, kind "silu"."""
    width = len(before[0].base.weight)
    first = product(before, context)
    last = product([after], context, inner=-(-width // 8) * 8 if len(before) > 1 else width)
    return lambda x_TE: last(activated(first(x_TE), kind, limit))
