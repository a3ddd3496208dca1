"""How ranks exchange data. Nothing here knows towers.

Time-outs are torch's: gloo raises in the exchange, and under NCCL torch's watchdog ends a process whose exchange hangs
(`ProcessGroupNCCL::Watchdog::runLoop`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_vit_accel.config import Ranks

V = TypeVar("V")


class RankError(RuntimeError):
    """Another rank of a shared call failed, made another call, or did not answer in time."""


@contextmanager
def _as_rank_error() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch.distributed's own errors are of this class
        raise RankError(
            f"the other ranks could not be reached: {error}. All must make the same calls: one that died, raised "
            "before it came to its tower, or skipped a call keeps the others waiting"
        ) from error


def gather(ranks: Ranks, mine: V) -> list[V]:
    objects: list[V] = [mine] * ranks.size
    with _as_rank_error():
        dist.all_gather_object(objects, mine, group=ranks.group)
    return objects


def to_all(ranks: Ranks, mine: Sequence[Tensor], received: Sequence[Sequence[Tensor]]) -> None:
    """Send contiguous tensors to all other ranks and receive theirs, of any sizes, in the order of the current stream.

    NCCL runs one group of sends and receipts as one kernel, so nothing is padded to the largest size.
    """
    operations = []
    for rank, tensors in enumerate(received):
        if rank == ranks.rank:
            continue
        for operation, group in ((dist.isend, mine), (dist.irecv, tensors)):
            for index, tensor in enumerate(group):
                if tensor.numel():
                    operations.append(dist.P2POp(operation, tensor, group=ranks.group, group_peer=rank, tag=index))
    with _as_rank_error():
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def add_up(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Add up every tensor over all ranks, by one reduction for each dtype, in the order of the current stream."""
    sums: dict[int, Tensor] = {}
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[index].reshape(-1) for index in indices])
        with _as_rank_error():
            dist.all_reduce(flat, group=ranks.group)
        pieces = flat.split([tensors[index].numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            sums[index] = piece.view(tensors[index].shape)
    return [sums[index] for index in range(len(tensors))]
