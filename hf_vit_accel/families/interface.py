"""The interface of a tower: its two inputs, checked once against each other and against the tower, and its outputs.

`T` packed patch rows, `P` pixels of a patch, `N` images and videos.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from hf_vit_accel.layout import Grid

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The inputs that a tower takes.

    Attributes:
        merge: Patches per merged token along one side.
        width: P; None where a quantiser packed the weight that embeds patches.
        dims: Dimensions of the pixels as its processor returns them.
    """

    merge: int
    width: int | None
    device: torch.device | None
    names: tuple[str, ...] = ("hidden_states", "grid_thw")
    dims: int = 2


ReadGrid = Callable[[Tensor, Tensor], tuple[list[list[int]], object]]
"""Reads the grid (N, 3) of pixels (T, P), unchecked, and what an option needs beside it: in the one sync of a call."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one call.

    Attributes:
        pixels: (T, P), a view of the caller's tensor.
        beside_grid: What an option read in the sync of the grid; None without one.
    """

    pixels: Tensor
    grid: Grid
    options: Mapping[str, object]
    beside_grid: object = None


def read(expected: Expected, read_grid: ReadGrid | None, /, *args: object, **options: object) -> Inputs | None:
    """Return the inputs of a tower's forward, with the grid on the host: the one sync of a call.

    None for a call that the stock forward must take as it is. ValueError for inputs that fit no tower, or not this one.
    """
    names = expected.names
    positional = dict(zip(names, args))  # noqa: B905
    is_repeated = positional.keys() & options.keys()
    options = positional | options
    if len(args) > len(names) or is_repeated or names[0] not in options or "grid_thw" not in options:
        return None
    pixels = options.pop(names[0])
    grid_thw = options.pop("grid_thw")
    if not isinstance(pixels, Tensor) or pixels.layout != torch.strided or pixels.is_nested or pixels.is_complex():
        raise ValueError(
            "expected the pixel values as a tensor of real numbers of shape (patches, channels * temporal * patch * "
            f"patch), got {_describe(pixels)}; pass what the processor returns, images packed along dim 0"
        )
    if pixels.dim() != expected.dims or type(pixels) not in _PLAIN:
        _check_no_images(pixels, grid_thw, expected)
        return None
    if isinstance(grid_thw, Tensor) and type(grid_thw) not in _PLAIN:
        return None
    pixels = pixels if pixels.dim() == 2 else pixels.flatten(0, 1).flatten(1)
    if (
        not isinstance(grid_thw, Tensor)
        or grid_thw.layout != torch.strided
        or grid_thw.is_nested
        or grid_thw.dim() != 2
        or grid_thw.shape[1] != 3
    ):
        raise ValueError(
            f"expected grid_thw of shape (images and videos, 3), got {_describe(grid_thw)}; each row is "
            "(frames, height, width) in patches, as the processor returns it"
        )
    if grid_thw.is_floating_point() or grid_thw.is_complex() or grid_thw.dtype == torch.bool:
        raise ValueError(f"expected an integer grid_thw, got {_describe(grid_thw)}; convert it with .long()")
    if grid_thw.device.type != "cpu" and grid_thw.device != pixels.device:
        raise ValueError(
            f"expected grid_thw on the CPU or with the pixel values on {pixels.device}, got it on {grid_thw.device}; "
            "move both to the model's device"
        )
    sizes, beside_grid = (grid_thw.tolist(), None) if read_grid is None else read_grid(pixels, grid_thw)
    merge = expected.merge
    # Rows of no frames pad a batch. Stock, too, refuses those of patches that it cannot merge.
    grid: Grid = tuple([(t, h, w) for t, h, w in sizes if t or h < 0 or w < 0 or (h * w and (h % merge or w % merge))])
    for t, h, w in grid:
        if t < 1 or h < 1 or w < 1:
            raise ValueError(f"expected positive sizes in grid_thw, got {(t, h, w)}; drop that entry")
        if h % merge or w % merge:
            raise ValueError(
                f"expected height and width in multiples of the merge size {merge}, got {(t, h, w)} in "
                "grid_thw; resize images the way the model's processor does"
            )
    if not grid:
        raise ValueError("expected at least one image or video, got an empty grid_thw; skip the vision tower instead")
    rows = sum([t * h * w for t, h, w in grid])
    width = expected.width
    if width not in (None, pixels.shape[1]) and pixels.numel() == rows * width and pixels.is_contiguous():
        pixels = pixels.view(rows, width)  # as the stock embedding does, whatever their shape
    if rows != pixels.shape[0]:
        raise ValueError(
            f"expected {rows} rows of pixel values for this grid_thw (the sum of t*h*w), got {pixels.shape[0]}; "
            "pass the pixel values and the grid of the same images"
        )
    if width not in (None, pixels.shape[1]):
        raise ValueError(
            f"expected {width} values per patch (channels * temporal * patch * patch), got {pixels.shape[1]}; "
            "use the processor of this very model"
        )
    if expected.device not in (None, pixels.device):
        raise ValueError(
            f"expected the pixel values on the tower's device {expected.device}, got them on {pixels.device}; "
            f"move them with .to({str(expected.device)!r})"
        )
    return Inputs(pixels=pixels, grid=grid, options=MappingProxyType(options), beside_grid=beside_grid)


