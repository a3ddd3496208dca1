"""Third-party linears in CUDA graphs: whether their kernels are captured right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.graphs.memory import capture_of_ours
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.machine import one_line

_ROWS = 256
_TRIALS: dict[tuple[object, ...], str | None] = {}
"""By kind of module, dtype of rows and device: why it is not captured."""


def reason_against_capture(modules: Iterable[nn.Module], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why linears cannot run in CUDA graphs, by a trial of each kind; None if all can."""
    for module in modules:
        weight = module._parameters.get("weight")
        key = type(module), type(weight), module.in_features, module.out_features, dtype, device
        if key not in _TRIALS:
            _TRIALS[key] = _try(module, dtype, device)
        if _TRIALS[key] is not None:
            return _TRIALS[key]
    return None


def _try(module: nn.Module, dtype: torch.dtype, device: torch.device) -> str | None:
    """Capture a linear's call, replay it on other rows, and compare with an eager call."""
    name = type(module).__name__
    generator = torch.Generator(device).manual_seed(0)
    in_features: Any = module.in_features
    size = 3, _ROWS, in_features
    first, *others = torch.randn(size, generator=generator, device=device).to(dtype)
    static = first.clone()
    outputs: list[Tensor] = []
    try:
        with torch.no_grad(), capture_of_ours():
            recorder = CudaRecorder(device)
            [replay], _ = recorder.record(lambda: outputs.append(module(static)))
            for rows in others:
                recorder.wait()
                static.copy_(rows)
                replay()
                recorder.done()
                expected = module(rows).float()
                error = (outputs[-1].float() - expected).norm() / expected.norm()
                if not float(error) <= torch.finfo(dtype).eps:
                    return f"a replay of a {name} computes something else than a call"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # third-party code may raise anything
        return f"a {name} cannot be captured: {one_line(error)}"
    return None
