"""What is verified and timed: one forward, or one forward and backward of a tower that is trained.

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
from hf_vit_accel.tools.bench.baselines import Run, trained
from hf_vit_accel.tools.bench.towers import family_of_tower, weight_of


@dataclass(frozen=True)
class Batch:
    """pixels_TP, and the gradients that come into the outputs (None: a forward alone). pixel_grad: the pixels', too."""

    pixels_TP: Tensor
    incoming: tuple[Tensor, ...] | None = None
    pixel_grad: bool = False

    def float(self) -> Batch:
        """The same numbers in fp32."""
        incoming = None if self.incoming is None else tuple(each.float() for each in self.incoming)
        return replace(self, pixels_TP=self.pixels_TP.float(), incoming=incoming)


def draw_batch(run: Run, grid: Grid, seed: int) -> Batch:
    """Random patches for a grid and, for a tower that is trained, random gradients, in the tower's dtype.

    The pixels' gradient is asked for with the first seed only: training needs none, and none is timed.
    """
    weight = weight_of(run.tower)
    generator = torch.Generator(weight.device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype)

    pixels_TP = family_of_tower(run.tower).pixels(run.tower, draw(rows_of(grid), weight[0].numel()))
    if not trained(run.tower):
        return Batch(pixels_TP)
    with torch.no_grad():
        shapes = [output.shape for output in outputs_of(run(pixels_TP))]
    return Batch(pixels_TP, tuple(draw(*shape) for shape in shapes), pixel_grad=seed == 0)


def outputs_of(output: Any) -> list[Tensor]:
    """Merged features, or the last rows of a tower that merges nothing, and deepstack features: what a model takes."""
    merged = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return [merged, *(output.get("deepstack_features") or [])]


def work(run: Run, batch: Batch) -> list[Tensor]:
    """What is timed: a forward; with incoming gradients the backward, too, whose gradients are added up."""
    if batch.incoming is None:
        with torch.no_grad():
            return outputs_of(run(batch.pixels_TP))
    outputs = outputs_of(run(batch.pixels_TP))
    torch.autograd.backward(outputs, batch.incoming)
    return outputs


def results(run: Run, batch: Batch) -> dict[str, Tensor]:
    """All that is compared, by name: outputs and, of a tower that is trained, every parameter's gradient."""
    if batch.pixel_grad:
        batch = replace(batch, pixels_TP=batch.pixels_TP.detach().clone().requires_grad_())
    run.tower.zero_grad(set_to_none=True)
    found = {f"output {index}": output.detach() for index, output in enumerate(work(run, batch))}
    if batch.incoming is None:
        return found
    found |= {name: value.grad for name, value in run.tower.named_parameters() if value.grad is not None}
    if batch.pixels_TP.grad is not None:
        found["pixels"] = batch.pixels_TP.grad
    run.tower.zero_grad(set_to_none=True)
    return found


@dataclass
class Errors:
    """Relative L2 errors by name, each the root of the mean square over all batches; infinite where one is not finite,
    of another shape, or missing.
    """

    squares: dict[str, list[float]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Compare one batch's results."""
        for name in found.keys() | expected.keys():
            square = math.inf
            if name in found and name in expected and found[name].shape == expected[name].shape:
                difference, norm = (found[name].float() - expected[name]).norm(), expected[name].norm()
                square = float(difference / norm) ** 2 if norm else float(difference)
            self.squares.setdefault(name, []).append(square if math.isfinite(square) else math.inf)

    def by_name(self) -> dict[str, float]:
        """The error of every output and gradient."""
        return {name: math.sqrt(sum(each) / len(each)) for name, each in self.squares.items()}


def milliseconds(step: Callable[[], Any], *, cuda: bool, before: Callable[[], Any] = lambda: None) -> float:
    """One call: by CUDA events after a synchronisation, on CPU by the clock. before: what is done first, not timed."""
    before()
    if not cuda:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_gigabytes(run: Run, batch: Batch) -> float | None:
    """Most memory of one call beyond what lies there before it, the weights; None on a CPU, which does not tell."""
    if not batch.pixels_TP.is_cuda:
        return None
    run.tower.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work(run, batch)
    torch.cuda.synchronize()
    run.tower.zero_grad(set_to_none=True)
    return (torch.cuda.max_memory_allocated() - before) / 1e9
