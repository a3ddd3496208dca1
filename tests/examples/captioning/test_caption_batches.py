"""Batches: sizes from headers, costs, shares of processes, budgets, halves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from captioner.batches import Task, cost, halve_on_oom, pack, spread
from captioner.processors import load_processor, vision_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from programs import CAPTIONERS
from support_captioning import FAMILIES, named_task
from transformers import ProcessorMixin


@given(st.lists(st.integers(0, 1_000_000), max_size=60), st.integers(1, 9))
def test_spread_shares_everything_out_evenly(costs: list[int], processes: int) -> None:
    shares = spread(costs, processes)
    assert len(shares) == processes and sorted(itertools.chain(*shares)) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    mean = sum(costs) / processes
    assert max(loads) <= mean + max(costs, default=0) * (1 - 1 / processes) + 1e-6
    for share in shares:
        assert [costs[index] for index in share] == sorted((costs[index] for index in share), reverse=True)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_spread_is_a_third_above_the_best_at_most(costs: list[int], processes: int) -> None:
    def largest_load(shares: Sequence[Sequence[int]]) -> int:
        return max(sum(costs[index] for index in share) for share in shares)

    best_load = sum(costs)
    for owners in itertools.product(range(processes), repeat=len(costs)):
        shares = [[index for index, owner in enumerate(owners) if owner == process] for process in range(processes)]
        best_load = min(best_load, largest_load(shares))
    assert largest_load(spread(costs, processes)) <= (4 / 3 - 1 / (3 * processes)) * best_load + 1e-9


TASKS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([("a",), ("b",), ("a", "b")]), st.booleans()), max_size=40
).map(
    lambda rows: [
        named_task(str(index), tokens, prompts, kind="video" if video else "image")
        for index, (tokens, prompts, video) in enumerate(rows)
    ]
)


@given(TASKS, st.integers(1, 80), st.integers(1, 6))
def test_pack_keeps_budgets(tasks: list[Task], most_tokens: int, most_items: int) -> None:
    batches = list(pack(tasks, most_tokens, most_items))
    assert Counter(itertools.chain(*batches)) == Counter(tasks)
    for batch in batches:
        assert len({task.prompts for task in batch}) == 1
        assert len(batch) == 1 or not any(task.item.kind == "video" for task in batch)
        assert len(batch) == 1 or sum(task.tokens for task in batch) <= most_tokens
        assert len(batch) <= most_items
        assert [task.tokens for task in batch] == sorted((task.tokens for task in batch), reverse=True)
    for before, after in itertools.pairwise(batches):
        if before[0].prompts == after[0].prompts:
            assert before[-1].tokens >= after[0].tokens  # longest first
            if not any(task.item.kind == "video" for task in (*before, after[0])):  # and no batch smaller than need be
                tokens = sum(task.tokens for task in before) + after[0].tokens
                assert tokens > most_tokens or len(before) == most_items


@pytest.fixture(scope="module", params=list(FAMILIES))
def processor(request: pytest.FixtureRequest) -> Any:
    return load_processor(str(CAPTIONERS / request.param))


@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 900), height=st.integers(1, 900))
def test_vision_tokens_are_the_processors(processor: ProcessorMixin, width: int, height: int) -> None:
    images = processor.image_processor
    picture = Image.new("RGB", (width, height))
    try:
        grid = images(picture, return_tensors="pt")["image_grid_thw"][0]
    except ValueError:
        assert max(width, height) > 200 * min(width, height) and vision_tokens(processor, width, height) == 0
    else:
        assert vision_tokens(processor, width, height) == int(grid.prod()) // images.merge_size**2


def test_cost_grows_with_tokens_prompts_and_new_tokens() -> None:
    base = cost(named_task("a", 100), 10)
    assert cost(named_task("a", 200), 10) > 2 * (base - cost(named_task("a", 0), 10)) > 0
    assert cost(named_task("a", 100, ("a", "b")), 10) > base < cost(named_task("a", 100), 20)


def test_halves_keep_the_order() -> None:
    def run(rows: Sequence[int]) -> list[int]:
        if len(rows) > 3 or 7 in rows:
            raise torch.OutOfMemoryError
        return [row * 2 for row in rows]

    results = halve_on_oom(run, list(range(20)))
    assert [row for row in results if isinstance(row, int)] == [2 * row for row in range(20) if row != 7]
    assert isinstance(results[7], torch.OutOfMemoryError) and results[7].__traceback__ is None
