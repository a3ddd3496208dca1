"""Copies of a call's small tensors on the host, where transformers' own methods read them without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_vit_accel.watch import version_of

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a model's method by name: tensors, caches and flags."""
Result: TypeAlias = Any
"""A result of a model's method: tensors, or an output class of transformers."""


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host in one transfer."""
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)  # keeps every part aligned
    flat = [tensors[index].detach().contiguous().view(-1).view(torch.uint8) for index in order]
    packed = torch.cat([part.to(flat[0].device) for part in flat])
    if packed.is_cuda:  # to pageable memory the tokens of 256 rows take 16 ms
        host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
        host.copy_(packed, non_blocking=True)
        torch.cuda.current_stream(packed.device).synchronize()
    else:
        host = packed.cpu()
    copies = list(tensors)
    for index, part in zip(order, host.split([len(part) for part in flat]), strict=True):
        copies[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return copies


def to_device(result: Result, device: torch.device) -> Result:
    """Send the tensors of a result to a device, and let no host wait for it."""
    if isinstance(result, tuple):
        return tuple(to_device(part, device) for part in result)
    host: Tensor = result
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Copy:
    source: Tensor
    version: int | None
    host: Tensor


class HostCopies:
    """Copies of the tensors of one forward. They count until it ends, and while nothing writes to the tensors.

    Inference tensors do not count their modifications.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Keep copies of these tensors, in the place of all former ones."""
        away = [tensor for tensor in tensors if not is_on_host(tensor)]
        hosts = to_host(away) if away else []
        self._copies = [_Copy(tensor, version_of(tensor), host) for tensor, host in zip(away, hosts, strict=True)]

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor itself if it is on the host, its copy if there is one, or None."""
        if is_on_host(tensor):
            return tensor
        for copy in self._copies:
            if copy.source is tensor and copy.version == version_of(tensor):
                return copy.host
        return None

    def on_host(self, arguments: Arguments, names: Sequence[str]) -> Arguments:
        """Return arguments with these tensors on the host. One transfer fetches those without a copy."""
        tensors = {name: arguments[name] for name in names if isinstance(arguments.get(name), Tensor)}
        copies = {name: self.find(tensor) for name, tensor in tensors.items()}
        missing = [name for name, copy in copies.items() if copy is None]
        if missing:
            copies |= dict(zip(missing, to_host([tensors[name] for name in missing]), strict=True))
        return arguments | copies

    def clear(self) -> None:
        self._copies = []
