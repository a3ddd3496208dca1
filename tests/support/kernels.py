"""Draw inputs for kernels, and compile kernels without a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hf_vit_accel.ops.launch import triton

Target = dict[str, Any]
"""Where a kernel runs: the `device`, the `dtype`, and sizes such as `rows` and `heads`."""


def draw(*shape: int, target: Target, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Draw normal values of a shape; `target` gives the device, and the dtype if none is passed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype or target["dtype"]).to(target["device"])


def tables(rows: int, dim: int, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw cosines and sines (T, D) of rotary angles, in fp32."""
    half = 50 * draw(rows, dim // 2, target=target, dtype=torch.float32)
    angles = torch.cat([half, half], dim=-1)
    return angles.cos(), angles.sin()


def compile_for_hopper(
    module: str,
    kernel: str,
    arguments: str,
    constants: dict[str, Any],
    options: dict[str, Any] | None = None,
    capability: int = 90,
) -> Any:
    """Compile a kernel for a GPU that need not be here, and return it.

    Args:
        module: The kernel's module within the package.
        kernel: The kernel's name.
        arguments: Its tensors and numbers as "name:type ...".
        constants: Its compile-time constants by name.
        options: Options of Triton's compiler.
        capability: Compute capability of the GPU times ten.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"hf_vit_accel.{module}"), kernel).jit_function
    types = dict(argument.split(":") for argument in arguments.split()) | dict.fromkeys(constants, "constexpr")
    assert list(types) == list(function.arg_names)
    values = {(list(types).index(constant),): value for constant, value in constants.items()}
    source = ASTSource(fn=function, signature=types, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled
