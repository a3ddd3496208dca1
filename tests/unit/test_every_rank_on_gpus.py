"""Test `every_rank` on two GPUs, which NCCL connects."""

from pathlib import Path

import pytest
from support.every_rank import check_evaluation, check_training
from support.ranks import run_on_gpus

pytestmark = pytest.mark.gpu


def check_fifty_steps(rank: int) -> None:
    """Train with FSDP2 and DDP, both families, in the same processes: a new process takes longer than the training."""
    for family in ("qwen2_5_vl", "qwen3_vl"):
        for wrapper in ("fsdp", "ddp"):
            check_training(rank, 2, family, wrapper, "all weights", 50)


def check_variants(rank: int) -> None:
    for variant in ("frozen tower", "checkpointed", "lora", "accumulated"):
        check_training(rank, 2, "qwen3_vl", "fsdp", variant, 6)
    check_evaluation(rank, 2, "qwen3_vl")


def test_fifty_steps(tmp_path: Path) -> None:
    run_on_gpus(check_fifty_steps, 2, tmp_path)


def test_variants(tmp_path: Path) -> None:
    run_on_gpus(check_variants, 2, tmp_path)
