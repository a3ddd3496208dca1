"""Test `every_rank` on several GPUs, which NCCL connects."""

from pathlib import Path

import pytest
from support.every_rank import check_evaluation, check_training
from support.ranks import run_on_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_fifty_steps(family: str, wrapper: str, tmp_path: Path) -> None:
    run_on_gpus(check_training, 2, tmp_path, 2, family, wrapper, "all weights", 50)


@pytest.mark.parametrize("variant", ["frozen tower", "checkpointed", "lora", "accumulated"])
def test_variants_of_training(variant: str, tmp_path: Path) -> None:
    run_on_gpus(check_training, 2, tmp_path, 2, "qwen3_vl", "fsdp", variant, 6)


def test_sharded_models_are_evaluated(tmp_path: Path) -> None:
    run_on_gpus(check_evaluation, 2, tmp_path, 2, "qwen3_vl")
