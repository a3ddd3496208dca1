"""The weights of Linears with LoRA adapters, by name, and how they join into one product.

`E` width of the input, `F` width of the output, `G` that width rounded up to a multiple of 8.
`R` the ranks of all adapters, each rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.base import biases_or_zeros


class Adapter(NamedTuple):
    """The index of an adapter's Linear in a product, and the factor of B A: a tensor where PEFT hot-swaps adapters."""

    linear: int
    scaling: Any


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

    def join(self, weights: Sequence[Any], biases: Sequence[Any] | None) -> tuple[Tensor, Tensor | None]:
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


def scaled(x: Tensor, scaling: Any) -> Tensor:
    """Multiply by a number, or by a tensor on the device without waiting for its value."""
    return x if not isinstance(scaling, Tensor) and scaling == 1 else x * scaling


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; return a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x
