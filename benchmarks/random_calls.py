"""Time calls of random sizes, with the default and without CUDA graphs.

    python benchmarks/random_calls.py [--json FILE] [--models qwen2.5-vl-7b,qwen3-vl-8b]

Streams: 500 calls, each of a size that no other has, and 2,000 calls of 60 sizes. A call has one to three pictures of
8 to 40 patches a side. Both towers take every call, in turn, and their outputs are compared. Times are means over all
calls, captures included. `held_gb` is the memory that torch had taken after every quarter of the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from measuring import DEVICE, DTYPE, Grid, Row, in_turn, measure_models, outputs_of
from torch import nn

from hf_vit_accel import patch, status
from hf_vit_accel.tools.bench import build_tower, largest_error, milliseconds, weight_of

MOST_PICTURES = 3
SIDES = range(8, 42, 2)
"""Patches of a picture's sides."""
LARGEST_ERROR = 0.02
"""The largest accepted relative difference between replayed and eager outputs, in bf16."""


@dataclass(frozen=True)
class Stream:
    """A stream of calls.

    Attributes:
        calls: The number of calls.
        sizes: The number of different sizes.
    """

    calls: int
    sizes: int

    @property
    def name(self) -> str:
        """Describe the stream, as tables show it."""
        return "no size twice" if self.sizes == self.calls else f"{self.sizes} sizes"

    def grids(self, seed: int) -> Iterator[Grid]:
        """Yield the grid of every call. Where sizes come again, some come more often than others."""
        generator = np.random.default_rng(seed)
        drawn: dict[Grid, None] = {}
        while len(drawn) < self.sizes:
            count = int(generator.integers(1, MOST_PICTURES + 1))
            drawn[tuple((1, *map(int, generator.choice(SIDES, 2))) for _ in range(count))] = None
        grids = list(drawn)
        if self.sizes == self.calls:
            yield from grids
            return
        for _ in range(self.calls):
            yield grids[int(generator.integers(self.sizes) * generator.random())]


STREAMS = (Stream(500, 500), Stream(2000, 60))


def measure_stream(model: str, towers: dict[str, nn.Module], stream: Stream, seed: int = 0) -> Row:
    """Send a stream through both towers.

    Args:
        model: the model's name
        towers: the tower `without` graphs and that with the `default`
        stream: the calls
        seed: chooses the sizes

    Raises:
        AssertionError: if the outputs of a call differ by more than rounding
    """
    weight = weight_of(towers["default"])
    totals = dict.fromkeys(towers, 0.0)
    reserved_gb = []
    largest = 0.0
    for index, grid in enumerate(stream.grids(seed)):
        rows = sum(t * h * w for t, h, w in grid)
        pixels_TP = torch.randn(rows, weight[0].numel(), device=weight.device, dtype=weight.dtype)
        grid_N3 = torch.tensor(grid)
        outputs: dict[str, list[torch.Tensor]] = {}

        def encode(name: str) -> None:
            outputs[name] = outputs_of(towers[name](pixels_TP, grid_thw=grid_N3))  # noqa: B023

        for name in in_turn(towers, index):
            totals[name] += milliseconds(partial(encode, name), cuda=weight.is_cuda)
        error = largest_error(outputs["default"], outputs["without"])
        assert error < LARGEST_ERROR, (index, grid, error)
        largest = max(largest, error)
        if weight.is_cuda and (index + 1) % (stream.calls // 4) == 0:
            reserved_gb.append(torch.cuda.memory_reserved() / 1e9)
    graphs = status(towers["default"]).towers[0].graphs
    return {
        "model": model,
        "stream": stream.name,
        "calls": stream.calls,
        "ms": {name: total / stream.calls for name, total in totals.items()},
        "captures": graphs.captures if graphs else 0,
        "replays": graphs.replays if graphs else 0,
        "error": largest,
        "held_gb": reserved_gb,
    }


@torch.inference_mode()
def measure(model: str) -> list[Row]:
    """Return a row for every stream. Kernels are compiled before, by streams of other sizes."""
    default = build_tower(model, DEVICE, DTYPE)
    towers = {"without": patch(deepcopy(default), cuda_graphs=False), "default": default}
    rows = []
    for seed, stream in enumerate((Stream(40, 10), *STREAMS)):
        patch(default)  # without the graphs of the stream before
        rows.append(measure_stream(model, towers, stream, seed))
        print(rows[-1], flush=True)
    return rows[1:]


if __name__ == "__main__":
    measure_models(__doc__, "qwen2.5-vl-7b,qwen3-vl-8b", measure, options={})
