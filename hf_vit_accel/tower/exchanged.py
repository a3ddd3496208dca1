"""Modules whose class or forward other code put in: which of them a proof can run, and which treat rows alone.

Liger binds forwards to the norms of a loaded tower, and exchanges their classes before a tower is built. transformers
binds forwards from the Hub under `use_kernels=True`. Unsloth exchanges classes in the file of a tower, or their
forwards. A twin gets the same classes and forwards in the same places, so the proof of the tower runs them too.

Linears of others (PEFT's, bitsandbytes') are called as they are. A trial says whether they treat each row by itself.
`T` rows, `E` width.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families import Tower
from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops import lora
from hf_vit_accel.ops.base import own_forward
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.wrappers import WRAPPED, module_inside
from hf_vit_accel.versions import is_adapter

_BOUND = 2e-5
"""Of fp32, as for the outputs in `tower.proof`."""
_PLAIN = bool, int, float, str, tuple, type(None)
_OF_ANY_MODULE = {*vars(nn.Module()), "config", "forward", "_old_forward", "_hf_hook"}


def place_of(path: str) -> str:
    """Return the path of a module without the numbers of layers, and without wrappers."""
    names = [name for name in path.split(".") if name not in WRAPPED]
    return ".".join("*" if name.isdigit() else name for name in names)


def exchanged_modules(tower: Tower) -> dict[str, list[nn.Module]]:
    """Return the modules that other code put in, by their place, where all modules of a place are alike."""
    modules: dict[str, list[nn.Module]] = {}
    for path, module in tower.named_modules():
        if path and _is_exchanged(module):
            modules.setdefault(place_of(path), []).append(module)
    return {place: found for place, found in modules.items() if len(set(map(form_of, found))) == 1}


def _is_exchanged(module: nn.Module) -> bool:
    """Return whether a module is not as its class in torch or transformers is now, and a twin can get its like."""
    if module_inside(module) is not None or is_adapter(module) or _is_linear(module):
        return False
    kind: Any = fsdp.class_of(module)
    present: object = getattr(sys.modules.get(kind.__module__), kind.__name__, kind)
    is_as_its_class = own_forward(module) is None and machine.is_upstream(kind.forward) and present is kind
    return not is_as_its_class and _importable_forward(module) is not None


def form_of(module: nn.Module) -> Hashable:
    """Return the class of a module, its forward, and its attributes that are plain values or bound methods."""
    attributes: dict[str, object] = {}
    for name in vars(module).keys() - _OF_ANY_MODULE:
        value = vars(module)[name]
        if isinstance(value, MethodType):
            attributes[name] = value.__func__.__code__  # Liger binds a new function to every module
        elif isinstance(value, _PLAIN):
            attributes[name] = repr(value)
    return type(module), _importable_forward(module), frozenset(attributes.items())


def exchange(module: nn.Module, like: nn.Module) -> None:
    """Give a twin's module the class and the forward of another, and the attributes that it lacks.

    ValueError if they are built otherwise, or if an attribute holds an object, which may change unseen.
    """
    names = vars(like).keys() - _OF_ANY_MODULE - vars(module).keys()
    is_alike = (module._modules.keys(), module._parameters.keys()) == (like._modules.keys(), like._parameters.keys())
    if not is_alike or not all(isinstance(vars(like)[name], (*_PLAIN, MethodType)) for name in names):
        raise ValueError(f"a {type(like).__name__} is not built as the {type(module).__name__} in its place")
    module.__class__ = fsdp.class_of(like)
    attributes = vars(module)
    for name in names:
        value = vars(like)[name]
        attributes[name] = MethodType(value.__func__, module) if isinstance(value, MethodType) else value
    attributes["forward"] = MethodType(_importable_forward(like) or type(like).forward, module)


def row_wise_modules(modules: Sequence[nn.Module], parts: Parts) -> set[int]:
    """Return the ids of modules that treat each row by itself, by trials of linears, mergers and embeddings."""
    weight = getattr(parts.blocks[0].norm1, "weight", None)
    if not isinstance(weight, Tensor):  # a norm of the user's: the tower is not fast, and nothing of it is cut
        return set()
    widths = {module: module.in_features for module in modules if _is_linear(module)}
    unknown = {id(module) for module in modules if not lora.is_plain(module)}
    others = dict.fromkeys(parts.mergers(), len(weight)) | {parts.patch_embed: parts.projection.weight[0].numel()}
    for module, width in others.items():
        is_wrapper_of_peft = not {"base_layer", "original_module"}.isdisjoint(module._modules)
        if id(module) not in unknown or is_wrapper_of_peft:  # a module of the user's would see the trial
            widths[module] = width
    row_wise: set[int] = set()
    verdicts: dict[object, bool] = {}
    for module, width in widths.items():
        inside = list(module.modules())
        if unknown.isdisjoint(map(id, inside)) or _importable_forward(module) is None:
            continue
        form = (str(module), *map(type, inside))
        if form not in verdicts:
            try:
                verdicts[form] = machine.run_isolated(_treats_rows_alone, module, width, weight)
            except Exception:  # third-party code may raise anything; sharded weights cannot be tried
                verdicts[form] = False
        if verdicts[form]:
            row_wise.update(map(id, inside))
            unknown.difference_update(row_wise)
    return row_wise


def _treats_rows_alone(module: nn.Module, width: int, weight: Tensor) -> bool:
    """Return whether the first rows have the same results and gradients alone as beside others, which are much larger.

    A scale of all rows would show, and outliers among the others. Fewer rows would have a kernel of their own. On an
    H200 in bf16 two kernels of bitsandbytes in 4 bit differ by up to 0.55 eps. In 8 bit, where outliers count, rows
    alone differ by 1.2 eps.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    x_TE = torch.randn(256, width, generator=generator, device="cpu").to(weight)
    x_TE[64:] *= 1000
    bound = max(0.75 * torch.finfo(weight.dtype).eps, _BOUND)
    for training in (False, True):
        beside = _first_results(module, training, x_TE, [256])
        alone = _first_results(module, training, x_TE, [64, 192])
        for rows, expected in zip(alone, beside, strict=True):
            if not (rows - expected).float().norm() <= bound * expected.float().norm():
                return False
    return True


