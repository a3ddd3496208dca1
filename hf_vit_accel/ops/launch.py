"""Where Triton kernels can run, and the decorator under which they are written.

Without Triton (a CPU build of torch brings none) the kernels' modules still import; their plain-torch references serve.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hf_vit_accel import env

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # pragma: no cover
    triton = tl = TensorDescriptor = None

__all__ = [
    "DTYPES",
    "Launch",
    "TensorDescriptor",
    "for_descriptor",
    "jit",
    "next_power_of_2",
    "tl",
    "why_not_descriptors",
    "why_not_triton",
]

DTYPES = (torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`triton.jit` where Triton is installed; without it the function stays as it is and is never launched."""
    return function if triton is None else triton.jit(function, **options)


class Launch:
    """A kernel that later calls launch as the first one on a device compiled it: a third of the host's time.

    Nothing of its arguments may decide how it is compiled: none is a constant, `do_not_specialize` names them all.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[torch.device, Any] = {}

    def __call__(self, device: torch.device, programs: int, *arguments: Any) -> None:
        """Launch so many programs, on what is the current device."""
        compiled = self._compiled.get(device)
        if compiled is None:  # Triton's interpreter compiles nothing
            self._compiled[device] = self._kernel[(programs,)](*arguments, **self._options)
        else:
            compiled[programs, 1, 1](*arguments)


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
    if device.type != "cuda" or env.cuda_capability(device.index)[0] != 9:
        return "the kernel was measured on GPUs of compute capability 9 only"
    return None


def for_descriptor(x: torch.Tensor) -> torch.Tensor:
    """x where a descriptor can take it, else a copy: rows one after the other, from a multiple of 16 bytes on."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
