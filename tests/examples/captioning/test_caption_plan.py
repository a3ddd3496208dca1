"""Plans: which items of a run have no record that holds."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
