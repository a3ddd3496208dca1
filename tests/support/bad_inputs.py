"""Inputs of a tower, good and bad, and what a tower returns or raises for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from tiny import outputs_of
from torch import nn


class Inputs(NamedTuple):
    """Pixels and grid of a call, of any type. Test reports show their shapes and types, without numbers."""

    pixels: object
    grid: object

    def __repr__(self) -> str:
        kinds = (type(self.pixels).__name__, getattr(self.pixels, "dtype", ""), getattr(self.pixels, "layout", ""))
        shape = tuple(getattr(self.pixels, "shape", ()))
        return f"pixels {shape} {kinds}, grid {self.grid!r} {getattr(self.grid, 'dtype', '')}"


def outcome(tower: nn.Module, inputs: Inputs) -> list[torch.Tensor] | Exception:
    """Call a tower; return its outputs, or the error that it raises."""
    try:
        with torch.no_grad():
            return outputs_of(tower(inputs.pixels, grid_thw=inputs.grid))
    except Exception as error:
        return error


def spoil(rng: np.random.Generator, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
    """Make one thing wrong with good inputs."""
    row = int(rng.integers(len(grid)))
    column = int(rng.integers(3))
    wrong_grid = grid.clone()
    wrong_grid[row, column] = int(rng.choice([0, -1, -4, int(wrong_grid[row, column]) + 1, 2**31, 2**62]))
    bad_inputs = [
        Inputs(pixels[:-1], grid),
        Inputs(pixels[:0], grid),
        Inputs(torch.cat([pixels, pixels[:4]]), grid),
        Inputs(pixels[:, :-1], grid),
        Inputs(torch.cat([pixels, pixels], 1), grid),
        Inputs(pixels, wrong_grid),
        Inputs(pixels, grid[:0]),
        Inputs(pixels, grid.flatten()),
        Inputs(pixels.to("meta"), grid),
        Inputs(pixels, grid.float()),
        Inputs(pixels.to(torch.complex64), grid),
        Inputs(None, grid),
    ]
    return bad_inputs[int(rng.integers(len(bad_inputs)))]
