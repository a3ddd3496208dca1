"""Test what the other ranks of `data_parallel` do when one rank fails, differs or is gone."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from support.faults import raises
from support.ranks import MIXED, OnRanks, loss_of
from tiny import TINY, assert_close, pixels_for, run_tower, tower_of

import hf_vit_accel
from hf_vit_accel import RankError, machine
from hf_vit_accel.options import passes
from hf_vit_accel.tower.state import state_of


class RankFailure(RuntimeError):
    """The error that a rank raises in these tests."""


def check_errors(rank: int) -> None:
    tower = tower_of(TINY["qwen2_vl"].build())
    expected = run_tower(tower, MIXED)
    hf_vit_accel.patch(tower, data_parallel=True)
    encode = passes.encode
    out_of_memory = torch.OutOfMemoryError("Tried to allocate 20 GiB")
    assert_close(run_tower(tower, MIXED), expected)
    for error, on_others in ((RankFailure("no such pixel, ∅"), RankError), (out_of_memory, torch.OutOfMemoryError)):
        for failing_rank in range(3):
            if rank == failing_rank:
                passes.encode = raises(error)
                with pytest.raises(type(error)) as caught:
                    run_tower(tower, MIXED)
                assert caught.value is error
                passes.encode = encode
            else:
                with pytest.raises(on_others) as caught:
                    run_tower(tower, MIXED)
                assert str(caught.value) == f"rank {failing_rank} of the group failed: {type(error).__name__}: {error}"
            assert_close(run_tower(tower, MIXED), expected)


def check_fault(rank: int) -> None:
    tower = tower_of(TINY["qwen2_vl"].build())
    expected = run_tower(tower, MIXED)
    hf_vit_accel.patch(tower, data_parallel=True)
    encode = passes.encode

    def fail_once(*_: object, **__: object) -> NoReturn:
        passes.encode = encode
        raise machine.Fault("kernels", RankFailure("no compiler")) from RankFailure("no compiler")

    assert_close(run_tower(tower, MIXED), expected)
    if rank == 1:
        passes.encode = fail_once
    for _ in range(2):
        assert_close(run_tower(tower, MIXED), expected)
        assert state_of(tower).faults.keys() == ({"kernels"} if rank == 1 else set())


def check_memory_in_backward(rank: int) -> None:
    """The rank without memory raises. The others wait for its gradients until the timeout of the group."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=3))
    tower = tower_of(TINY["qwen2_vl"].build().train())
    hf_vit_accel.patch(tower, data_parallel=group)
    encode = passes.encode
    error = torch.OutOfMemoryError("Tried to allocate 20 GiB")

    def encode_and_fail_in_backward(*args: object, **options: object) -> list[torch.Tensor]:
        outputs = encode(*args, **options)
        outputs[-1].register_hook(raises(error))
        return outputs

    if rank == 1:
        passes.encode = encode_and_fail_in_backward
    loss = loss_of(tower, pixels_for(tower, MIXED), MIXED)
    start = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else RankError) as caught:
        loss.backward()
    assert time.monotonic() - start < 5
    assert rank == 1 or "could not be reached" in str(caught.value)
    dist.destroy_process_group()


def check_calls_that_differ(rank: int) -> None:
    model = TINY["qwen3_vl"].build()
    tower = tower_of(model)
    expected = run_tower(tower, MIXED)

    def call_in_another_order() -> None:
        run_tower(tower, MIXED[::-1] if rank == 1 else MIXED)

    def call_with_fewer_images() -> None:
        run_tower(tower, MIXED[1:] if rank == 1 else MIXED)

    def call_with_gradients() -> None:
        with torch.set_grad_enabled(rank == 1):
            tower(pixels_for(tower, MIXED), grid_thw=torch.tensor(MIXED))

    for call, difference in (
        (call_in_another_order, "grid_thw"),
        (call_with_fewer_images, "grid_thw"),
        (call_with_gradients, "gradients"),
    ):
        hf_vit_accel.patch(model, data_parallel=True)
        refusal = f"the same call on every rank .{difference}.*got another on 1 of the group"
        with pytest.raises(RankError, match=refusal):
            call()
        assert state_of(tower).fast_calls <= 1
        hf_vit_accel.patch(model, data_parallel=True)
        assert_close(run_tower(tower, MIXED), expected)


def check_refused_call_on_one_rank(rank: int) -> None:
    """A call that its rank refuses before it is shared keeps nobody waiting, and counts for nobody."""
    tower = tower_of(TINY["qwen3_vl"].build())
    expected = run_tower(tower, MIXED)
    hf_vit_accel.patch(tower, data_parallel=True, strict=True)
    if rank == 1:
        with pytest.raises(ValueError, match="multiples of the merge size"):
            run_tower(tower, [(1, 3, 3)])
    assert_close(run_tower(tower, MIXED), expected)


def check_dead_rank(rank: int) -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=3))
    tower = tower_of(TINY["qwen2_vl"].build())
    hf_vit_accel.patch(tower, data_parallel=group)
    run_tower(tower, MIXED)
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RankError, match="the other ranks could not be reached"):
        run_tower(tower, MIXED)
    assert time.monotonic() - start < 5
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "check",
    [
        check_errors,
        check_fault,
        check_memory_in_backward,
        check_calls_that_differ,
        check_refused_call_on_one_rank,
        check_dead_rank,
    ],
)
def test_three_ranks(on_ranks: OnRanks, check: Callable[[int], None]) -> None:
    on_ranks(check, 3)
