"""The ranks that share calls: their process group, and how they exchange data. Nothing here knows towers.

Time-outs are torch's. gloo raises in the exchange; under NCCL torch's watchdog ends a process whose exchange hangs
(`ProcessGroupNCCL::Watchdog::runLoop`). Errors of torch.distributed are raised as a `RankError` with likely causes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankError(RuntimeError):
    """Another rank of a shared call failed, made another call, or did not answer in time."""


class Ranks:
    """A process group. Copies share it; an unpickled object has the default group, or is None without one."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: object) -> Ranks:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.group is dist.group.WORLD,)

    @property
    def device(self) -> torch.device:
        """Return the device on which words are exchanged: the CPU if the group can, so that nobody waits for a GPU."""
        kinds = {device.type for device in self.group._device_types}
        return torch.device("cpu" if "cpu" in kinds else "cuda")

    def words(self, mine: list[int], last: Tensor, *, when: str) -> list[list[int]]:
        """Exchange int64 words with all ranks.

        Args:
            mine: The words of this rank; every rank gives as many.
            last: One more word, (1,), that the host does not know; on `device`.

        Returns:
            The words of every rank, by rank.

        Raises:
            RankError: The ranks could not exchange them.
            OutOfMemoryError: Memory ran out before anything was sent.
        """
        device = self.device
        # Memory that runs out here must run out before the exchange begins.
        received = torch.empty(self.size, len(mine) + 1, dtype=torch.int64, device=device)
        sent = torch.cat([torch.tensor(mine, dtype=torch.int64).to(device), last])
        with _as_rank_error(when):
            dist.all_gather(list(received), sent, group=self.group)
            return received.tolist()

    def to_all(self, mine: Tensor, received: Sequence[Tensor], *, when: str) -> list[Tensor]:
        """Send this rank's tensor to all others and receive theirs, in the order of the current stream.

        NCCL runs one group of sends and receipts as one kernel, so nothing is padded to the largest size.

        Args:
            received: Empty tensors for those of the others, by rank, of any sizes; this rank's is ignored.
        """
        by_rank = [mine if rank == self.rank else tensor for rank, tensor in enumerate(received)]
        operations = []
        for rank, tensor in enumerate(by_rank):
            if rank == self.rank:
                continue
            if mine.numel():
                operations.append(dist.P2POp(dist.isend, mine, group=self.group, group_peer=rank))
            if tensor.numel():
                operations.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank))
        with _as_rank_error(when):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return by_rank

    def add_up(self, tensors: Sequence[Tensor], *, when: str) -> list[Tensor]:
        """Add up every tensor over all ranks, by one reduction for each dtype, in the order of the current stream."""
        sums: dict[int, Tensor] = {}
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[index].reshape(-1) for index in indices])
            with _as_rank_error(when):
                dist.all_reduce(flat, group=self.group)
            pieces = flat.split([tensors[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                sums[index] = piece.view(tensors[index].shape)
        return [sums[index] for index in range(len(tensors))]


@contextmanager
def _as_rank_error(when: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch.distributed's own errors are of this class
        raise RankError(
            f"the other ranks could not be reached {when}: {error}. All must make the same calls: one that died, "
            "raised before it came to its tower, or skipped a call keeps the others waiting"
        ) from error


def _unpickled(default: bool) -> Ranks | None:
    if default and dist.is_available() and dist.is_initialized():
        return ranks_of(True)
    warnings.warn(
        "a process group cannot be pickled, so calls are no longer shared by ranks; patch again with data_parallel",
        stacklevel=2,
    )
    return None


def ranks_of(data_parallel: object) -> Ranks | None:
    """Return the ranks that `patch(data_parallel=...)` means; None for no other rank than this one.

    Args:
        data_parallel: False, True, a process group or a device mesh of one dimension.

    Raises:
        ValueError: If there is no such group.
    """
    if data_parallel is False:
        return None
    expected = "expected data_parallel to be False, True, a process group or a device mesh of one dimension"
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{expected}, with torch.distributed initialised; call init_process_group first, under torchrun"
        )
    group: Any = dist.group.WORLD if data_parallel is True else data_parallel
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"{expected}, got a mesh of {group.ndim}; pass one of them, such as mesh['tp']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{expected}, got {data_parallel!r}")
    ranks = Ranks(group)
    return ranks if ranks.size > 1 else None
