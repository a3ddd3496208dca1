"""Modules that are known to treat each row by itself; any other module may mix the rows of several images.

Passes, reuse, shared calls and the padding of CUDA graphs give a module other rows than stock does. The result is the
same only if a row depends on no other row. The table says for which modules that holds; `docs/` is written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from hf_vit_accel import machine
from hf_vit_accel.ops.base import class_of_own_weight, own_forward


@dataclass(frozen=True, kw_only=True)
class RowWise:
    """Declare modules that treat each row by itself.

    Attributes:
        summary: the modules, for the documentation.
        classes: exact classes of torch; a subclass is another class.
        names: full names of other packages' classes. A name that ends with a dot covers everything below it.
        condition: what must hold for such a module, for the documentation; empty where nothing must.
        holds: whether the condition holds for a module.
        of_patches: whether only modules inside the patch embedding or the downsampling count.
    """

    summary: str
    classes: tuple[type[nn.Module], ...] = ()
    names: tuple[str, ...] = ()
    condition: str = ""
    holds: Callable[[Any], bool] = lambda module: True
    of_patches: bool = False

    def covers(self, kind: type) -> bool:
        """Return whether a class is one of those declared."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        return kind in self.classes or any(
            name.startswith(declared) if declared.endswith(".") else name == declared for declared in self.names
        )


PROVEN = RowWise(
    summary="transformers' classes of the tower itself, and norms, activations and MLPs that other code put in",
    condition="a proof has run them",
)
"""Declared by no name: `tower.proof` lists them."""

_ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)
_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
_PEFT_METHODS = "adalora", "boft", "hra", "ia3", "loha", "lokr", "lora", "lycoris_utils", "oft", "vera"
# The last two hold tensors, and whole modules that are trained.
_PEFT_PARTS = (
    *(f"tuners.{method}.layer" for method in _PEFT_METHODS),
    "tuners.lora.bnb",
    "tuners.lora.dora",
    "tuners.lora.torchao",
    "tuners._buffer_dict",
    "utils.other",
)


def _has_known_variants(module: nn.Module) -> bool:
    """Return whether the adapters of a PEFT module are plain LoRA or DoRA."""
    for variant in getattr(module, "lora_variant", {}).values():
        kind = variant if isinstance(variant, type) else type(variant)
        if "Dora" not in kind.__name__:
            return False
    return True


TABLE: tuple[RowWise, ...] = (
    PROVEN,
    RowWise(summary="Linear and Identity of torch", classes=(nn.Linear, nn.Identity)),
    RowWise(
        summary="Embedding of torch",
        classes=(nn.Embedding,),
        condition="without `scale_grad_by_freq`, which counts the rows of a call",
        holds=lambda embedding: not embedding.scale_grad_by_freq,
    ),
    RowWise(
        summary="LayerNorm and RMSNorm of torch",
        classes=(nn.LayerNorm, nn.RMSNorm),
        condition="they normalise one dimension, the last",
        holds=lambda norm: len(norm.normalized_shape) == 1,
    ),
    RowWise(
        summary="activations of torch and transformers that act element by element",
        classes=_ELEMENTWISE,
        names=("transformers.activations.",),
    ),
    RowWise(
        summary="Softmax, LogSoftmax, Softmin and GLU of torch",
        classes=(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU),
        condition="`dim=-1`",
        holds=lambda module: module.dim == -1,
    ),
    RowWise(summary="Dropout and AlphaDropout of torch", classes=(nn.Dropout, nn.AlphaDropout)),
    RowWise(
        summary="containers of torch (Sequential, ModuleList, ModuleDict, and those of parameters)", classes=_CONTAINERS
    ),
    RowWise(
        summary="Conv2d and Conv3d of torch",
        classes=(nn.Conv2d, nn.Conv3d),
        condition="they embed patches or merge blocks, each of which is an image of its own to them",
        of_patches=True,
    ),
    RowWise(
        summary="PEFT's LoRA (and DoRA), AdaLoRA, BOFT, HRA, IA3, LoHa, LoKr, OFT and VeRA",
        names=tuple(f"peft.{part}." for part in _PEFT_PARTS),
        condition="no adapter is a variant other than DoRA: VeLoRA averages over all rows",
        holds=_has_known_variants,
    ),
    RowWise(
        summary="bitsandbytes' 4-bit linears",
        names=tuple(f"bitsandbytes.nn.modules.{name}" for name in ("Linear4bit", "LinearFP4", "LinearNF4")),
    ),
)
"""All that is known. Left out on purpose, since their scales or outliers are found over all rows of a call: linears of
torch's dynamic quantisation, `bitsandbytes.nn.Linear8bitLt`, `torchao.float8.Float8Linear`."""


