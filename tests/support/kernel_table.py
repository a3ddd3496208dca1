"""Declare which function launches which Triton kernels, and the plain-torch reference of each such function.

The fixture `references` (`support/references.py`) replaces the functions of `KERNELS`. A new kernel gets a row here.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from hf_vit_accel import ops
from hf_vit_accel.ops import activation, add_norm, embedding, heads, mlp, window_attention
from hf_vit_accel.ops.training import column_sum, norm_backward
from hf_vit_accel.ops.training import mlp as trained_mlp

_SEPARATE = "fp8", "decode_attention", "place_heads", "token_products"
"""Modules with kernels outside of `ops.TABLE`, which `references` leaves alone.

`test_kernels.py` compares those of FP8 with their references, `test_text_kernels.py` those of text models.
"""


def operation_modules() -> list[ModuleType]:
    """Return every module of `hf_vit_accel.ops` that belongs to `ops.TABLE`."""
    names = [module.name for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    return [importlib.import_module(name) for name in names if name.split(".")[2] not in _SEPARATE]


DEFINED: dict[str, ModuleType] = {
    name: module for module in operation_modules() for name in vars(module) if name.endswith("_kernel")
}
"""The modules of these kernels, by the kernels' names."""


@dataclass(frozen=True)
class Kernel:
    function: Any  # a plain function, or an autograd function, which runs by its `apply`
    reference: Callable[..., Any]  # computes the same in plain torch
    launched: frozenset[tuple[ModuleType, str]]  # kernels, by module and name; also those of the backward

    @property
    def name(self) -> str:
        """The function's name in its module."""
        return self.function.__name__

    def stand_in(self, replacement: Callable[..., Any]) -> Any:
        """Wrap a replacement so that callers of the function can run it."""
        return replacement if isinstance(self.function, FunctionType) else SimpleNamespace(apply=replacement)


def _row(function: Any, reference: Callable[..., Any], *kernels: str) -> Kernel:
    return Kernel(function, reference, frozenset((DEFINED[name], name) for name in kernels))


def _rope_reference_(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    return qkv_T3HD.copy_(embedding.rope_reference(qkv_T3HD, cos_TD, sin_TD))


def _add_norm_reference_(x_TE: Tensor, delta_TE: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    if delta_TE is not None:
        x_TE += delta_TE
    return add_norm.add_norm_reference(x_TE, None, *settings)


KERNELS: dict[str, Kernel] = {
    "quick_gelu_": _row(activation.quick_gelu_, activation.quick_gelu_reference, "_quick_gelu_kernel"),
    "swiglu": _row(activation.swiglu, activation.swiglu_reference, "_swiglu_kernel"),
    "pad_swiglu": _row(activation.pad_swiglu, activation.pad_swiglu_reference, "_pad_swiglu_kernel"),
    "add_norm_": _row(add_norm.add_norm_, _add_norm_reference_, "_add_norm_kernel"),
    "add_norm": _row(
        norm_backward.AddNormFunction, add_norm.add_norm_reference, "_add_norm_kernel", "_add_norm_backward_kernel"
    ),
    "shape_heads_": _row(heads.shape_heads_, heads.shape_heads_reference, "_shape_heads_kernel"),
    "shape_heads": _row(
        heads.ShapeHeads, heads.shape_heads_reference, "_shape_heads_kernel", "_shape_heads_backward_kernel"
    ),
    "rope_": _row(embedding.rope_, _rope_reference_, "_rope_kernel"),
    "rope": _row(embedding.Rope, embedding.rope_reference, "_rope_kernel", "_rope_gather_kernel"),
    "window_attention": _row(
        window_attention.window_attention,
        window_attention.window_attention_reference,
        "_window_attention_kernel",
        "_window_attention_backward_kernel",
    ),
    "add_positions_": _row(embedding.add_positions_, embedding.add_positions_reference, "_add_positions_kernel"),
    "add_positions": _row(embedding.AddPositions, embedding.add_positions_reference, "_add_positions_kernel"),
    "linear_swiglu": _row(mlp.linear_swiglu, mlp.linear_swiglu_reference, "_linear_swiglu_kernel"),
    "activated": _row(
        trained_mlp.Activated,
        trained_mlp.activated_reference,
        "_quick_gelu_kernel",
        "_swiglu_kernel",
        "_activation_backward_kernel",
    ),
    "mlp": _row(
        trained_mlp.MlpFunction,
        trained_mlp.mlp_reference,
        "_quick_gelu_kernel",
        "_swiglu_kernel",
        "_pad_swiglu_kernel",
        "_activation_backward_kernel",
    ),
    "column_sum": _row(column_sum.column_sum, column_sum.column_sum_reference, "_column_sum_kernel", "_add_up_kernel"),
}
"""The functions that launch kernels of `ops.TABLE`, by the name that the fixture `references` reports."""
