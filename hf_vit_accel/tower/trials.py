"""Run a clone of a copy beside our operations, and compare the results.

All trials of `differences.trials` run in fp32, and the small and the large images in the dtype of the calls. Weights
are the copy's and random ones. Everything is plain torch, on the device of the copy.
`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Spec, make_route
from hf_vit_accel.families import Parts, Tower
from hf_vit_accel.families.copies import CopyFamily, Form, Output, heads_of, read_output, trusted_classes
from hf_vit_accel.layout import rows_of
from hf_vit_accel.ops import Context, build
from hf_vit_accel.tower.differences import (
    OUTPUT_BOUND,
    CallDtypes,
    Report,
    Results,
    Sides,
    Trial,
    far_off,
    far_off_in_low_precision,
    trials,
)
from hf_vit_accel.tower.exact import attending_in_fp32, exact_products

_COMPARED_IN_LOW_PRECISION = ("small images", "large images")
"""The errors of fewer rows vary too much in a half precision."""


def _clone(tower: nn.Module, dtype: torch.dtype | None = None) -> Tower:
    """Return a stock clone without hooks, all of whose parameters are trained."""
    clone = copy.deepcopy(tower)
    for module in clone.modules():
        attributes = vars(module)
        if module is clone or "_hf_hook" in attributes:
            for name in ("forward", "_old_forward", "_hf_hook", "_hf_vit_accel"):
                attributes.pop(name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            attributes[name] = OrderedDict()
        if type(module).__module__.startswith("peft."):  # our operations apply an adapter's dropout, but at random
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
    return (clone if dtype is None else clone.to(dtype)).requires_grad_()


def _redraw(clone: nn.Module) -> None:
    """Draw all parameters anew: results must agree for weights that are loaded later, too."""
    generator = torch.Generator("cpu").manual_seed(2)
    with torch.no_grad():
        for name, parameter in clone.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32)
            if parameter.dim() > 1:
                noise = noise / parameter.shape[1:].numel() ** 0.5
            else:
                noise = noise * 0.1 + float(name.endswith("weight"))
            parameter.copy_(noise)


def _spec(clone: Tower, family: CopyFamily, parts: Parts, dtypes: CallDtypes) -> Spec:
    """Return what decides the routes of a clone: all operations in plain torch, attention by SDPA."""
    weight = parts.projection.weight
    attention = parts.blocks[0].attention
    names = ("num_heads", "head_dim", "scaling")
    heads, head_dim, scale = heads_of(parts, [getattr(attention, name, None) for name in names])
    dtype = dtypes.autocast_dtype or weight.dtype
    request = Request(device=weight.device, dtype=dtype, heads=heads, head_dim=head_dim, scale=scale, grad=True)
    context = Context(
        device=weight.device,
        dtype=dtype,
        weights_dtype=weight.dtype,
        reference=True,
        grad=True,
        trusted=trusted_classes(clone),
    )
    return Spec(
        geometry=family.geometry(clone),
        request=request,
        ops=build(parts, context),
        full_layers=tuple(parts.full(index) for index in range(len(parts.blocks))),
        settings=Settings(attention="sdpa"),
    )


def _pixels(trial: Trial, weight: Tensor) -> Tensor:
    """Draw pixels (T, P) that have the same values in every dtype."""
    generator = torch.Generator("cpu").manual_seed(1)
    shape = rows_of(trial.grid), weight[0].numel()
    noise_TP = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return noise_TP.to(torch.bfloat16).to(weight)


def _call(clone: Tower, family: CopyFamily, pixels: Tensor, grid_thw: Tensor) -> Output:
    """Call a clone, in fp32 with exact attention and with the arguments that let it compute in fp32."""
    options: dict[str, object] = {}
    if pixels.dtype != torch.bfloat16 and not torch.is_autocast_enabled(pixels.device.type):
        names = inspect.signature(type(clone).forward).parameters
        options = {name: value for name, value in family.options_of_proof.items() if name in names}
    with attending_in_fp32(clone):
        return clone(pixels, grid_thw=grid_thw, **options)


def _run(clone: Tower, family: CopyFamily, trial: Trial, dtypes: CallDtypes) -> Sides:
    """Run a clone and our operations on the same pixels."""
    clone.train(trial.training)
    parts = family.parts(clone)
    weight = parts.projection.weight
    pixels_TP = _pixels(trial, weight).requires_grad_()
    spec = _spec(clone, family, parts, dtypes)
    grid_thw = torch.tensor(trial.grid, device=weight.device)
    autocast = (
        nullcontext()
        if dtypes.autocast_dtype is None
        else torch.autocast(weight.device.type, dtype=dtypes.autocast_dtype)
    )
    with _without_gradients(trial):
        with autocast:
            output = _call(clone, family, family.pixels(clone, pixels_TP), grid_thw)
        form, expected = read_output(output, len(pixels_TP))
        expected = list(expected)
        stock = Results(expected, _gradients(clone, trial, pixels_TP, expected))
        with autocast:
            encoded = encode(make_route(trial.grid, spec).ready(), pixels_TP)
        if len(encoded) <= (form.index if form.kind is Tensor else 0):
            raise ValueError("it returns merged features, but has no merger that is known")
        tensors = form.select(encoded)
        if [x.shape for x in tensors] != [x.shape for x in expected]:
            shapes = [[tuple(x.shape) for x in results] for results in (tensors, expected)]
            raise ValueError(f"it returns the shapes {shapes[1]}, where our operations return {shapes[0]}")
        ours = Results(tensors, _gradients(clone, trial, pixels_TP, tensors))
    return Sides(form, stock, ours)


def _without_gradients(trial: Trial) -> AbstractContextManager[object]:
    """Return the mode of a trial."""
    if trial.grad:
        return nullcontext()
    return torch.no_grad() if trial.training else torch.inference_mode()


def _gradients(clone: nn.Module, trial: Trial, pixels_TP: Tensor, outputs: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of pixels and of all parameters, for a random weighting of the outputs."""
    if not trial.grad:
        return []
    generator = torch.Generator("cpu").manual_seed(3)
    incoming = [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in outputs]
    inputs = [pixels_TP, *clone.parameters()]
    return list(torch.autograd.grad(outputs, inputs, incoming, allow_unused=True))


