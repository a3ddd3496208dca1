"""Linears with PEFT's LoRA around them: which adapters are active, and how their weights join into one product.

PEFT's class computes x W^T + b + (x A^T) (s B)^T. A tiny module of it, run beside this formula, proves that.

`E` width of the input, `F` width of the output, `R` the ranks of all adapters, each rounded up to a multiple of 8.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Part
from hf_vit_accel.ops.base import Context, biases_or_zeros, own_forward
from hf_vit_accel.versions import ADAPTERS, LORA_LINEAR


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A Linear, and PEFT's module around it (`owner`) if there is one."""

    base: nn.Linear
    owner: Part = None

    @property
    def has_dropout(self) -> bool:
        """Whether an adapter drops out a part of its input in training."""
        dropouts = () if self.owner is None else self.owner.lora_dropout.values()
        return any(type(dropout) is nn.Dropout for dropout in dropouts)

    def active(self) -> list[str]:
        """List the names of the adapters that act now; that may change at every call."""
        owner = self.owner
        if owner is None:
            return []
        if owner.disable_adapters and owner.merged:
            owner.unmerge()  # PEFT's forward unmerges adapters here too
        if owner.disable_adapters or owner.merged:
            return []
        return [name for name in owner.active_adapters if name in owner.lora_A]


def lora_of(module: Part, context: Context) -> Lora | None:
    """Return a plain or LoRA-adapted Linear; None for a module that computes anything else or in another dtype."""
    if reasons_against(module, context):
        return None
    return Lora(base=module.base_layer, owner=module) if _is_lora(module) else Lora(base=module)


def reasons_against(module: nn.Module, context: Context) -> list[str]:
    """Report why `lora_of` returns None for a module."""
    replaced = context.reasons_replaced(module, nn.Linear)
    if not replaced or not _is_lora(module):
        return replaced
    reason = _reason_against(module, context)
    return [] if reason is None else [f"{replaced[0]}: {reason}"]


def _is_lora(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__name__) == LORA_LINEAR


def is_plain(module: Part) -> bool:
    """Return whether a module follows the formula, so that it treats each row by itself if the Linears inside do."""
    return _is_lora(module) and _reason_of_code(module) is None and not _is_variant(module)


def _reason_of_code(module: Part) -> str | None:
    """Return why the code of a Linear of PEFT's LoRA computes another formula; None if it does not."""
    kind = type(module)
    if own_forward(module) is not None:
        return "it has a forward of its own"
    code = getattr(kind.forward, "__code__", None)
    if code is None or code.co_filename != sys.modules[kind.__module__].__file__:
        return "its class's forward was replaced"  # a replacement may compute something else at another call
    if not _is_proven(kind.forward):
        return "this version of PEFT computes another formula"
    return None


def _reason_against(module: Part, context: Context) -> str | None:
    """Return why a Linear of PEFT's LoRA does not follow the formula; None if it does."""
    reason = _reason_of_code(module)
    if reason is not None:
        return reason
    if context.grad and not context.trains_by_kernels:
        return "gradients do not flow through kernels here"
    if _is_variant(module):
        return "it is a variant of LoRA, such as DoRA"
    for matrix in (*module.lora_A.values(), *module.lora_B.values()):
        if context.reasons_replaced(matrix, nn.Linear) or matrix.bias is not None:
            return "an adapter is no Linear without bias"
        # Outside autocast, PEFT computes adapters of another dtype in that dtype and casts the result.
        if context.rows_dtype is None and matrix.weight.dtype != context.dtype:
            return "an adapter has another dtype than the rows"
    if not all(type(dropout) in (nn.Identity, nn.Dropout) for dropout in module.lora_dropout.values()):
        return "an adapter's dropout is no nn.Dropout"
    if any(getattr(scaling, "requires_grad", False) for scaling in module.scaling.values()):
        return "an adapter's scaling is trained"
    return "its base layer is no plain Linear" if context.reasons_replaced(module.base_layer, nn.Linear) else None


def _is_variant(module: Part) -> bool:
    return bool(getattr(module, "lora_variant", True))  # PEFT before 0.15.2 does not say


@machine.probe
def _is_proven(forward: object) -> bool:
    """Return whether PEFT's forward computes the formula above, in this version."""
    with suppress(Exception):  # another version of PEFT may need other arguments
        return machine.run_isolated(_computes_formula, forward)
    return False


