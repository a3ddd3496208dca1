"""The ranks that share calls: which group they are, and what they exchange. Nothing here knows towers.

Whatever torch.distributed raises comes out as a `RankError` that says what may be wrong.

What NCCL exchanges is waited for here, on the host and not for ever. A rank that dies leaves NCCL's kernels on the
others spinning, and whoever then waits for their GPU hangs; torch's watchdog ends such a process a minute after the
timeout (`ProcessGroupNCCL::Watchdog::runLoop`). A thread that aborted those kernels later would not do: the caller
would go on with memory that was never filled.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankError(RuntimeError):
    """In a call that ranks share: another rank failed, made another call, or did not answer in time."""


class Ranks:
    """A process group. Copies share it; what is pickled comes back with the default group, or without any."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.group is dist.group.WORLD,)

    @property
    def device(self) -> torch.device:
        """Where words are exchanged: on the host if the group can, so that nobody waits for a GPU."""
        return torch.device("cpu" if "cpu" in {each.type for each in self.group._device_types} else "cuda")

    def words(self, mine: list[int], last: Tensor, *, when: str) -> list[list[int]]:
        """As many int64 words of every rank, by rank.

        last: a word, (1,), that the host does not know; on `device`.
        """
        on = self.device
        found = list(torch.empty(self.size, len(mine) + 1, dtype=torch.int64, device=on))
        with _told(when):
            sent = torch.cat([torch.tensor(mine, dtype=torch.int64).to(on), last])
            dist.all_gather(found, sent, group=self.group)
        by_rank = torch.stack(found)
        self.settle(on, when=when)
        return by_rank.tolist()

    def to_all(self, mine: Tensor, received: Sequence[Tensor], *, when: str) -> list[Tensor]:
        """Each rank's tensor on every rank, by rank; received: where the others' go, of whatever sizes.

        One group of sends and receipts, which NCCL runs as one kernel: nothing is padded to the largest. Not yet there
        when this returns: see `settle`.
        """
        by_rank = [mine if rank == self.rank else each for rank, each in enumerate(received)]
        operations = []
        for rank, each in enumerate(by_rank):
            if rank != self.rank:
                operations += [dist.P2POp(dist.isend, mine, group=self.group, group_peer=rank)] * bool(mine.numel())
                operations += [dist.P2POp(dist.irecv, each, group=self.group, group_peer=rank)] * bool(each.numel())
        with _told(when):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return by_rank

    def add_up(self, tensors: Sequence[Tensor], *, when: str) -> list[Tensor]:
        """The sum of each over all ranks, by one reduction for each dtype. Not yet there then, as in `to_all`."""
        summed: dict[int, Tensor] = {}
        for dtype in sorted({each.dtype for each in tensors}, key=str):
            of = [index for index, each in enumerate(tensors) if each.dtype == dtype]
            flat = torch.cat([tensors[index].reshape(-1) for index in of])
            with _told(when):
                dist.all_reduce(flat, group=self.group)
            pieces = flat.split([tensors[index].numel() for index in of])
            summed |= {index: piece.view(tensors[index].shape) for index, piece in zip(of, pieces, strict=True)}
        return [summed[index] for index in range(len(tensors))]

    def settle(self, at: torch.device, *, when: str) -> None:
        """Waits until the current stream has what was exchanged. Raises, and aborts NCCL, after 0.9 of the timeout.

        Not later: at the timeout, torch's watchdog decides to end the process. Call it last: what was launched before
        runs while the host waits. gloo has waited already.
        """
        if at.type != "cuda":
            return
        timeout = self.group._get_backend(at).options._timeout  # NCCL's own: gloo beside it waits for longer
        done, limit, begin = torch.cuda.Event(), 0.9 * float(timeout.total_seconds()), time.monotonic()
        with _told(when):
            done.record()
            waited = 0.0
            while not done.query():
                if waited > limit:  # by a clock that was read before: a process may be stopped, and go on
                    _, absent = _within(1.5, self._abort, self._absent)
                    from_whom = f" from rank {absent} of the group" if absent else ""
                    raise RuntimeError(f"no answer within {limit:.1f} s{from_whom}")
                waited = time.monotonic() - begin
                if waited > _SPINS:
                    time.sleep(1e-4)

    def _abort(self) -> None:
        """Ends NCCL's kernels, so that the process can use its GPU, and leave. The group is of no use any more."""
        self.group._get_backend(torch.device("cuda")).abort()

    def _absent(self) -> str:
        """Ranks that did not come to wait for the others: all that do tell the store, at about the same time."""
        store = dist.distributed_c10d._get_process_group_store(self.group)
        store.set(f"{_CAME}{self.rank}", "")
        time.sleep(1.0)
        return ", ".join(str(rank) for rank in range(self.size) if not store.check([f"{_CAME}{rank}"]))


_SPINS, _CAME = 0.05, "hf_vit_accel/gave_up/"
"""Seconds until a wait is long enough to sleep in between; keys of ranks in a group's store."""


def _within(seconds: float, *acts: Callable[[], Any]) -> list[Any]:
    """What they return, all begun at once; None where one fails or hangs, for what it needs may be dead."""
    found: list[Any] = [None] * len(acts)

    def tried(index: int) -> None:
        with suppress(Exception):
            found[index] = acts[index]()

    threads = [threading.Thread(target=tried, args=(index,), daemon=True) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return found


@contextmanager
def _told(when: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch.distributed's own are of this class
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


def ranks_of(wanted: Any) -> Ranks | None:
    """The ranks that `patch(data_parallel=...)` means; None for none, or this one alone. ValueError for no group."""
    if wanted is False:
        return None
    expected = "expected data_parallel to be False, True, a process group or a device mesh of one dimension"
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{expected}, with torch.distributed initialised; call init_process_group first, under torchrun"
        )
    group: Any = dist.group.WORLD if wanted is True else wanted
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"{expected}, got a mesh of {group.ndim}; pass one of them, such as mesh['tp']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{expected}, got {wanted!r}")
    ranks = Ranks(group)
    return ranks if ranks.size > 1 else None
