"""Prove by running that a module whose forward other code put in computes what our operation in its place does.

Liger binds forwards to the norms of a loaded tower, and exchanges their classes before a tower is built. transformers
binds forwards from the Hub under `use_kernels=True`. A proven module counts as transformers' own.

The module runs with random weights on its own device, in fp32 and in its own dtype, in few rows and in more.
`T` rows, `E` width.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops import Context, mlp, norm
from hf_vit_accel.ops.activation import ACTIVATIONS
from hf_vit_accel.ops.base import class_of_own_weight, own_forward
from hf_vit_accel.ops.lora import modules as lora
from hf_vit_accel.tower.exact import exact_products
from hf_vit_accel.tower.twin import Isolated, random_weight, skip_global_hooks

Results = list[Tensor | None]
_VERDICTS: dict[tuple[object, ...], bool | None] = {}
_SIZES = (3, 1.0), (64, 0.02)
"""Rows, and the scale of their values: a norm's epsilon counts where it is small."""
_BOUND = 2e-5
"""Of fp32, as for the outputs in `tower.proof`."""


def prove(
    modules: Sequence[nn.Module], classes: frozenset[type], trusted: frozenset[Any], weight: Tensor
) -> tuple[frozenset[Any], list[str]]:
    """Return `trusted` with the proven modules, and the names of the classes that have no gradients.

    Args:
        modules: Those whose forwards the proof of the tower has not run, outer ones before those inside.
    """
    without_gradients: list[str] = []
    for module in reversed(modules):
        if _importable_forward(module) is None or _is_linear(module) or weight.is_meta:
            continue
        try:
            key = (weight.device.type, weight.dtype, *_key(module))
            if key not in _VERDICTS:
                _VERDICTS[key] = machine.run_isolated(_compare, module, classes, trusted, weight)
        except Exception:
            continue
        if _VERDICTS[key] is not None:
            trusted |= {module}
            without_gradients += [] if _VERDICTS[key] else [type(module).__name__]
    return trusted, without_gradients


def twin_ran(module: nn.Module, classes: frozenset[type]) -> bool:
    """Return whether the proof of the tower ran the code of a layer or its attention, as exchanged in its class.

    Unsloth exchanges classes in the file of the tower, or their forwards, for those of a file that it writes.
    """
    is_as_in_class = own_forward(module) is None and class_of_own_weight(module) is None
    return is_as_in_class and type(module) in classes and _importable_forward(module) is not None


def row_wise_modules(modules: Sequence[nn.Module], parts: Parts) -> set[int]:
    """Return the ids of modules that treat each row by itself, by trials of linears, mergers and the patch embedding.

    Args:
        modules: As for `prove`.
    """
    weight = getattr(parts.blocks[0].norm1, "weight", None)
    if not isinstance(weight, Tensor):  # a norm of the user's: the tower is not fast, and nothing of it is cut
        return set()
    widths = {module: module.in_features for module in modules if _is_linear(module)}
    unknown = {id(module) for module in modules if not lora.is_plain(module)}
    others = dict.fromkeys(parts.mergers(), len(weight)) | {parts.patch_embed: parts.projection.weight[0].numel()}
    widths |= {module: width for module, width in others.items() if _may_be_tried(module, unknown)}
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


