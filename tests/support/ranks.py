"""Run a check on several ranks: forked processes that gloo connects, which inherit what the test has made."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from hf_vit_accel.sharing import data_parallel


def _run_rank(rank: int, check: Callable[..., None], size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    check(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(check: Callable[..., None], size: int, folder: Path, *arguments: Any) -> None:
    """Call check(rank, *arguments) in as many processes; raise what one of them raises.

    Args:
        check: a function at the top of a file.
        size: how many ranks there are.
        folder: an empty folder, in which the ranks find each other.
        arguments: what the check gets beside its rank.
    """
    if torch.cuda.is_initialized():
        pytest.skip("a process that uses CUDA cannot be forked")
    start_processes(_run_rank, (check, size, str(folder), arguments), nprocs=size, start_method="fork")


def share_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks share every call, however small."""
    monkeypatch.setattr(data_parallel, "LEAST", dict.fromkeys(data_parallel.LEAST, 1e-9))
