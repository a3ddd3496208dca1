"""Stand-ins for what Liger and `kernels` put in a tower: modules and functions of an importable file.

They have the shape of Liger's: an autograd function that writes the gradient over the incoming one, and attributes
that a patched module gets beside its own.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention


class RmsNormFunction(torch.autograd.Function):
    """Compute an RMSNorm; its backward writes to the incoming gradient, as Liger's with `in_place`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (x.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dy = incoming[0]
        normed = x.float() * scale
        d_weight = (dy.float() * normed).sum(0).to(weight.dtype)
        d_normed = dy.float() * weight.float()
        dy.copy_(scale * (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True)))
        return dy, d_weight, None


class RmsNorm(nn.Module):
    """A norm with the signature of Qwen2.5-VL's, which may stand in its place when a tower is built."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps
        self.in_place = True

    def forward(self, x: Tensor) -> Tensor:
        return RmsNormFunction.apply(x, self.weight, self.variance_epsilon)


class OffsetNorm(RmsNorm):
    """A norm that adds one to its weight, as Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        return RmsNormFunction.apply(x, 1 + self.weight, self.variance_epsilon)


class OtherEpsilonNorm(RmsNorm):
    """A norm with an epsilon of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return RmsNormFunction.apply(x, self.weight, 1e-5)


class TrainedNorm(RmsNorm):
    """A norm that computes something else in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return RmsNormFunction.apply(x, self.weight, self.variance_epsilon) * (1.01 if self.training else 1.0)


class MeanNorm(RmsNorm):
    """A norm that mixes the rows of a call."""

    def forward(self, x: Tensor) -> Tensor:
        return RmsNormFunction.apply(x - 1e-3 * x.mean(0), self.weight, self.variance_epsilon)


class LayerNorm(nn.LayerNorm):
    """A LayerNorm that reads its epsilon from `variance_epsilon`, as Liger's."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.variance_epsilon)


class InferenceActivation(nn.Module):
    """A tanh GELU without gradients, as the activations of the Hub, which `kernels` binds for inference."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return functional.gelu(x, approximate="tanh")


class RowsActivation(nn.Module):
    """An activation that depends on all rows, and for which there is no operation: it is called."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows * rows.mean(dim=0).sigmoid()


class Mlp(nn.Module):
    """A SwiGLU without the module of its activation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(Qwen2_5_VLVisionAttention):
    """An attention of another file, as Unsloth writes one."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return _ATTEND(self, *args, **kwargs)


class HalvedAttention(Attention):
    """An attention that computes something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return _ATTEND(self, *args, **kwargs) * 0.5


_ATTEND = Qwen2_5_VLVisionAttention.forward


def bind(module: nn.Module, kind: type[nn.Module]) -> None:
    """Bind the forward of a class to an instance of another, with the attributes that it reads."""
    if hasattr(module, "eps") and not hasattr(module, "variance_epsilon"):
        module.variance_epsilon = module.eps
    module.in_place = True
    vars(module)["forward"] = MethodType(kind.forward, module)


@contextmanager
def exchanged(model: nn.Module, name: str, value: object) -> Iterator[None]:
    """Put something in the place of a name in transformers' file, as Liger does before a model is loaded."""
    namespace = vars(sys.modules[type(model).__module__])
    former = namespace[name]
    namespace[name] = value
    try:
        yield
    finally:
        namespace[name] = former
