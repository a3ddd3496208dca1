"""Gather the tensors of any output."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

Output: TypeAlias = "torch.Tensor | Mapping[str, Output] | Iterable[Output] | None"
"""Tensors in mappings (as transformers' outputs are), lists and tuples, nested at will."""


def flat(output: Output) -> list[torch.Tensor]:
    """Return every tensor of nested outputs, in order."""
    if output is None:
        return []
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in values for tensor in flat(value)]