def compare(
    tower: Tower, family: CopyFamily, dtypes: CallDtypes, report: Report, is_first: bool
) -> tuple[Form, str | None]:
    """Compare a copy with our operations.

    Returns:
        The form of its results; and how far it is off, and where. None if it is not.
    """
    fp32 = CallDtypes(torch.float32)
    exact = _clone(tower, torch.float32)
    own_clone = None if dtypes == fp32 else _clone(tower)
    all_trials = trials(family.geometry(exact), videos=family.videos)
    if is_first:
        drawn = copy.deepcopy(exact)
        _redraw(drawn)
    for trial in all_trials:
        is_of_rounding = trial.name in _COMPARED_IN_LOW_PRECISION
        if not is_first and not is_of_rounding:
            continue
        with exact_products():
            truth = _run(exact, family, trial, fp32)
        why = far_off(exact, truth, trial, fp32, report)
        if why is not None:
            layer = None if "gradient" in why else _first_layer(exact, family, trial)
            return truth.form, why if layer is None else f"{why}, from layer {layer} on"
        if own_clone is not None and (dtypes.is_exact or is_of_rounding):
            sides = _run(own_clone, family, trial, dtypes)
            if dtypes.is_exact:
                why = far_off(own_clone, sides, trial, dtypes, report)
            else:
                why = far_off_in_low_precision(sides, trial, dtypes, report, truth.theirs)
            if why is not None:
                return truth.form, why
        if is_first and trial is all_trials[0]:
            with exact_products():
                sides = _run(drawn, family, trial, fp32)
            why = far_off(drawn, sides, trial, fp32, report)
            if why is not None:
                return truth.form, f"with random weights, {why}"
            del drawn
    return truth.form, None


def _first_layer(clone: Tower, family: CopyFamily, trial: Trial) -> int | None:
    """Return the first layer whose rows are off; None if layers are called in a way that is unknown."""
    parts = family.parts(clone)
    entering_rows: list[Tensor] = []

    def keep_rows(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        entering_rows.extend(arguments[:1])

    hooks = [block.module.register_forward_pre_hook(keep_rows) for block in parts.blocks]
    weight = parts.projection.weight
    pixels_TP = _pixels(trial, weight)
    with torch.no_grad() if trial.grad else _without_gradients(trial), exact_products():
        _call(clone, family, family.pixels(clone, pixels_TP), torch.tensor(trial.grid, device=weight.device))
        for hook in hooks:
            hook.remove()
        if len(entering_rows) != len(parts.blocks):
            return None
        spec = _spec(clone, family, parts, CallDtypes(torch.float32))
        first = 0
        end = len(entering_rows)  # rows that enter layer `end` are off, or there is no such layer
        while end - first > 1:
            middle = (first + end) // 2
            ours_TE = encode(make_route(trial.grid, _shortened(spec, middle)).ready(), pixels_TP)[0]
            stock_TE = entering_rows[middle]
            if float((ours_TE - stock_TE).norm() / stock_TE.norm()) <= OUTPUT_BOUND:
                first = middle
            else:
                end = middle
    return first


def _shortened(spec: Spec, depth: int) -> Spec:
    """Return a spec of the first layers alone."""
    assert spec.ops is not None
    deepstack = {layer: merge for layer, merge in spec.ops.deepstack.items() if layer < depth}
    ops = replace(spec.ops, layers=spec.ops.layers[:depth], deepstack=deepstack)
    return replace(spec, ops=ops, full_layers=spec.full_layers[:depth])