def _check_no_images(pixels: Tensor, grid_thw: object, expected: Expected) -> None:
    """Raise ValueError for images (B, C, H, W). Stock takes patches in any shape that has their number of values."""
    if pixels.dim() != 4 or expected.width is None or not isinstance(grid_thw, Tensor) or grid_thw.dim() != 2:
        return
    rows = int(grid_thw.prod(dim=1).sum())
    if pixels.numel() != rows * expected.width:
        raise ValueError(
            f"expected pixel values of shape ({rows}, {expected.width}), packed patches of this grid_thw, got "
            f"images of shape {tuple(pixels.shape)}; pass the pixel values that the processor of this model returns"
        )


def _describe(value: object) -> str:
    """Return the class of a value, with dtype and shape of a tensor."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}"
    if value.is_nested or value.layout != torch.strided:
        return "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}"


FIELDS = ("last_hidden_state", "pooler_output", "deepstack_features")
"""The fields of an output class with our last rows, merged features and deepstack features."""


@dataclass(frozen=True)
class Form:
    """The form in which the forward of a tower returns its tensors.

    Attributes:
        kind: The class of the result: a tensor, a tuple of features and deepstack features, or an output of fields.
        fields: The fields of an output that are set.
        index: Which of our tensors is returned where only one is: 0 for the last rows, 1 for merged features.
    """

    kind: type
    fields: tuple[str, ...] = ()
    index: int = 1

    def build(self, tensors: list[Tensor], states: int = 0) -> Any:
        """Return our last rows, merged features and deepstack features in this form.

        Behind them may follow so many `states`: the rows that each layer takes. The last rows end the hidden states.
        """
        if states:
            output: Any = self.build(tensors[:-states])
            output["hidden_states"] = (*tensors[-states:], tensors[0])
            return output
        if self.kind is Tensor and len(tensors) <= self.index:
            raise ValueError("it returns merged features, but has no merger that is known")
        if self.kind is Tensor:
            return tensors[self.index]
        if self.kind is tuple:
            return tensors[1], tensors[2:]
        values: dict[str, object] = dict(zip(FIELDS, tensors[:2]))  # noqa: B905
        values[FIELDS[2]] = tensors[2:]
        # Its constructor lists all fields at each assignment, which takes 10 us.
        output = OrderedDict.__new__(self.kind)
        vars(output).update(self._no_values)
        for name in self.fields:
            vars(output)[name] = values[name]
            OrderedDict.__setitem__(output, name, values[name])
        return output

    @cached_property
    def _no_values(self) -> dict[str, None]:
        return dict.fromkeys(field.name for field in dataclasses.fields(self.kind))


def form_of(output: object, rows: int) -> Form:
    """Return the form of the output for so many rows of pixels; raise ValueError for one that no tower has."""
    if isinstance(output, Tensor):
        return Form(Tensor, index=int(output.shape[0] != rows))
    if type(output) is tuple and len(output) == 2 and isinstance(output[0], Tensor) and isinstance(output[1], list):
        return Form(tuple)
    if isinstance(output, ModelOutput) and output:
        fields = tuple(name for name in output if name in FIELDS)  # in the order of its class
        others = output.keys() - fields
        if not others or (others == {"hidden_states"} and output["hidden_states"]):
            form = Form(type(output), fields)
            if vars(form.build([Tensor(), Tensor()])).keys() != vars(output).keys():
                raise ValueError(f"its output, a {type(output).__name__}, holds more than its fields")
            return form
    raise ValueError(f"its forward returns a {type(output).__name__} of an unknown form")


def named_tensors(output: Any) -> dict[str, Tensor]:
    """Return every tensor of a tower's output by name: a bare tensor, a pair with deepstack features, or fields."""
    if isinstance(output, Tensor):
        return {"features": output}
    fields = zip(("features", "deepstack features"), output) if type(output) is tuple else output.items()  # noqa: B905
    tensors: dict[str, Tensor] = {}
    for name, value in fields:
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors |= {f"{name} {index}": tensor for index, tensor in enumerate(value)}
    return tensors
