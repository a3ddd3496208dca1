"""How normed rows were made: a product after a norm saves this recipe for its gradient instead of the rows.

The norm saves the sum anyway. At 16384 rows this saves 38 to 42 MB a norm and costs about 20 us (H200).
`T` rows, `E` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_vit_accel.ops.add_norm import add_norm_rows
from hf_vit_accel.ops.training.column_sum import MANY_ROWS


class NormRecipe(NamedTuple):
    """The arguments of `add_norm_rows` that made normed rows from a sum."""

    sum_TE: Tensor
    weight_E: Tensor
    bias_E: Tensor | None
    eps: float
    rms: bool
    dtype: torch.dtype | None = None

    def rows(self) -> Tensor:
        """Compute the normed rows again, (T, E), bit for bit."""
        return add_norm_rows(self.sum_TE, self.sum_TE, None, *self[1:])


def save_input(
    x_TE: Tensor, recipe: NormRecipe | None
) -> tuple[tuple[Tensor | None, ...], tuple[float, bool, torch.dtype | None] | None]:
    """Choose what a product saves to have its input in the backward pass; `load_input` restores it.

    Fewer than `MANY_ROWS` rows are saved as they are: they need little memory, and a launch would take longer.

    Returns:
        Tensors to save, and the recipe's settings; None for an input that is saved itself.
    """
    if recipe is None or x_TE.shape[0] < MANY_ROWS:
        return (x_TE,), None
    tensors = recipe.sum_TE.detach(), recipe.weight_E.detach(), recipe.bias_E
    return tensors, (recipe.eps, recipe.rms, recipe.dtype)


def load_input(tensors: Sequence[Tensor], settings: tuple[float, bool, torch.dtype | None] | None, rows: int) -> Tensor:
    """Restore a product's input from what `save_input` returned.

    Args:
        rows: rows of the input; a merger's row holds several normed ones.
    """
    if settings is None:
        return tensors[0]
    sum_TE, weight_E, bias_E = tensors
    return NormRecipe(sum_TE, weight_E, bias_E, *settings).rows().view(rows, -1)