def _first_results(module: nn.Module, training: bool, x_TE: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the first quarters of all outputs and gradients of a module that runs on parts of the rows."""
    clone = copy.deepcopy(module).train(training)
    for inner in clone.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0
    leaf_TE = x_TE.clone().requires_grad_()
    given_TE = leaf_TE.clone()  # the module may write in place
    output = torch.cat([clone.forward(rows_TE) for rows_TE in given_TE.split(sizes)])
    results = [given_TE.detach(), output.detach()]
    with torch.no_grad():
        results.append(torch.cat([clone.forward(rows_TE) for rows_TE in x_TE.clone().split(sizes)]))
    if output.requires_grad:
        generator = torch.Generator("cpu").manual_seed(1)
        incoming = torch.randn(output.shape, generator=generator, device="cpu").to(output)
        inputs = [leaf_TE, *(parameter for parameter in clone.parameters() if parameter.requires_grad)]
        gradients = torch.autograd.grad(output, inputs, incoming, allow_unused=True)
        results += [gradient for gradient in gradients if gradient is not None]
    return [result.flatten()[: result.numel() // 4] for result in results]


def _importable_forward(module: nn.Module) -> FunctionType | None:
    """Return the function of a forward, if its file defines it under its name; None for a user's closure."""
    forward = own_forward(module) or type(module).forward
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType) or function.__module__ == "__main__":
        return None
    if machine.is_upstream(function):  # another class may have taken the name of its class
        return function
    found: object = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return function if found is function else None


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear, an adapter around one, or a quantised one."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")
