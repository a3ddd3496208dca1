"""Batches: sizes from headers, costs, shares of processes, budgets, halves."""

import itertools
from collections import Counter
from typing import Any

import pytest
from captioner.batches import Bounds, Task, pack, share
from captioner.processors import load_processor, vision_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from programs import CAPTIONERS
from support_captioning import FAMILIES, named_task
from transformers import ProcessorMixin


@given(st.lists(st.integers(0, 1_000_000), max_size=60), st.integers(1, 9))
def test_shares_are_even(tokens: list[int], processes: int) -> None:
    tasks = [named_task(str(index), number) for index, number in enumerate(tokens)]
    shares = [share(tasks, process, processes) for process in range(processes)]
    assert Counter(itertools.chain(*shares)) == Counter(tasks)
    loads = [sum(task.tokens for task in part) for part in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)


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
    batches = list(pack(tasks, Bounds(items=most_items, tokens=most_tokens)))
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


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 60_000))
def test_pack_keeps_the_memory_of_rows(tokens: list[int], nbytes: int) -> None:
    """Every row of a batch has the slots of its picture and prompt, a quarter more at most, and its pixels."""
    tasks = [named_task(str(index), number) for index, number in enumerate(tokens)]
    bounds = Bounds(items=99, tokens=1 << 40, nbytes=nbytes, slot_bytes=8, token_bytes=3, new_tokens=5)
    batches = list(pack(tasks, bounds))
    assert Counter(itertools.chain(*batches)) == Counter(tasks)
    for batch in batches:
        memory = 10 * len(batch) * (256 + 5) + 13 * sum(task.tokens for task in batch)
        assert len(batch) == 1 or memory <= nbytes


@pytest.fixture(scope="module", params=list(FAMILIES))
def processor(request: pytest.FixtureRequest) -> Any:
    return load_processor(str(CAPTIONERS / request.param))


@settings(max_examples=25)
@given(width=st.integers(1, 900), height=st.integers(1, 900))
def test_vision_tokens_are_the_processors(processor: ProcessorMixin, width: int, height: int) -> None:
    images = processor.image_processor
    picture = Image.new("RGB", (width, height))
    try:
        grid = images(picture, return_tensors="pt")["image_grid_thw"][0]
    except ValueError:
        assert max(width, height) > 200 * min(width, height)
        with pytest.raises(ValueError):
            vision_tokens(processor, width, height)
    else:
        assert vision_tokens(processor, width, height) == int(grid.prod()) // images.merge_size**2
