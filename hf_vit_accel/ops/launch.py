"""The decorators of Triton kernels and of functions that they call, and the devices on which kernels can run.

Without Triton (CPU builds of torch have none) the kernels' modules still import; then only their references run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
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

__all__ = ["tl"]

DTYPES = (torch.bfloat16, torch.float16)

Launch = Callable[..., None]
"""Launches a kernel on the current stream."""


def device_function(function: Callable[..., object]) -> Any:
    """Let kernels call a function, like `triton.jit`; without Triton, return the function itself."""
    return function if triton is None else triton.jit(function)


def kernel(function: Callable[..., object]) -> Kernel:
    """Make a kernel of a function. Triton compiles it for every kind of arguments."""
    return Kernel(function, specializes=True)


def kernel_without_specialization(function: Callable[..., object]) -> Kernel:
    """Make a kernel of a function without constants. Triton compiles it once, for all integers and addresses."""
    return Kernel(function, specializes=False)


class Kernel:
    """A kernel that is launched by `kernel[grid](*arguments, **constants)`, as Triton's are, in less time."""

    def __init__(self, function: Callable[..., object], *, specializes: bool) -> None:
        self.function = function
        self.specializes = specializes
        self._launches: dict[tuple[object, ...], tuple[Launch, tuple[object, ...]]] = {}

    @cached_property
    def jit_function(self) -> Any:
        """Triton's own function. It reads the source, which for all kernels takes as long as the rest of the import."""
        alike = [] if self.specializes else range(self.function.__code__.co_argcount)
        return triton.jit(self.function, do_not_specialize=alike)

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        """Return the launch on a grid of one to three dimensions: arguments by position, then constants by name."""
        jit_function = self.jit_function
        is_compiled = type(jit_function) is triton.JITFunction
        return partial(self._launch, grid) if is_compiled else jit_function[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        """Launch on the current device; Triton compiles for new kinds of arguments."""
        kinds = [kind_of(argument) for argument in arguments] if self.specializes else ()
        device = torch.cuda.current_device()
        key = device, *constants, *constants.values(), *kinds
        former = self._launches.get(key)
        if former is None:
            compiled = self.jit_function[grid](*arguments, **constants)
            parameters = self.jit_function.params[len(arguments) :]
            assert all(parameter.is_constexpr for parameter in parameters)
            constant_values = tuple(constants[parameter.name] for parameter in parameters)
            self._launches[key] = launch_of(compiled), constant_values
            return
        launch, constant_values = former
        launch((*grid, 1, 1)[:3], device, *arguments, *constant_values)


_DIRECT = ("3.6", "3.7")
"""The releases of Triton whose compiled kernels are launched without Triton's Python code in between."""


def launch_of(compiled: Any) -> Launch:
    """Return the launch of a compiled kernel; it takes a grid of three, the index of the device, and arguments.

    Triton's own takes 5 us more, for the stream and for hooks of profilers; it runs while such a hook is set. With it
    eager calls of one 448² took 1.16 times as long and training steps 1.07 to 1.17 (Qwen3-VL-8B, H200).
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
    """Report why kernels cannot run on tensors of a device and dtype; None if they can."""
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
    """Report why products over tensor descriptors (Hopper's copy engine) are not used; None if they are."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or machine.cuda_capability(device.index)[0] != 9:
        return "the kernel was measured on GPUs of compute capability 9 only"
    return None


def descriptor_of(x: Tensor, block: list[int]) -> object:
    """Return the descriptor of a matrix for tiles of a block; it is of a copy, if x is not contiguous or not aligned.

    Rows must be multiples of 16 bytes. `TensorDescriptor.from_tensor` makes the same, and checks more in some 4 us.
    """
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape = x.shape
    descriptor.strides = x.stride()
    descriptor.block_shape = block
    return descriptor
