"""Draw inputs for kernels, and compile kernels without a GPU."""

from functools import partial
from typing import Any

import pytest
import torch

from hf_vit_accel.ops.launch import Kernel, TensorDescriptor, triton

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


def compile_for_hopper(monkeypatch: pytest.MonkeyPatch, *, capability: int = 90) -> list[str]:
    """Let launches on a CPU compile their kernel for a GPU that need not be here; return the names of the kernels.

    The interpreter takes Python that the compiler refuses. What a launch should have written is not there.
    `capability` is the compute capability of the GPU times ten.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled: list[str] = []

    def compile_launch(kernel: Kernel, *arguments: object, **constants: object) -> None:
        function = kernel.jit_function
        names = function.arg_names
        types = dict(zip(names, map(_type_of, arguments), strict=False))
        options = {name: value for name, value in constants.items() if name not in names}
        values = {(names.index(name),): value for name, value in constants.items() if name in names}
        types |= dict.fromkeys((names[index] for (index,) in values), "constexpr")
        assert list(types) == names
        source = ASTSource(fn=function, signature=types, constexprs=values)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
        compiled.append(kernel.function.__name__)

    monkeypatch.setattr(Kernel, "__getitem__", lambda kernel, grid: partial(compile_launch, kernel))
    return compiled


_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _type_of(argument: object) -> str:
    """Return the type of an argument of a kernel, as Triton's compiler names it."""
    if isinstance(argument, torch.Tensor):
        return f"*{_DTYPES[argument.dtype]}"
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{_DTYPES[argument.base.dtype]}{argument.block_shape}>".replace(" ", "")
    return "i32" if isinstance(argument, int) else "fp32"
