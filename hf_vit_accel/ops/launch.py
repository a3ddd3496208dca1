"""Where Triton kernels can run, and the decorator under which they are written.

Without Triton (a CPU build of torch brings none) the kernels' modules still import; their plain-torch references serve.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel import machine

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # pragma: no cover
    triton = tl = TensorDescriptor = None

__all__ = ["TensorDescriptor", "tl"]

DTYPES = (torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`triton.jit`, with faster launches; without Triton the function stays as it is and is never launched."""
    if triton is None:
        return function
    made = triton.jit(function, **options)
    return Kernel(function, **options) if type(made) is triton.JITFunction else made  # else it is interpreted


class Kernel(object if triton is None else triton.JITFunction):  # type: ignore[misc]
    """A kernel whose launches look up what it was compiled to by as little as decides that.

    Arguments come by position and constants by name, after them. On the host of an H200 a launch takes 16 to 22 us, one
    by Triton 0.4 to 2 more; an eager call of 784 rows 4 to 9% less, a training step 3 to 4% (medians; the host varies).
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._specializes = not all(each.do_not_specialize for each in self.params)
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        """Launch on the current device; what is new is Triton's to compile."""
        kinds = map(kind_of, arguments) if self._specializes else ()
        key = torch.cuda.current_device(), *constants.items(), *kinds
        found = None if warmup else self._compiled.get(key)
        if found is None:
            compiled = super().run(*arguments, grid=grid, warmup=warmup, **constants)
            rest = self.params[len(arguments) :]
            assert all(each.is_constexpr for each in rest)
            if not warmup:
                self._compiled[key] = compiled, tuple(constants[each.name] for each in rest)
            return compiled
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
        return compiled


def kind_of(argument: Any) -> Any:
    """What of a kernel's argument decides how Triton compiles it: at least what its own key holds. None is negative."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, argument.bit_length() // 32
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return type(argument)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below a positive value."""
    return 1 << (value - 1).bit_length()


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels cannot run on tensors of a device and dtype; None if they can (on CPU: by Triton's interpreter)."""
    if triton is None:
        return "Triton is not installed (it comes with CUDA builds of torch)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type}, the kernel runs on cuda"
    if device.type != "cuda" and dtype == torch.bfloat16:
        return "Triton's interpreter has no products of bfloat16"
    if dtype not in DTYPES:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, the kernel is for bfloat16 and float16"
    return None


def why_not_descriptors(device: torch.device) -> str | None:
    """Why matrix products over tensor descriptors (Hopper's copy engine) are no gain on a device; None if they are.

    Measured on Hopper only: elsewhere the products are the library's.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or machine.cuda_capability(device.index)[0] != 9:
        return "the kernel was measured on GPUs of compute capability 9 only"
    return None


def for_descriptor(x: Tensor) -> Tensor:
    """x where a descriptor can take it, else a copy: rows one after the other, from a multiple of 16 bytes on."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