def reasons_mixing(
    modules: Iterable[nn.Module],
    proven: Collection[type],
    patches: Iterable[nn.Module | None] = (),
    class_of: Callable[[nn.Module], type] = type,
    trusted: Collection[Any] = (),
) -> list[str]:
    """Return why all rows of a call must be encoded together: the first module that may mix rows.

    Args:
        proven: the classes that the proof of the tower has run.
        patches: the modules that get patches or merge blocks as a batch of images.
        class_of: returns the class that a module was written as, where a wrapper has given it another.
        trusted: proven classes of a copy's own code, and modules that are proven by themselves.

    Returns:
        One sentence, or none where every module treats each row by itself.
    """
    of_patches = {id(module) for part in patches if part is not None for module in part.modules()}
    for module in modules:
        kind = class_of(module)
        is_of_patches = id(module) in of_patches
        reason = _reason_mixing(module, kind, proven, is_trusted=kind in trusted, is_of_patches=is_of_patches)
        if reason is not None and module not in trusted:
            return [f"{reason}, and may mix rows of several images"]
    return []


def _name_of_own_function(module: nn.Module, *, is_activation: bool) -> str | None:
    """Return the attribute by which a proven module calls a function of the user's, or None.

    It may be an activation in `ACT2FN`, or one that was exchanged: a function, `functools.partial` or a method.
    transformers' activations hold partial functions themselves. Frameworks keep theirs under private names.
    """
    for name, value in vars(module).items():
        if isinstance(value, FunctionType):
            is_own = not machine.is_upstream(value)
        elif is_activation or name.startswith("_") or name == "forward":
            is_own = False
        else:
            is_own = callable(value) and not isinstance(value, type | nn.Module)
        if is_own:
            return name
    return None


def _reason_mixing(
    module: nn.Module, kind: type, proven: Collection[type], *, is_trusted: bool, is_of_patches: bool
) -> str | None:
    """Return why a module may mix rows; None if it is known to treat each row by itself."""
    is_torch = kind.__module__.startswith("torch.")
    is_transformers = kind.__module__.startswith("transformers.")
    is_upstream = is_torch or is_transformers
    if own_forward(module) is not None:
        return f"a {kind.__name__} has a forward of its own"
    entry = next((entry for entry in TABLE if entry.covers(kind)), None)
    if kind in proven and (is_transformers or is_trusted):
        name = _name_of_own_function(module, is_activation=entry is not None)
        if name is not None:
            return f"{name} of a {kind.__name__} is a function of your own"
        entry = PROVEN
    if entry is None:
        return f"a {kind.__name__ if is_torch else f'{kind.__module__}.{kind.__name__}'} is inside"
    if is_upstream and not machine.is_upstream(type(module).forward):
        return f"the forward of {kind.__name__} was replaced by another"
    kind_of_weight = class_of_own_weight(module)
    if is_upstream and kind_of_weight is not None:
        return f"a {kind.__name__} holds a {kind_of_weight.__module__}.{kind_of_weight.__name__}"
    if not entry.holds(module) or (entry.of_patches and not is_of_patches):
        description = str(module)
        return f"a {kind.__name__ if chr(10) in description else description} is inside"
    return None