def _may_be_tried(module: nn.Module, unknown: set[int]) -> bool:
    """Return whether a module is transformers' own, or a wrapper of PEFT's around it: a user's would see the trial."""
    return id(module) not in unknown or not {"base_layer", "original_module"}.isdisjoint(module._modules)


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
    """Return the first quarters of all results of a module that runs on parts of the rows."""
    clone = copy.deepcopy(module).train(training)
    for inner in clone.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0
    results = _results(lambda rows_TE: torch.cat([clone.forward(x) for x in rows_TE.split(sizes)]), clone, x_TE)
    return [result.flatten()[: result.numel() // 4] for result in results if result is not None]


def _importable_forward(module: nn.Module) -> FunctionType | None:
    """Return the function of a forward, if its file defines it under its name; None for a user's closure."""
    forward: Any = own_forward(module) or type(module).forward
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


def _key(module: Any) -> Iterator[object]:
    """Yield everything that a verdict depends on.

    Raises:
        TypeError: An attribute holds a tensor or a container, which may change unseen.
    """
    if _is_linear(module):
        yield from (module.in_features, module.out_features, module.bias is None)
        return
    yield from (type(module), _importable_forward(module))
    for name, parameter in module._parameters.items():
        yield from (name, None) if parameter is None else (name, parameter.shape, parameter.dtype)
    for name in sorted(vars(module).keys() - vars(_EMPTY).keys()):
        value = getattr(vars(module)[name], "__func__", vars(module)[name])  # a bound method would keep the module
        if isinstance(value, Tensor):
            raise TypeError(f"{name} is a tensor")
        hash(value)
        yield from (name, value)
    for name, child in module._modules.items():
        yield name
        yield from _key(child)


_EMPTY = nn.Module()
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def _copy(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Copy a module, with random weights, plain Linears and no hooks."""
    if _is_linear(module):
        module = nn.Linear(module.in_features, module.out_features, module.bias is not None, device=device)
    clone: Any = copy.copy(module)
    attributes = vars(clone)
    attributes |= {name: OrderedDict() for name in _HOOKS} | {"_buffers": dict(module._buffers)}
    attributes["forward"] = MethodType(_importable_forward(module) or type(module).forward, clone)
    attributes["_modules"] = {name: _copy(child, device, dtype) for name, child in module._modules.items()}
    attributes["_parameters"] = dict(module._parameters)
    generator = torch.Generator("cpu").manual_seed(0)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            values = random_weight(name, parameter.shape, generator).to(device, dtype)
            attributes["_parameters"][name] = nn.Parameter(values)
    skip_global_hooks(clone)
    return clone


def _reference(
    module: Any, device: torch.device, dtype: torch.dtype, classes: frozenset[type], trusted: frozenset[Any]
) -> tuple[Callable[[Tensor], Tensor] | None, int]:
    """Return our operation for a module's role in plain torch, None for no known role; and the width of its rows."""
    trusted |= set(module.modules())
    context = Context(device=device, dtype=dtype, reference=True, classes=classes, trusted=trusted)
    weight = module._parameters.get("weight")
    if weight is not None and not norm.reasons_against(module, context):
        add_norm = norm.fused(module, context)
        return lambda x_TE: add_norm(x_TE, None)[1], len(weight)
    layers = mlp.layers_of(module)
    if layers is not None and not mlp.reasons_against(module, context):
        return mlp.fused(module, context), layers[0][0].in_features
    if weight is not None or module._modules:
        return None, 0
    return ACTIVATIONS.get(str(mlp.activation_of(module, context))), 96


def _compare(module: nn.Module, classes: frozenset[type], trusted: frozenset[Any], weight: Tensor) -> bool | None:
    """Return whether a module has gradients and all are our operation's; None for other outputs or gradients."""
    device = weight.device
    dtype = next((parameter.dtype for parameter in module.parameters()), weight.dtype)
    has_gradients = True
    if _reference(module, device, dtype, classes, trusted)[0] is None:
        return None
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), exact_products(), Isolated():
        clones = (_copy(module, device, dtype).float(), torch.float32), (_copy(module, device, dtype), dtype)
        for (rows, scale), training in product(_SIZES, (False, True)):
            truth: Results = []
            for clone, own_dtype in clones:
                clone.train(training)
                reference, width = _reference(clone, device, own_dtype, classes, trusted)
                assert reference is not None
                generator = torch.Generator("cpu").manual_seed(rows)
                x_TE = torch.randn(rows, width, generator=generator, device="cpu").mul(scale).to(device, dtype)
                ours = _results(reference, clone, x_TE.to(own_dtype))
                theirs = _results(clone.forward, clone, x_TE.to(own_dtype))
                truth = truth or ours
                has_gradients = has_gradients and len(theirs) == len(ours)
                if not _are_as_close(theirs, ours, truth):
                    return None
    return has_gradients


def _results(run: Callable[[Tensor], Tensor], module: nn.Module, x_TE: Tensor) -> Results:
    """Return the rows after the call, outputs without and with gradients, and all gradients, if there are any."""
    leaf_TE = x_TE.clone().requires_grad_()
    given_TE = leaf_TE.clone()  # the function may write in place
    output = run(given_TE)
    with torch.no_grad():
        outputs: Results = [given_TE.detach(), run(x_TE.clone()), output.detach()]
    if not output.requires_grad:
        return outputs
    generator = torch.Generator("cpu").manual_seed(1)
    incoming = torch.randn(output.shape, generator=generator, device="cpu").to(output)
    inputs = [leaf_TE, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return [*outputs, *torch.autograd.grad(output, inputs, incoming, allow_unused=True)]


def _are_as_close(theirs: Results, ours: Results, truth: Results) -> bool:
    """Return whether results are nearly as close to the exact ones as ours, or off by a rounding of their dtype."""
    for their, our, exact in zip(theirs, ours, truth, strict=False):  # outputs alone, where there are no gradients
        if their is None or our is None or exact is None or (their.dtype, their.shape) != (our.dtype, our.shape):
            return False
        error, our_error = (float((x.float() - exact).norm() / exact.norm()) for x in (their, our))
        if not error <= max(1.1 * our_error, torch.finfo(their.dtype).eps, _BOUND):
            return False
    return True
