"""The two inputs of a tower, checked once against each other and against the tower.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel.layout import Grid


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a tower takes. merge: patches per merged token along one side. width: P, None where a quantiser packed the
    weight. device: of the weights; None where inputs are moved there. names, dims: `Family.arguments`, `pixel_dims`."""

    merge: int
    width: int | None
    device: torch.device | None
    names: tuple[str, ...] = ("hidden_states", "grid_thw")
    dims: int = 2


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. pixels: (T, P), a view of what was given. options: what else came. marks: what `look` found."""

    pixels: Tensor
    grid: Grid
    options: Mapping[str, Any]
    marks: Any = None


Look = Callable[[Tensor, Tensor], tuple[list[list[int]], Any]]
"""(pixels (T, P), grid) to the grid on the host and whatever else is read in the same sync."""


def read(expected: Expected, look: Look | None, /, *args: Any, **options: Any) -> Call | None:
    """The arguments of a tower's forward, the grid on the host (the one sync; by `look`, if given).

    None for pixels in a shape of their own, and for arguments that are missing, too many or given twice. Raises
    ValueError for a wrong dtype or layout, an empty batch, sizes that are not positive or not a multiple of the merge
    size, and pixels that are not as many, as wide or on the device that they should be.
    """
    names = expected.names
    named = dict(zip(names, args))  # noqa: B905
    if len(args) > len(names) or named.keys() & options.keys() or not {names[0], "grid_thw"} <= named.keys() | options:
        return None  # stock has its own complaint
    options = named | options
    pixels, grid_thw = options.pop(names[0]), options.pop("grid_thw")
    dense = isinstance(pixels, Tensor) and pixels.layout == torch.strided and not pixels.is_nested
    if not dense or pixels.is_complex():
        raise ValueError(
            "expected the pixel values as a tensor of real numbers of shape (patches, channels * temporal * patch * "
            f"patch), got {_describe(pixels)}; pass what the processor returns, images packed along dim 0"
        )
    if pixels.dim() != expected.dims:
        return None
    pixels = pixels if pixels.dim() == 2 else pixels.flatten(0, 1).flatten(1)
    grid, marks = _read_grid(grid_thw, pixels, expected.merge, look)
    rows = sum(t * h * w for t, h, w in grid)
    if rows != pixels.shape[0]:
        raise ValueError(
            f"expected {rows} rows of pixel values for this grid_thw (the sum of t*h*w), got {pixels.shape[0]}; "
            "pass the pixel values and the grid of the same images"
        )
    if expected.width not in (None, pixels.shape[1]):
        raise ValueError(
            f"expected {expected.width} values per patch (channels * temporal * patch * patch), got {pixels.shape[1]}; "
            "use the processor of this very model"
        )
    if expected.device not in (None, pixels.device):
        raise ValueError(
            f"expected the pixel values on the tower's device {expected.device}, got them on {pixels.device}; "
            f"move them with .to({str(expected.device)!r})"
        )
    return Call(pixels=pixels, grid=grid, options=options, marks=marks)


def _read_grid(grid_thw: Any, pixels_TP: Tensor, merge: int, look: Look | None) -> tuple[Grid, Any]:
    """(images and videos, 3) in patches, on the host; rows of no frames, which pad a batch, are left out."""
    device = pixels_TP.device
    dense = isinstance(grid_thw, Tensor) and grid_thw.layout == torch.strided and not grid_thw.is_nested
    if not dense or grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        raise ValueError(
            f"expected grid_thw of shape (images and videos, 3), got {_describe(grid_thw)}; each row is "
            "(frames, height, width) in patches, as the processor returns it"
        )
    if grid_thw.is_floating_point() or grid_thw.is_complex() or grid_thw.dtype == torch.bool:
        raise ValueError(f"expected an integer grid_thw, got {_describe(grid_thw)}; convert it with .long()")
    if grid_thw.device.type != "cpu" and grid_thw.device != device:
        raise ValueError(
            f"expected grid_thw on the CPU or with the pixel values on {device}, got it on {grid_thw.device}; "
            "move both to the model's device"
        )
    rows, marks = (grid_thw.tolist(), None) if look is None else look(pixels_TP, grid_thw)
    grid: Grid = tuple([(t, h, w) for t, h, w in rows if t or h < 0 or w < 0])
    for t, h, w in grid:
        if t < 1 or h < 1 or w < 1:
            raise ValueError(f"expected positive sizes in grid_thw, got {(t, h, w)}; drop that entry")
        if h % merge or w % merge:
            raise ValueError(
                f"expected height and width in multiples of the merge size {merge}, got {(t, h, w)} in grid_thw; "
                "resize images the way the model's processor does"
            )
    if not grid:
        raise ValueError("expected at least one image or video, got an empty grid_thw; skip the vision tower instead")
    return grid, marks


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}"
    if value.is_nested or value.layout != torch.strided:
        return "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
