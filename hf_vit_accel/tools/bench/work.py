"""Runs what is verified and timed: one forward, or one forward and backward of a tower that is trained.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.tools.bench.baselines import Run, is_trained
from hf_vit_accel.tools.bench.towers import family_of_tower, weight_of


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward, or of one forward and backward.

    Attributes:
        pixels_TP: The pixels.
        incoming: The gradients that come into the outputs; None for a forward alone.
        pixel_grad: Whether the pixels get a gradient, too.
    """

    pixels_TP: Tensor
    incoming: tuple[Tensor, ...] | None = None
    pixel_grad: bool = False

    def float(self) -> Batch:
        """Return the same numbers in fp32."""
        incoming = None if self.incoming is None else tuple(gradient.float() for gradient in self.incoming)
        return replace(self, pixels_TP=self.pixels_TP.float(), incoming=incoming)


def draw_batch(run: Run, grid: Grid, seed: int) -> Batch:
    """Draw random patches for a grid in the tower's dtype, and random gradients if the tower is trained.

    The pixels get a gradient with seed 0 only: training needs none, and none is timed.
    """
    weight = weight_of(run.tower)
    generator = torch.Generator(weight.device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype)

    pixels_TP = family_of_tower(run.tower).pixels(run.tower, draw(rows_of(grid), weight[0].numel()))
    if not is_trained(run.tower):
        return Batch(pixels_TP)
    with torch.no_grad():
        shapes = [output.shape for output in outputs_of(run(pixels_TP))]
    return Batch(pixels_TP, tuple(draw(*shape) for shape in shapes), pixel_grad=seed == 0)


def outputs_of(output: Any) -> list[Tensor]:
    """Return the features that a model takes: merged rows and deepstack features.

    A tower that merges nothing gives its last rows instead. A tower without an output class returns bare tensors.
    """
    if isinstance(output, Tensor):
        return [output]
    if type(output) is tuple:
        return [output[0], *output[1]]
    merged = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return [merged, *(output.get("deepstack_features") or [])]


def work(run: Run, batch: Batch) -> list[Tensor]:
    """Run what is timed: a forward, and with incoming gradients the backward, whose gradients are added up."""
    if batch.incoming is None:
        with torch.no_grad():
            return outputs_of(run(batch.pixels_TP))
    outputs = outputs_of(run(batch.pixels_TP))
    torch.autograd.backward(outputs, batch.incoming)
    return outputs


def results(run: Run, batch: Batch) -> dict[str, Tensor]:
    """Run a batch; return all that is compared by name: outputs, and the gradients of a tower that is trained."""
    if batch.pixel_grad:
        batch = replace(batch, pixels_TP=batch.pixels_TP.detach().clone().requires_grad_())
    run.tower.zero_grad(set_to_none=True)
    values = {f"output {index}": output.detach() for index, output in enumerate(work(run, batch))}
    if batch.incoming is None:
        return values
    for name, parameter in run.tower.named_parameters():
        if parameter.grad is not None:
            values[name] = parameter.grad
    if batch.pixels_TP.grad is not None:
        values["pixels"] = batch.pixels_TP.grad
    run.tower.zero_grad(set_to_none=True)
    return values


@dataclass
class Errors:
    """Relative L2 errors by name, each the root of the mean square over all batches.

    An error is infinite where a value is missing, not finite, or of another shape.
    """

    squares: dict[str, list[float]] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Compare one batch's results."""
        for name in values.keys() | expected.keys():
            square = math.inf
            if name in values and name in expected and values[name].shape == expected[name].shape:
                difference = (values[name].float() - expected[name]).norm()
                norm = expected[name].norm()
                square = float(difference / norm) ** 2 if norm else float(difference)
            self.squares.setdefault(name, []).append(square if math.isfinite(square) else math.inf)

    def by_name(self) -> dict[str, float]:
        """Return the error of every output and gradient."""
        return {name: math.sqrt(sum(squares) / len(squares)) for name, squares in self.squares.items()}


def milliseconds(step: Callable[[], object], *, cuda: bool, before: Callable[[], object] = lambda: None) -> float:
    """Time one call: by CUDA events after a synchronisation, on a CPU by the clock.

    Args:
        before: Runs first, and is not timed.
    """
    before()
    if not cuda:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_gigabytes(run: Run, batch: Batch) -> float | None:
    """Return the most memory that one call takes beyond the weights, or None on a CPU, which does not report it."""
    if not batch.pixels_TP.is_cuda:
        return None
    run.tower.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    bytes_before = torch.cuda.memory_allocated()
    work(run, batch)
    torch.cuda.synchronize()
    run.tower.zero_grad(set_to_none=True)
    return (torch.cuda.max_memory_allocated() - bytes_before) / 1e9
