"""Norms inside a decode step: one kernel of torch instead of eight small ones of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor, nn

from hf_vit_accel.families import Model, find_towers


@torch.no_grad()
def norms_of(model: nn.Module) -> list[Model]:
    """Return the RMSNorms of a text model that torch computes alike. The first one of each class is tried out."""
    in_towers = {module for _, tower, _ in find_towers(model) for module in tower.modules()}
    is_alike: dict[type, bool] = {}
    norms = []
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and "forward" not in vars(module) and module not in in_towers:
            if type(module) not in is_alike:
                is_alike[type(module)] = _is_alike(module)
            if is_alike[type(module)]:
                norms.append(module)
    return norms


def _is_alike(norm: Model) -> bool:
    """Compare a norm with torch's, on rows of usual size and on rows in which epsilon counts."""
    try:
        weight = norm.weight
        row = torch.linspace(-1.0, 3.0, len(weight), device=weight.device)  # its mean counts in a LayerNorm
        hidden = torch.stack([row, row.flip(0) * norm.variance_epsilon**0.5]).to(weight.dtype)
        expected = norm(hidden).double()
        error = (_rms_norm(norm, hidden).double() - expected).norm() / expected.norm()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # a norm of another form
        return False
    return float(error) < 4 * torch.finfo(weight.dtype).eps


def _rms_norm(norm: Model, hidden: Tensor) -> Tensor:
    return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


@contextmanager
def as_one_kernel(norms: Sequence[Model]) -> Iterator[None]:
    """Let norms run as torch's kernel, in this thread. transformers rounds before the weight, torch only at the end."""
    thread = get_ident()

    def forward_of(norm: Model) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            if get_ident() != thread or hidden.dtype != norm.weight.dtype:
                result: Tensor = type(norm).forward(norm, hidden)
                return result
            return _rms_norm(norm, hidden)

        return forward

    for norm in norms:
        norm.forward = forward_of(norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward
