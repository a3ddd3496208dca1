"""The outputs of passes, joined to those of one call.

`T` packed patch rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class JoinedOutputs:
    """The outputs of the passes of one call. Without gradients each pass writes to its slices of the whole outputs.

    Args:
        rows: T of the whole call.
        grad: Whether gradients flow; then outputs are concatenated at the end.
    """

    def __init__(self, rows: int, *, grad: bool) -> None:
        self._rows = rows
        self._grad = grad
        self._outputs: list[Tensor] = []
        self._outputs_by_pass: list[list[Tensor]] = []

    def slices(self, rows: slice) -> list[Tensor]:
        """Return the slices of the outputs that are a pass's; none before the first pass, which shows their shapes."""
        slices = []
        for output in self._outputs:  # one row of it for each patch row, or for each merged token
            start = rows.start * len(output) // self._rows
            stop = rows.stop * len(output) // self._rows
            slices.append(output[start:stop])
        return slices

    def add(self, rows: slice, outputs: Sequence[Tensor]) -> None:
        """Add the outputs of the next pass. Outputs that were written to their slice already are not copied."""
        if self._grad:
            self._outputs_by_pass.append(list(outputs))
            return
        if not self._outputs:
            count = rows.stop - rows.start
            self._outputs = [
                output.new_empty(len(output) * self._rows // count, *output.shape[1:]) for output in outputs
            ]
        for target, output in zip(self.slices(rows), outputs, strict=True):
            if target.data_ptr() != output.data_ptr():
                target.copy_(output)

    def complete(self) -> list[Tensor]:
        """Return the outputs of the whole call."""
        if not self._grad:
            return self._outputs
        return [torch.cat(outputs) for outputs in zip(*self._outputs_by_pass, strict=True)]
