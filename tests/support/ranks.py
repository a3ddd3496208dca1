"""Run a check on several ranks: forked processes that gloo connects, which inherit the objects of the test."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import TINY, outputs_of
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

import hf_vit_accel
from hf_vit_accel.options import data_parallel

Grid = list[tuple[int, int, int]]
MIXED: Grid = [(1, 4, 6), (2, 6, 4), (1, 2, 12), (1, 8, 8)]
"""Images and videos of several sizes."""
OnRanks = Callable[..., None]
"""A function (check, number of ranks, arguments of the check)."""
RANKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose towers ranks share in tests."""


def _run_rank(
    rank: int, check: Callable[..., None], size: int, folder: str, arguments: tuple[object, ...], backend: str = "gloo"
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False  # stock's convolution would round its inputs
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    check(rank, *arguments)
    if dist.is_initialized():  # a check that ends ranks, or loses them, destroys the group itself
        dist.barrier()
        dist.destroy_process_group()


def run_on_ranks(check: Callable[..., None], size: int, folder: Path, *arguments: object) -> None:
    """Call check(rank, *arguments) in as many processes, which meet in an empty folder; raise the error of any."""
    if torch.cuda.is_initialized():
        pytest.skip("a process that uses CUDA cannot be forked")
    try:
        start_processes(_run_rank, (check, size, str(folder), arguments), nprocs=size, start_method="fork")
    except ProcessRaisedException as error:
        if torch.cuda.is_available() and "Autograd-and-Fork" in str(error):
            pytest.skip("a process whose autograd has threads for CUDA devices cannot be forked")
        raise


def run_on_gpus(check: Callable[..., None], size: int, folder: Path, *arguments: object) -> None:
    """Call check(rank, *arguments) in new processes that NCCL connects, each with a GPU of its own."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    start_processes(_run_rank, (check, size, str(folder), arguments, "nccl"), nprocs=size, start_method="spawn")


def share_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks share every call, however small."""
    monkeypatch.setattr(data_parallel, "LEAST", 1)


@cache
def prove_towers() -> None:
    """Prove the towers of RANKED once, so that forked processes inherit the proofs."""
    for family in RANKED:
        hf_vit_accel.patch(TINY[family].build())


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> OnRanks:
    """Let ranks share every call; return a function that runs check(rank, *arguments) on a number of ranks."""
    prove_towers()
    share_small_calls(monkeypatch)

    def run(check: Callable[..., None], size: int, *arguments: object) -> None:
        run_on_ranks(check, size, folder, *arguments)
        assert not dist.is_initialized()

    return run


def sharing_of(model: nn.Module) -> str | None:
    """Return what `status` reports about ranks."""
    return hf_vit_accel.status(model).towers[0].ranks


def loss_of(tower: nn.Module, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a loss that depends on all outputs of a call."""
    outputs = outputs_of(tower(pixels, grid_thw=torch.tensor(grid)))
    return torch.stack([output.square().mean() for output in outputs]).sum()
