"""Replace the Linears of a tower's blocks, or their weights, by quantised ones."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tiny import tower_of
from torch import nn

Quantise = Callable[[nn.Linear], nn.Module]


class Int8Linear(nn.Module):
    """A Linear in int8 with a scale per row, as bitsandbytes puts one in the place of a Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Int8Weight(torch.Tensor):
    """A tensor whose class computes a Linear's product from int8 and a scale, as torchao's do."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> "Int8Weight":
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.values = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear:
            x, weight, *others = args
            return F.linear(x, weight.values.to(x.dtype) * weight.scale, *others)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            raise NotImplementedError(f"{func} of an int8 weight")
        alias = Int8Weight.__new__(cls, args[0])
        alias.scale = args[0].scale
        alias.values = args[0].values
        return alias


def replace_linears(model: nn.Module, quantise: Quantise) -> nn.Module:
    """Put another module in the place of every Linear in the blocks."""
    for block in tower_of(model).blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, quantise(child))
    return model


def int8_linears(model: nn.Module, _: ExitStack) -> nn.Module:
    return replace_linears(model, Int8Linear)


def int8_weights(model: nn.Module, _: ExitStack) -> nn.Module:

    def quantise(linear: nn.Linear) -> nn.Linear:
        linear.weight = nn.Parameter(Int8Weight(linear.weight.detach()), requires_grad=False)
        return linear

    return replace_linears(model, quantise)


def _bitsandbytes(model: nn.Module, kinds: tuple[str, str], of_weight: dict[str, Any], **of_linear: Any) -> nn.Module:
    """Replace every Linear by bitsandbytes' own. kinds: the classes of the Linear and of its weight."""
    import bitsandbytes as bnb

    linear_kind, weight_kind = (getattr(bnb.nn, kind) for kind in kinds)

    def quantise(linear: nn.Linear) -> nn.Module:
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        quantised: nn.Module = linear_kind(*sizes, **of_weight, **of_linear)
        quantised.weight = weight_kind(linear.weight.detach().cpu(), requires_grad=False, **of_weight)
        quantised.bias = linear.bias
        return quantised.to(linear.weight.device)  # quantises

    return replace_linears(model, quantise)


def bitsandbytes_4bit(model: nn.Module, _: ExitStack) -> nn.Module:
    return _bitsandbytes(model, ("Linear4bit", "Params4bit"), {"quant_type": "nf4"}, compute_dtype=torch.float32)


def bitsandbytes_8bit(model: nn.Module, _: ExitStack) -> nn.Module:
    return _bitsandbytes(model, ("Linear8bitLt", "Int8Params"), {"has_fp16_weights": False})


def torchao_int8(model: nn.Module, _: ExitStack) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(tower_of(model).blocks, Int8WeightOnlyConfig())
    return model


class PackedWeight(nn.Parameter):
    """A parameter of bytes, as bitsandbytes' `Params4bit`: the values are elsewhere."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedWeight":
        copied = PackedWeight(self.data.clone(), requires_grad=self.requires_grad)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class PackedLinear(nn.Linear):
    """A Linear that acts like bitsandbytes' in 4 bit: any rows in, computed in its own dtype, and the same dtype out.

    It casts its bias in place, and no gradient reaches its weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        scale = linear.weight.detach().float().abs().amax(1, keepdim=True) / 7
        values = (linear.weight.detach().float() / scale).round().add(8).to(torch.uint8)
        self.weight = PackedWeight(values, requires_grad=False)
        self.weight.scale = scale
        self.bias = linear.bias
        self.compute_dtype = linear.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None and self.bias.dtype != self.compute_dtype:
            self.bias.data = self.bias.data.to(self.compute_dtype)
        weight = ((self.weight.float() - 8) * self.weight.scale.to(x.device)).to(self.compute_dtype)
        with torch.autocast(x.device.type, enabled=False):  # as inside a kernel
            return F.linear(x.to(self.compute_dtype), weight, self.bias).to(x.dtype)


def packed_linears(model: nn.Module, _: ExitStack) -> nn.Module:
    return replace_linears(model, PackedLinear)


@contextmanager
def computing_in_fp32(model: nn.Module) -> Iterator[None]:
    """Let packed Linears compute in fp32 instead of their own dtype."""
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    dtypes = [linear.compute_dtype for linear in linears]
    for linear in linears:
        linear.compute_dtype = torch.float32
    yield
    for linear, dtype in zip(linears, dtypes, strict=True):
        linear.compute_dtype = dtype


def quanto_int8(model: nn.Module, _: ExitStack) -> nn.Module:
    from optimum.quanto import freeze, qint8, quantize

    for block in tower_of(model).blocks:
        quantize(block, weights=qint8)
        freeze(block)
    return model


def upcast(model: nn.Module) -> nn.Module:
    """Freeze a model and cast its half-precision parameters to fp32, as `peft.prepare_model_for_kbit_training` does."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    return model
