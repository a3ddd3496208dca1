"""Declare which function launches which Triton kernels, and the plain-torch reference of each such function.

The fixture `references` (`support/references.py`) replaces the functions of `KERNELS`. A new kernel gets a row here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from hf_vit_accel import ops
from hf_vit_accel.ops import (
    activation,
    add_norm,
    decode_attention,
    embedding,
    heads,
    mlp,
    place_heads,
    token_products,
    window_attention,
)
from hf_vit_accel.ops.fp8 import quantize
from hf_vit_accel.ops.training import column_sum, norm_backward
from hf_vit_accel.ops.training import mlp as trained_mlp
from hf_vit_accel.options import checksum

KernelPlace = tuple[ModuleType, str]
"""The module that defines a kernel, and the kernel's name."""

QUICK_GELU = (activation, "_quick_gelu_kernel")
SWIGLU = (activation, "_swiglu_kernel")
PAD_SWIGLU = (activation, "_pad_swiglu_kernel")
ADD_NORM = (add_norm, "_add_norm_kernel")
ADD_NORM_BACKWARD = (norm_backward, "_add_norm_backward_kernel")
SHAPE_HEADS = (heads, "_shape_heads_kernel")
SHAPE_HEADS_BACKWARD = (heads, "_shape_heads_backward_kernel")
LINEAR_SWIGLU = (mlp, "_linear_swiglu_kernel")
ADD_POSITIONS = (embedding, "_add_positions_kernel")
ROPE = (embedding, "_rope_kernel")
ROPE_GATHER = (embedding, "_rope_gather_kernel")
COLUMN_SUM = (column_sum, "_column_sum_kernel")
ADD_UP = (column_sum, "_add_up_kernel")
ACTIVATION_BACKWARD = (trained_mlp, "_activation_backward_kernel")
WINDOW_ATTENTION = (window_attention, "_window_attention_kernel")
WINDOW_ATTENTION_BACKWARD = (window_attention, "_window_attention_backward_kernel")


@dataclass(frozen=True)
class Kernel:
    """A function that launches kernels.

    Args:
        function: A plain function, or an autograd function, which runs by its `apply`.
        reference: The function that computes the same in plain torch.
        launched: The kernels that the function and its backward launch.
    """

    function: Any
    reference: Callable[..., Any]
    launched: frozenset[KernelPlace]

    @property
    def name(self) -> str:
        """The function's name in its module."""
        return self.function.__name__

    def stand_in(self, replacement: Callable[..., Any]) -> Any:
        """Wrap a replacement so that callers of the function can run it."""
        return replacement if isinstance(self.function, FunctionType) else SimpleNamespace(apply=replacement)


def _row(function: Any, reference: Callable[..., Any], *launched: KernelPlace) -> Kernel:
    return Kernel(function, reference, frozenset(launched))


KERNELS: dict[str, Kernel] = {
    "quick_gelu_": _row(activation.quick_gelu_, activation.quick_gelu_reference, QUICK_GELU),
    "swiglu": _row(activation.swiglu, activation.swiglu_reference, SWIGLU),
    "pad_swiglu": _row(activation.pad_swiglu, activation.pad_swiglu_reference, PAD_SWIGLU),
    "add_norm_": _row(add_norm.add_norm_, add_norm.add_norm_reference_, ADD_NORM),
    "add_norm": _row(norm_backward.AddNormFunction, add_norm.add_norm_reference, ADD_NORM, ADD_NORM_BACKWARD),
    "shape_heads_": _row(heads.shape_heads_, heads.shape_heads_reference, SHAPE_HEADS),
    "shape_heads": _row(heads.ShapeHeads, heads.shape_heads_reference, SHAPE_HEADS, SHAPE_HEADS_BACKWARD),
    "rope_": _row(embedding.rope_, embedding.rope_reference, ROPE),
    "rope": _row(embedding.Rope, embedding.rope_reference, ROPE, ROPE_GATHER),
    "window_attention": _row(
        window_attention.window_attention,
        window_attention.window_attention_reference,
        WINDOW_ATTENTION,
        WINDOW_ATTENTION_BACKWARD,
    ),
    "add_positions_": _row(embedding.add_positions_, embedding.add_positions_reference, ADD_POSITIONS),
    "add_positions": _row(embedding.AddPositions, embedding.add_positions_reference, ADD_POSITIONS),
    "linear_swiglu": _row(mlp.linear_swiglu, mlp.linear_swiglu_reference, LINEAR_SWIGLU),
    "activated": _row(trained_mlp.Activated, trained_mlp.activated_reference, QUICK_GELU, SWIGLU, ACTIVATION_BACKWARD),
    "mlp": _row(
        trained_mlp.MlpFunction,
        trained_mlp.mlp_reference,
        QUICK_GELU,
        SWIGLU,
        PAD_SWIGLU,
        ACTIVATION_BACKWARD,
    ),
    "column_sum": _row(column_sum.column_sum, column_sum.column_sum_reference, COLUMN_SUM, ADD_UP),
}
"""The functions that launch kernels of `ops.TABLE`, by the name that the fixture `references` reports."""

SEPARATE_KERNELS: dict[str, Kernel] = {
    "quantize": _row(
        quantize.quantize,
        quantize.quantize_reference,
        (quantize, "_sample_kernel"),
        (quantize, "_quantize_kernel"),
    ),
    "dequantize": _row(quantize.dequantize, quantize.dequantize_reference, (quantize, "_dequantize_kernel")),
    "attend_in_chunks": _row(
        decode_attention.attend_in_chunks,
        decode_attention.attend_reference,
        (decode_attention, "_attend_to_chunk_kernel"),
        (decode_attention, "_add_chunks_kernel"),
    ),
    "place_heads": _row(
        place_heads.place_heads, place_heads.place_heads_reference, (place_heads, "_place_heads_kernel")
    ),
    "token_products": _row(
        token_products.token_products,
        token_products.token_products_reference,
        (token_products, "_token_products_kernel"),
    ),
    "token_swiglu": _row(
        token_products.token_swiglu, token_products.token_swiglu_reference, (token_products, "_token_swiglu_kernel")
    ),
    "sum_images": _row(checksum.sum_images, checksum.sum_images_reference, (checksum, "_images_kernel")),
    "sum_weights": _row(checksum.sum_weights, checksum.sum_weights_reference, (checksum, "_weights_kernel")),
}
"""Functions outside `ops.TABLE`, which `references` leaves alone.

`test_fp8.py` compares those of FP8 with their references, `test_reuse.py` those of the checksums,
`test_decode_attention.py` that of a decode step, `test_text_kernels.py` the others of text models.
"""


def operation_modules() -> list[ModuleType]:
    """Return every module of `hf_vit_accel.ops` that belongs to `ops.TABLE`: all but those of FP8."""
    modules = []
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if not module.ispkg and ".fp8." not in module.name:
            modules.append(importlib.import_module(module.name))
    return modules


def defined_kernels() -> set[KernelPlace]:
    """Return every kernel that a module of the package's operations, of FP8 or of the checksums defines."""
    modules = [*operation_modules(), quantize, checksum]
    return {(module, name) for module in modules for name in vars(module) if name.endswith("_kernel")}