def _computes_formula(forward: object) -> bool:
    """Run a tiny module of PEFT beside the formula."""
    peft = importlib.import_module(ADAPTERS)  # slow
    with torch.device("meta"):  # draws no random numbers
        tiny = nn.Sequential(nn.Linear(6, 4))
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, tiny)
    tiny = tiny.to_empty(device="cpu").double()
    with torch.no_grad():
        for start, parameter in enumerate(tiny.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float64, device="cpu")
            parameter.copy_((count + start).sin().view_as(parameter))
        x_TE = torch.arange(18.0, dtype=torch.float64, device="cpu").cos().view(3, 6)
        owner: Part = tiny[0]
        [name] = Lora(base=owner.base_layer, owner=owner).active()
        a_RE = owner.lora_A[name].weight
        b_FR = owner.lora_B[name].weight
        expected = owner.base_layer(x_TE) + x_TE @ a_RE.t() @ b_FR.t() * 1.5
        is_stock = type(owner).forward is forward and owner.scaling[name] == 1.5
        return is_stock and torch.allclose(owner(x_TE), expected)


class Adapter(NamedTuple):
    """The index of an adapter's Linear in a product, and the factor of B A: a tensor where PEFT hot-swaps adapters."""

    linear: int
    scaling: float | Tensor


class LoraInputs(NamedTuple):
    """The arguments of a product, or one value for each of them (a gradient, a flag).

    Weights (F, E) and biases (F) or None of every Linear; A (rank, E) and B (F, rank) of every adapter.
    """

    weights: Sequence[Any]
    biases: Sequence[Any]
    adapters: Sequence[Adapter]
    a: Sequence[Any]
    b: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class JoinedLinears:
    """How Linears with the same input lie side by side in one product, for rows of a dtype.

    Zeros pad the weight of every Linear by `padding` rows, and the rows by `extra_features` columns.
    """

    widths: tuple[int, ...]
    padding: tuple[int, ...]
    in_features: int
    extra_features: int
    dtype: torch.dtype

    def unflatten(self, flat: Sequence[Any]) -> LoraInputs:
        """Name the arguments of a product: all weights, all biases, the tuple of adapters, all A, all B."""
        first_a = 2 * len(self.widths) + 1
        if len(flat) == first_a:
            return LoraInputs(flat[: first_a // 2], flat[first_a // 2 : -1], flat[-1], (), ())
        first_b = (first_a + len(flat)) // 2
        weights = flat[: len(self.widths)]
        biases = flat[len(self.widths) : first_a - 1]
        return LoraInputs(weights, biases, flat[first_a - 1], flat[first_a:first_b], flat[first_b:])

    @cached_property
    def is_single(self) -> bool:
        """Whether this is one Linear without padding: nothing is joined, and no gradient is split."""
        return len(self.widths) == 1 and not self.padding[0] and not self.extra_features

    def columns(self, linear: int) -> slice:
        """Return the columns of a Linear in the product's result."""
        start = sum(self.widths[:linear]) + sum(self.padding[:linear])
        return slice(start, start + self.widths[linear])

    def join(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the product; no bias where none of the Linears has one."""
        if self.is_single:
            return weights[0], None if biases is None else biases[0]
        padded = []
        for weight, rows in zip(weights, self.padding, strict=True):
            padded.append(_padded(weight, self.extra_features, rows))
        all_biases = None if biases is None else biases_or_zeros(weights, biases)
        if all_biases is None:
            return cat(padded), None
        padded_biases = []
        for bias, rows in zip(all_biases, self.padding, strict=True):
            padded_biases.append(F.pad(bias, (0, rows)) if rows else bias)
        return cat(padded), cat(padded_biases)

    def stack(self, inputs: LoraInputs) -> tuple[list[Tensor], list[Tensor]]:
        """Return A (rank, E) and s B (F, rank) of every adapter, padded for the product; gradients flow through it."""
        total = sum(self.widths) + sum(self.padding)
        padded_a = []
        padded_b = []
        for adapter, a_RE, b_FR in zip(inputs.adapters, inputs.a, inputs.b, strict=True):
            columns = self.columns(adapter.linear)
            rank_padding = -len(a_RE) % 8
            scaled_FR = scaled(b_FR, adapter.scaling).to(self.dtype)
            padded_a.append(_padded(a_RE.to(self.dtype), self.extra_features, rank_padding))
            if rank_padding or len(b_FR) < total:
                scaled_FR = F.pad(scaled_FR, (0, rank_padding, columns.start, total - columns.stop))
            padded_b.append(scaled_FR)
        return padded_a, padded_b


def scaled(x: Tensor, scaling: float | Tensor) -> Tensor:
    """Multiply by a number, or by a tensor on the device without waiting for its value."""
    return x if not isinstance(scaling, Tensor) and scaling == 1 else x * scaling


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; return a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x
