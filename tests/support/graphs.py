"""Patch with CUDA graphs whose buffers are poisoned, and draw layouts to replay."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tiny import tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import GraphConfig
from hf_vit_accel.graphs import store
from hf_vit_accel.tower.state import state_of
from support.cpu_graphs import SMALL

Grid = list[tuple[int, int, int]]


def patch(model: nn.Module, config: GraphConfig | bool | str = SMALL, **kwargs: object) -> Any:
    """Patch with graphs and poison their buffers before every use; return the tower's runner of inference graphs."""
    hf_vit_accel.patch(model, cuda_graphs=config, **kwargs)
    return poison_before_use(state_of(tower_of(model)).inference_runner)


def patch_training(tower: nn.Module, config: GraphConfig | str, **kwargs: object) -> Any:
    """Patch with graphs and poison their buffers before every use; return the tower's runner of training graphs."""
    hf_vit_accel.patch(tower, cuda_graphs=config, **kwargs)
    return poison_before_use(state_of(tower).training_runner)


def poison_before_use(runner: Any) -> Any:
    """Spoil all static buffers before every replay, so that a graph reads only values that were written for it.

    The fixture `on_cpu` puts the recorder's class back; tests on a GPU use the fixture `kept_recorder`.
    """
    make = store.CudaRecorder

    def recorder(device: torch.device) -> Any:
        created: Any = make(device)
        created.wait = SpoilingWait(created.wait, runner.static_buffers)
        return created

    store.CudaRecorder = recorder  # type: ignore[misc,assignment]
    return runner


class SpoilingWait:
    """A recorder's `wait`, which then spoils the buffers of one runner: that of the last `poison_before_use`."""

    def __init__(self, wait: Callable[[], None], buffers: Callable[[], list[torch.Tensor]]) -> None:
        self.wait = wait.wait if isinstance(wait, SpoilingWait) else wait
        self.buffers = buffers

    def __call__(self) -> None:
        self.wait()
        for buffer in self.buffers():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 251)


def draw_grid(rng: np.random.Generator, most_tokens: int = 128) -> Grid:
    """Draw up to six images and videos of random sizes, together at most `most_tokens` merged tokens."""
    grid: Grid = []
    room = int(rng.integers(1, most_tokens + 1))
    while room > 0 and len(grid) < 6:
        t = int(rng.integers(1, 4)) if rng.random() < 0.3 else 1
        h = int(rng.integers(1, 9))
        w = int(rng.integers(1, 9))
        if t * h * w > room:
            if grid:
                break
            t = 1
            h = 1
            w = room
        grid.append((t, 2 * h, 2 * w))
        room -= t * h * w
    return grid
