"""The decorator of Triton kernels, and the devices on which they can run.

Without Triton (CPU builds of torch have none) the kernels' modules still import; then only their references run.
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


def jit(function: Callable[..., object], **options: object) -> Any:
    """Compile a kernel like `triton.jit`, with faster launches; without Triton, return the function itself."""
    if triton is None:
        return function
    compiled = triton.jit(function, **options)
    is_interpreted = type(compiled) is not triton.JITFunction
    return compiled if is_interpreted else Kernel(function, **options)


class Kernel(object if triton is None else triton.JITFunction):  # type: ignore[misc]
    """A JITFunction with a minimal cache key.

    Arguments come by position, then constants by name.
    """

    def __init__(self, function: Callable[..., object], **options: object) -> None:
        super().__init__(function, **options)
        self._specializes = not all(parameter.do_not_specialize for parameter in self.params)
        self._compiled: dict[tuple[object, ...], tuple[Any, Launch, tuple[object, ...]]] = {}

    def run(self, *arguments: object, grid: tuple[int, ...], warmup: bool, **constants: object) -> Any:
        """Launch on the current device; Triton compiles for new kinds of arguments."""
        kinds = [kind_of(argument) for argument in arguments] if self._specializes else ()
        device = torch.cuda.current_device()
        key = device, *constants.items(), *kinds
        cached = None if warmup else self._compiled.get(key)
        if cached is None:
            compiled = super().run(*arguments, grid=grid, warmup=warmup, **constants)
            parameters = self.params[len(arguments) :]
            assert all(parameter.is_constexpr for parameter in parameters)
            if not warmup:
                constant_values = tuple(constants[parameter.name] for parameter in parameters)
                self._compiled[key] = compiled, launch_of(compiled), constant_values
            return compiled
        compiled, launch, constant_values = cached
        launch((*grid, 1, 1)[:3], device, *arguments, *constant_values)
        return compiled


Launch = Callable[..., None]
"""(grid of three, index of the device, *arguments): launches on the current stream."""

_DIRECT = ("3.6", "3.7")
"""The releases of Triton whose compiled kernels are launched without Triton's Python code in between."""


def launch_of(compiled: Any) -> Launch:
    """Return the launch of a compiled kernel.

    Triton's own takes some 5 us more: it asks for the stream, and builds metadata for hooks that profilers set. While
    a hook is set, Triton's own runs.
    """

    def by_triton(grid: tuple[int, ...], device: int, *arguments: object) -> None:
        compiled[grid](*arguments)

    runtime = triton.knobs.runtime
    if not triton.__version__.startswith(_DIRECT) or not hasattr(runtime.launch_enter_hook, "calls"):
        return by_triton
    run = compiled.run
    function = compiled.function
    metadata = compiled.packed_metadata

    def directly(grid: tuple[int, ...], device: int, *arguments: object) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            by_triton(grid, device, *arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, stream, function, metadata, None, None, None, *arguments)

    return directly


def kind_of(argument: object) -> object:
    """Return the properties of an argument for which Triton compiles a kernel anew; integers are not negative."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, argument.bit_length() // 32
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return type(argument)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is not below a positive value."""
    return 1 << (value - 1).bit_length()


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Report why kernels cannot run on tensors of a device and dtype; None if they can.

    On the CPU they run by Triton's interpreter.
    """
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
    """Report why products over tensor descriptors (Hopper's copy engine) are not used; None if they are.

    They were measured on Hopper only: elsewhere the library's products run.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or machine.cuda_capability(device.index)[0] != 9:
        return "the kernel was measured on GPUs of compute capability 9 only"
    return None


def for_descriptor(x: Tensor) -> Tensor:
    """Return x, or a copy where x is not contiguous or not aligned to 16 bytes, as descriptors need it."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
