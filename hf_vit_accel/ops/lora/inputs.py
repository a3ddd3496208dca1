"""The weights of Linears with LoRA adapters, by name, and how they join into one product.

`E` width of the input, `F` width of the output, `G` that width rounded up to a multiple of 8.
`R` the ranks of all adapters, each rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.base import biases_or_zeros

V = TypeVar("V")


class Adapter(NamedTuple):
    """One adapter of a product.

    Attributes:
        linear: index of its Linear.
        scaling: the factor of B A; a tensor on the device where PEFT hot-swaps adapters.
    """

    linear: int
    scaling: Any


class LoraInputs(NamedTuple, Generic[V]):
    """One value (a tensor, its gradient, a flag) for each weight of a product.

    Attributes:
        weights: of every Linear, (F, E).
        biases: of every Linear, (F), or None.
        a: A of every adapter, (rank, E).
        b: B of every adapter, (F, rank).
    """

    weights: Sequence[V]
    biases: Sequence[V]
    a: Sequence[V]
    b: Sequence[V]

    def flat(self, adapters: Any) -> list[Any]:
        """List the values in the order of an autograd function's arguments, `adapters` after the biases."""
        return [*self.weights, *self.biases, adapters, *self.a, *self.b]


@dataclass(frozen=True, kw_only=True)
class JoinedLinears:
    """How Linears with the same input lie side by side in one product.

    Attributes:
        widths: F of every Linear.
        padding: rows of zeros after every Linear's weight.
        in_features: E.
        extra_features: columns of zeros that the rows have after their E.
        dtype: of the rows.
    """

    widths: tuple[int, ...]
    padding: tuple[int, ...]
    in_features: int
    extra_features: int
    dtype: torch.dtype

    def unflatten(self, values: Sequence[Any], adapters: int) -> LoraInputs[Any]:
        """Name the values that `LoraInputs.flat` listed."""
        linears = len(self.widths)
        first_a = 2 * linears + 1
        first_b = first_a + adapters
        return LoraInputs(
            weights=values[:linears],
            biases=values[linears : 2 * linears],
            a=values[first_a:first_b],
            b=values[first_b : first_b + adapters],
        )

    def adapters(self, values: Sequence[Any]) -> tuple[Adapter, ...]:
        """Return the adapters among the values that `LoraInputs.flat` listed."""
        adapters: tuple[Adapter, ...] = values[2 * len(self.widths)]
        return adapters

    @property
    def is_single(self) -> bool:
        """Whether this is one Linear without padding: nothing is joined, and no gradient is split."""
        return len(self.widths) == 1 and not self.padding[0] and not self.extra_features

    def columns(self, linear: int) -> slice:
        """Return the columns of a Linear in the product's result."""
        start = sum(self.widths[:linear]) + sum(self.padding[:linear])
        return slice(start, start + self.widths[linear])

    def total_width(self) -> int:
        """Return the width of the product's result."""
        return sum(self.widths) + sum(self.padding)

    def join(self, weights: Sequence[Any], biases: Sequence[Any] | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the product; no bias where none of the Linears has one."""
        if self.is_single:
            return weights[0], None if biases is None else biases[0]
        padded = []
        for weight, rows in zip(weights, self.padding, strict=True):
            padded.append(_padded(weight, self.extra_features, rows))
        all_biases = None if biases is None else biases_or_zeros(weights, biases)
        if all_biases is None:
            return _cat(padded), None
        padded_biases = []
        for bias, rows in zip(all_biases, self.padding, strict=True):
            padded_biases.append(F.pad(bias, (0, rows)) if rows else bias)
        return _cat(padded), _cat(padded_biases)

    def stack(
        self, adapters: Sequence[Adapter], a: Sequence[Tensor], b: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return A (rank, E) and s B (F, rank) of every adapter, padded for the product; gradients flow through it."""
        total = self.total_width()
        padded_a = []
        padded_b = []
        for adapter, a_RE, b_FR in zip(adapters, a, b, strict=True):
            columns = self.columns(adapter.linear)
            rank_padding = -len(a_RE) % 8
            scaled_FR = scaled(b_FR, adapter.scaling).to(self.dtype)
            padded_a.append(_padded(a_RE.to(self.dtype), self.extra_features, rank_padding))
            if rank_padding or len(b_FR) < total:
                scaled_FR = F.pad(scaled_FR, (0, rank_padding, columns.start, total - columns.stop))
            padded_b.append(scaled_FR)
        return padded_a, padded_b

    def matrices(self, adapters: Sequence[Adapter], a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return `stack` as two matrices, A (R, E) and s B (F, R), each written once; no gradient flows through it."""
        total = self.total_width()
        ranks = [rounded_rank(len(a_RE)) for a_RE in a]
        complete = len(adapters) == 1 and not self.extra_features and ranks[0] == len(a[0]) and total == len(b[0])
        new = a[0].new_empty if complete else a[0].new_zeros  # without padding nothing has to be zeroed
        all_a_RE = new((sum(ranks), self.in_features + self.extra_features), dtype=self.dtype)
        all_b_FR = new((total, sum(ranks)), dtype=self.dtype)
        first = 0
        for adapter, a_RE, b_FR, rank in zip(adapters, a, b, ranks, strict=True):
            last = first + len(a_RE)
            all_a_RE[first:last, : self.in_features].copy_(a_RE)
            torch.mul(b_FR, adapter.scaling, out=all_b_FR[self.columns(adapter.linear), first:last])
            first += rank
        return all_a_RE, all_b_FR


ONE_LINEAR = JoinedLinears(widths=(0,), padding=(0,), in_features=0, extra_features=0, dtype=torch.float32)
"""One Linear without adapters. Nothing is joined, so its sizes are not read."""


def rounded_rank(rank: int) -> int:
    """Round a rank up to a multiple of 8: products of other sizes are slow."""
    return -(-rank // 8) * 8


def scaled(x: Tensor, scaling: Any) -> Tensor:
    """Multiply by a number, or by a tensor on the device without waiting for its value."""
    return x if not isinstance(scaling, Tensor) and scaling == 1 else x * scaling


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x
