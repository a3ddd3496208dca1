"""Run a tower beside our operations under many conditions: a tiny twin of a class, or a clone of a copy.

Everything is plain torch, on the device of the tower. `T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Spec, make_route
from hf_vit_accel.families import Family, Parts, Tower
from hf_vit_accel.families.base import heads_of
from hf_vit_accel.families.interface import form_of, named_tensors
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.ops import Context, build
from hf_vit_accel.tower.differences import (
    PIXELS,
    CallDtypes,
    Report,
    Results,
    gradients_differ,
    outputs_differ,
)
from hf_vit_accel.tower.twin import attending_in_fp32

CONDITIONS: dict[str, Grid] = {
    # A page, a strip, clips and equal images. Real ones have 256 to 16,000 rows, and 16 to 128 patches along a side.
    "large images": ((1, 24, 14), (1, 4, 32), (2, 3, 4), (8, 2, 2), *[(1, 2, 3)] * 8),
    # Several sizes and a clip, which share no layout and fill some windows only.
    "small images": ((1, 3, 5), (3, 2, 4), (1, 1, 9)),
    "single images": ((1, 1, 1),),
    "one image": ((1, 4, 6),),
    "a square image": ((1, 8, 8),),
    "a strip": ((1, 1, 9),),
    "an upright strip": ((1, 9, 1),),
    "two images": ((1, 2, 3), (1, 3, 2)),
    "two equal images": ((1, 2, 2), (1, 2, 2)),
    "three images": ((1, 3, 2), (1, 1, 1), (1, 2, 4)),
    "five images": ((1, 2, 2), (1, 1, 3), (1, 4, 1), (1, 3, 3), (1, 2, 5)),
    "a clip of 2 frames": ((2, 2, 3),),
    "a clip of 3 frames": ((3, 3, 2),),
    "a clip of 4 frames": ((4, 1, 2),),
    "a clip of 5 frames": ((5, 2, 2),),
    "two clips": ((4, 2, 3), (5, 1, 2)),
    "an image and a clip": ((1, 3, 3), (2, 2, 2)),
    "a clip and an image": ((2, 2, 3), (1, 2, 2)),
}
"""Conditions that the code of a tower may test, in merged tokens."""
_LARGE = "large images"
_SMALL = "small images"


def grids_of(tower: Tower, family: Family) -> dict[str, Grid]:
    """Return the grid of every condition, in patches; frame by frame where the family takes no videos."""
    geometry = family.geometry(tower)
    conditions = dict(CONDITIONS)
    if geometry.table is not None:
        side = max(1, geometry.table // geometry.merge)
        conditions["an image of the table's own size"] = ((1, side, side),)
    grids = {}
    for name, tokens in conditions.items():
        unit = max(geometry.merge, 2) if name == _LARGE else geometry.merge
        frames = [(t, h * unit, w * unit) for t, h, w in tokens]
        grids[name] = tuple(frames) if family.videos else tuple((1, h, w) for t, h, w in frames for _ in range(t))
    return grids


@dataclass(frozen=True)
class Trial:
    """One comparison: grids by condition, the mode, and whether gradients are compared, summed over the grids."""

    grids: Mapping[str, Grid]
    training: bool
    grad: bool
    hidden_states: bool = False

    @property
    def is_of_rounding(self) -> bool:
        """Whether errors in a half precision are compared; those of fewer rows vary too much."""
        return self.grids.keys() <= {_LARGE, _SMALL}

    def describe(self, condition: str | None = None) -> str:
        """Describe a condition, or all of them, and the mode."""
        name = condition or (next(iter(self.grids)) if len(self.grids) == 1 else None)
        what = f"{len(self.grids)} conditions" if name is None else f"{name} ({rows_of(self.grids[name])} rows)"
        return f"{what} in {'training' if self.training else 'eval'} mode"

    def gradient_mode(self) -> AbstractContextManager[object]:
        """Return the context of the trial. Without gradients, people train other parts or encode."""
        if self.grad:
            return torch.enable_grad()
        return torch.no_grad() if self.training else torch.inference_mode()


def first_trial(grids: Mapping[str, Grid]) -> Trial:
    """Return the trial that shows most: every kind of layout, and gradients."""
    return Trial({_SMALL: grids[_SMALL]}, training=False, grad=True)


def all_trials(grids: Mapping[str, Grid]) -> list[Trial]:
    """Return trials of all conditions as people train and as they encode, and of a few in every mode.

    Trials in inference mode are last: no tensor that a module keeps from there can be trained with later.
    """
    large = {_LARGE: grids[_LARGE]}
    small = {_SMALL: grids[_SMALL]}
    few = {name: grids[name] for name in ("one image", "two images")}
    others = {name: grid for name, grid in grids.items() if name not in (_LARGE, _SMALL)}
    trials = [first_trial(grids), Trial(few, training=False, grad=True)]
    trials += [Trial(some, training=True, grad=True) for some in (large, small, others)]
    trials += [Trial(some, training=True, grad=False) for some in (small, few)]
    return trials + [Trial(some, training=False, grad=False) for some in (large, small, others)]


def trial_of_small_weights(grids: Mapping[str, Grid]) -> Trial:
    """Return the trial for weights so small that the epsilon of a norm counts. It runs in training mode."""
    return Trial({_SMALL: grids[_SMALL]}, training=True, grad=False)


@dataclass(eq=False)
class Subject:
    """A tower that runs beside our operations, which may replace the trusted modules."""

    tower: Tower
    family: Family
    dtypes: CallDtypes
    trusted: frozenset[type | nn.Module] = frozenset()
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self.parts: Parts = self.family.parts(self.tower)

    @cached_property
    def spec(self) -> Spec:
        """The decisions of all routes: operations in plain torch, attention by SDPA.

        They are those with gradients: without them, adapters would run kernels.
        """
        parts = self.parts
        weight = parts.projection.weight
        dtype = self.dtypes.autocast_dtype or weight.dtype
        names = ("num_heads", "head_dim", "scaling")
        heads, head_dim, scale = heads_of(parts, [getattr(parts.blocks[0].attention, name, None) for name in names])
        context = Context(
            device=weight.device,
            dtype=dtype,
            weights_dtype=weight.dtype,
            reference=True,
            grad=True,
            classes=frozenset(type(module) for module in self.tower.modules()),
            trusted=self.trusted,
        )
        return Spec(
            geometry=self.family.geometry(self.tower),
            request=Request(device=weight.device, dtype=dtype, heads=heads, head_dim=head_dim, scale=scale, grad=True),
            ops=build(parts, context),
            full_layers=tuple(parts.full(index) for index in range(len(parts.blocks))),
            settings=Settings(attention="sdpa"),
        )

    def draw_pixels(self, grid: Grid) -> Tensor:
        """Draw pixels (T, P) that have the same values in every dtype."""
        weight = self.parts.projection.weight
        generator = torch.Generator("cpu").manual_seed(1)
        shape = rows_of(grid), weight[0].numel()
        noise_TP = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        return noise_TP.to(torch.bfloat16).to(weight)

    def call(self, pixels_TP: Tensor, grid: Grid, **arguments: object) -> object:
        """Call the tower, in fp32 with exact attention and with the arguments that let it compute in fp32."""
        if pixels_TP.dtype != torch.bfloat16 and self.dtypes.autocast_dtype is None:
            names = inspect.signature(type(self.tower).forward).parameters
            arguments |= {name: value for name, value in self.family.options_of_proof.items() if name in names}
        grid_thw = torch.tensor(grid, device=pixels_TP.device)
        with attending_in_fp32(self.tower):
            return self.tower(self.family.pixels(self.tower, pixels_TP), grid_thw=grid_thw, **arguments)


def compare(subject: Subject, trial: Trial, truth: Results | None = None) -> tuple[Results, str | None]:
    """Run a tower and our operations on the same pixels; return its results, and how ours differ. `truth` is in fp32.

    In a lower precision neither is the truth.
    """
    subject.tower.train(trial.training)
    request = {"output_hidden_states": True} if trial.hidden_states else {}
    theirs = _run(subject, trial, lambda pixels_TP, grid: subject.call(pixels_TP, grid, **request))
    names = {name for output in theirs.outputs.values() for name in output}
    has_states = trial.hidden_states and any(name.startswith("hidden_states") for name in names)
    states = len(subject.parts.blocks) if has_states else 0

    def encode_in_form(pixels_TP: Tensor, grid: Grid) -> object:
        tensors = encode(make_route(grid, subject.spec).bound, pixels_TP, hidden_states=has_states)
        return theirs.form.build(tensors, states)

    ours = _run(subject, trial, encode_in_form)
    dtypes = subject.dtypes
    for condition in trial.grids:
        why = outputs_differ(ours, theirs, condition, dtypes, subject.report, truth)
        if why is not None:
            return theirs, f"{why}, for {trial.describe(condition)}"
    exact = None if truth is None else truth.gradients
    why = gradients_differ(ours.gradients, theirs.gradients, dtypes, subject.report, exact)
    return theirs, why and f"{why}, for {trial.describe()}"


def _run(subject: Subject, trial: Trial, call: Callable[[Tensor, Grid], object]) -> Results:
    """Return the outputs of a call for every grid, and the gradients of a random weighting of all outputs."""
    outputs: dict[str, dict[str, Tensor]] = {}
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor | None] = {}
    output: object = None
    dtype = subject.dtypes.autocast_dtype
    device = subject.parts.projection.weight.device.type
    with trial.gradient_mode():
        for condition, grid in trial.grids.items():
            pixels_TP = subject.draw_pixels(grid).requires_grad_(trial.grad)
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                output = call(pixels_TP, grid)
            outputs[condition] = named_tensors(output)
            inputs[f"{PIXELS} of {condition}"] = pixels_TP
            for name, tensor in outputs[condition].items():
                if name.startswith("hidden_states"):
                    inputs[f"{name} of {condition}"] = tensor
        if trial.grad:
            tensors = [tensor for named in outputs.values() for tensor in named.values()]
            inputs |= dict(subject.tower.named_parameters())
            inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
            generator = torch.Generator("cpu").manual_seed(2)
            incoming = [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in tensors]
            found = torch.autograd.grad(tensors, list(inputs.values()), incoming, allow_unused=True)
            gradients = dict(zip(inputs, found, strict=True))
    return Results(outputs=outputs, gradients=gradients, kind=type(output), form=form_of(output, len(pixels_TP)))
