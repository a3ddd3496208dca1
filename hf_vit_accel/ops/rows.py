"""Modules that are known to treat each row by itself; any other module may mix the rows of several images.

Passes, reuse, shared calls and the padding of CUDA graphs give a module other rows than stock does. The result is the
same only if a row depends on no other row. The table says for which modules that holds; `docs/` is written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Part
from hf_vit_accel.ops import lora
from hf_vit_accel.ops.base import reasons_replaced


@dataclass(frozen=True, kw_only=True)
class RowWise:
    """Declare modules that treat each row by itself; `docs/` has summary and condition.

    Attributes:
        classes: exact classes of torch; a subclass is another class.
        file: a file all of whose modules count. (Its import here would take seconds.)
        of_patches: whether only modules inside the patch embedding or the downsampling count.
    """

    summary: str
    classes: tuple[type[nn.Module], ...] = ()
    file: str = ""
    condition: str = ""
    holds: Callable[[Part], bool] = lambda module: True
    of_patches: bool = False


PROVEN = RowWise(
    summary="transformers' classes of the tower itself, and norms, activations and MLPs that other code put in",
    condition="a proof has run them",
)
"""`tower.proof` lists them."""
TRIED = RowWise(
    summary="PEFT's LoRA, and other packages' linears: quantised ones, and those with other adapters",
    condition="it follows LoRA's formula, or a trial gave rows the same results alone as beside others",
)

_ELEMENTWISE = nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Sigmoid, nn.Tanh
"""The activations that configs of transformers name."""

TABLE: tuple[RowWise, ...] = (
    PROVEN,
    RowWise(summary="Linear and Identity of torch", classes=(nn.Linear, nn.Identity)),
    RowWise(
        summary="Embedding of torch",
        classes=(nn.Embedding,),
        condition="without `scale_grad_by_freq`, which counts the rows of a call",
        holds=lambda embedding: not embedding.scale_grad_by_freq,
    ),
    RowWise(
        summary="LayerNorm and RMSNorm of torch",
        classes=(nn.LayerNorm, nn.RMSNorm),
        condition="they normalise one dimension, the last",
        holds=lambda norm: len(norm.normalized_shape) == 1,
    ),
    RowWise(
        summary="activations that configs of transformers name, but RReLU and PReLU",
        classes=_ELEMENTWISE,
        file="transformers.activations",
    ),
    RowWise(summary="Dropout of torch", classes=(nn.Dropout,)),
    RowWise(
        summary="containers of torch (Sequential, ModuleList, ModuleDict, and those of parameters)",
        classes=(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    ),
    RowWise(
        summary="Conv2d and Conv3d of torch",
        classes=(nn.Conv2d, nn.Conv3d),
        condition="they embed patches or merge blocks, each of which is an image of its own to them",
        of_patches=True,
    ),
    TRIED,
)
"""All that is known."""


def reasons_mixing(
    modules: Iterable[nn.Module],
    proven: Collection[type],
    patches: Iterable[nn.Module | None] = (),
    class_of: Callable[[nn.Module], type] = type,
    trusted: Collection[type | nn.Module] = (),
    row_wise: Collection[int] = (),
) -> list[str]:
    """Return why all rows of a call must be encoded together: a sentence about the first module that may mix rows.

    `patches` get patches or merge blocks as a batch of images. `class_of` returns the class that a module was written
    as. `row_wise` holds the ids of modules that a trial has found to treat each row by itself.
    """
    of_patches = {id(module) for part in patches if part is not None for module in part.modules()}
    for module in modules:
        if id(module) in row_wise or module in trusted or lora.is_plain(module):
            continue
        kind = class_of(module)
        is_of_patches = id(module) in of_patches
        reason = _reason_mixing(module, kind, proven, is_trusted=kind in trusted, is_of_patches=is_of_patches)
        if reason is not None:
            return [f"{reason}, and may mix rows of several images"]
    return []


def _reason_mixing(
    module: nn.Module, kind: type, proven: Collection[type], *, is_trusted: bool, is_of_patches: bool
) -> str | None:
    """Return why a module may mix rows; None if it is known to treat each row by itself."""
    replaced = reasons_replaced(module, trusted=(type(module),) if is_trusted else ())
    if replaced:
        return replaced[0]
    entry = next((entry for entry in TABLE if kind in entry.classes or kind.__module__ == entry.file), None)
    if kind in proven and (is_trusted or kind.__module__.startswith("transformers.")):
        for name, value in vars(module).items():
            if isinstance(value, FunctionType):
                is_own = not machine.is_upstream(value)
            else:  # a partial or a bound method; activations of transformers hold partial functions themselves
                is_own = entry is None and not name.startswith("_") and name != "forward"
                is_own = is_own and callable(value) and not isinstance(value, type | nn.Module)
            if is_own:
                return f"{name} of a {kind.__name__} is a function of your own"
        return None
    if entry is None:
        return f"a {kind.__name__} is inside"
    if not entry.holds(module) or (entry.of_patches and not is_of_patches):
        description = str(module)
        return f"a {kind.__name__ if chr(10) in description else description} is inside"
    return None
