"""Third-party linears in CUDA graphs: whether their kernels are captured right, and what the graphs read of them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.machine import one_line

_ROWS = 256
_OPAQUE = (nn.Module, type, FunctionType, ModuleType)
_TRIALS: dict[tuple[object, ...], str | None] = {}
"""By kind of module, dtype of rows and device: why it is not captured."""


def reason_against_capture(modules: Iterable[nn.Module], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why linears cannot run in CUDA graphs, by a trial of each kind; None if all can."""
    kinds: dict[tuple[object, ...], Any] = {}
    for module in modules:
        weight = module._parameters.get("weight")
        sizes = module.in_features, module.out_features
        kinds.setdefault((type(module), type(weight), sizes, dtype, device), module)
    for key, module in kinds.items():
        if key not in _TRIALS:
            _TRIALS[key] = _try(module, dtype, device)
        if _TRIALS[key] is not None:
            return _TRIALS[key]
    return None


def _try(module: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Capture a linear's call, replay it on other rows, and compare with an eager call."""
    name = type(module).__name__
    generator = torch.Generator(device).manual_seed(0)
    size = 3, _ROWS, module.in_features
    first, *others = torch.randn(size, generator=generator, device=device).to(dtype)
    static = first.clone()
    outputs: list[Tensor] = []
    try:
        with torch.no_grad():
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


class CalledMemory:
    """The tensors that called modules hold, as attributes of whatever object. Graphs compare it by identity.

    It keeps them alive, so that no other tensor takes their address.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._values: list[object] = []
        seen: set[int] = set()
        for module in modules:
            attributes = vars(module)
            self._slots.append((attributes, "training"))
            self._values.append(module.training)
            for dictionary in (attributes["_parameters"], attributes["_buffers"], attributes):
                self._record(dictionary, seen)
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))

    def _record(self, attributes: dict[str, Any], seen: set[int]) -> None:
        """Record all tensors in a dictionary, and in the objects that it holds."""
        for name, value in attributes.items():
            is_tensor = isinstance(value, Tensor)
            holds_attributes = hasattr(value, "__dict__") and not isinstance(value, _OPAQUE)
            if value is not None and not is_tensor and not holds_attributes:
                continue
            self._slots.append((attributes, name))
            self._values.append(value)
            if holds_attributes and id(value) not in seen:
                seen.add(id(value))
                self._record(vars(value), seen)

    def is_unchanged(self) -> bool:
        """Return whether the modules hold the same tensors at the same addresses."""
        values = [attributes.get(name) for attributes, name in self._slots]
        return all(map(is_, values, self._values)) and list(map(Tensor.data_ptr, self._tensors)) == self._pointers
