"""Plans: which items of a run have no record that holds."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from captioner.batches import Bounds, pack, share
from captioner.items import Item
from captioner.journal import Journal, Record
from captioner.plan import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from support_captioning import record_of


def to_do(
    items: Sequence[Item], records: Sequence[Record], prompts: Sequence[str] = ("p",), **options: bool
) -> tuple[dict[str, list[str]], set[tuple[str, str]]]:
    """Return the prompts to caption by key, and the outdated records."""
    plan = make_plan(items, prompts, records, **options)
    outdated = {(record.key, record.prompt) for record in plan.updates if record.status == "outdated"}
    return {task.item.key: list(task.prompts) for task in plan.tasks}, outdated


@pytest.fixture
def files(tmp_path: Path) -> list[Item]:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"12345")
    return [Item(key=name, file=str(tmp_path / name)) for name in ("a.png", "b.png", "missing.png")]


def test_items_with_a_record_are_done(files: list[Item]) -> None:
    done = [record_of(key, bytes=5) for key in ("a.png", "b.png")] + [record_of("missing.png", bytes=None)]
    assert to_do(files, []) == ({"a.png": ["p"], "b.png": ["p"], "missing.png": ["p"]}, set())
    assert to_do(files, done) == ({}, set())
    assert to_do(files, done, ["p", "q"]) == ({item.key: ["q"] for item in files}, set())
    assert to_do(files[:1], done) == to_do([], done) == ({}, set())


def test_changed_files_are_done_again(files: list[Item]) -> None:
    done = [record_of("a.png", bytes=5), record_of("a.png", "q", bytes=4), record_of("b.png", bytes=None)]
    prompts_by_key, stale = to_do(files, done, ["p", "q"])
    assert prompts_by_key == {"a.png": ["q"], "b.png": ["p", "q"], "missing.png": ["p", "q"]}
    assert stale == {("a.png", "q"), ("b.png", "p")}  # b.png had no size, since it did not exist


def test_only_retried_errors_are_dropped(files: list[Item]) -> None:
    done = [replace(record_of(key, bytes=5), status="error") for key in ("a.png", "elsewhere.png")]
    done += [replace(record_of("a.png", "q", bytes=5), status="error"), record_of("b.png", bytes=5)]
    assert to_do(files[:2], done) == ({}, set())
    assert to_do(files[:2], done, retry_errors=True) == ({"a.png": ["p"]}, {("a.png", "p")})
    assert to_do(files[1:2], done, retry_errors=True) == ({}, set())


def test_a_mended_shard_has_no_error_any_more(tmp_path: Path) -> None:
    done = [
        replace(record_of("x.tar"), status="error"),
        record_of("x.tar/a.png", bytes=3),
        record_of("y.tar/a.png", bytes=9),
    ]
    damaged = [Item(key="x.tar", file="dir/x.tar", problem="damaged")]
    member = [Item(key="x.tar/a.png", file="dir/x.tar", offset=512, length=3, source="x.tar")]
    assert to_do(damaged + member, done) == ({}, set())
    assert to_do(member, done) == ({}, {("x.tar", "p")})


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_runs_killed_anywhere_add_up_to_one(data: st.DataObject) -> None:
    """With any number of processes, prompts and batch sizes, after kills at any byte of any shard."""
    items = [Item(key=f"item {index}", file="nowhere") for index in range(data.draw(st.integers(1, 12)))]
    prompts = ["p", "q\u2028", "r"][: data.draw(st.integers(1, 3))]
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        for journal.start, last in enumerate((False, False, False, True)):
            processes = data.draw(st.integers(1, 4))
            batch_size = data.draw(st.integers(1, 5))
            run_prompts = prompts if last else data.draw(st.lists(st.sampled_from(prompts), unique=True, min_size=1))
            plan = make_plan(items, run_prompts, journal.records())
            assert not plan.updates
            for process in range(processes):
                for batch in pack(share(plan.tasks, process, processes), Bounds(items=batch_size, tokens=1000)):
                    journal.append(process, [record_of(task.item.key, p) for task in batch for p in task.prompts])
                shard = Path(folder) / f"captions-{journal.start:05d}-{process:05d}.jsonl"
                if not last and shard.exists():
                    os.truncate(shard, data.draw(st.integers(0, shard.stat().st_size)))
        names = [(record.key, record.prompt) for record in journal.records()]
        assert Counter(names) == Counter((item.key, prompt) for item in items for prompt in prompts)
