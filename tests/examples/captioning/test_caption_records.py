"""Records on disk: written, torn, rewritten, selected and exported; plans of what lacks one."""

import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from captioner.batches import Bounds, pack, share
from captioner.items import Item
from captioner.journal import Journal, Record, json_lines
from captioner.plan import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from support_captioning import export, record_of

NAMES = st.text(
    st.characters(exclude_categories=()) | st.sampled_from('\n\r\0\u2028\x85\udcff"\\'), min_size=1, max_size=8
).filter(lambda name: json.loads(json.dumps(name)) == name)
"""Any code points, with line ends, U+2028 and lone surrogates. Only two that are no longer lone JSON cannot hold."""


RECORDS = st.lists(
    st.builds(
        Record,
        key=NAMES,
        prompt=NAMES,
        status=st.sampled_from(["ok", "error"]),
        caption=st.none() | NAMES,
        error=st.none() | NAMES,
        width=st.none() | st.integers(0, 1 << 40),
        run=st.just("r"),
    ),
    max_size=6,
)


def newest(records: Iterable[Record]) -> list[Record]:
    """Return one record of every picture and prompt: the newest one."""
    return list({(record.run, record.key, record.prompt): record for record in records}.values())


@given(st.lists(RECORDS, max_size=4))
def test_records_come_back_as_they_were(starts: list[list[Record]]) -> None:
    """Of a picture and prompt the last record counts, and one that is outdated ends those before it."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        for journal.start, records in enumerate(starts):
            for record in records:
                journal.append(3 - journal.start, [record])
        written = newest(itertools.chain(*starts))
        assert journal.records() == written
        journal.note({"run": "r", "prompts": list({record.prompt for record in written})})
        export(journal.select().records, Path(folder) / "merged.jsonl")
        lines = (Path(folder) / "merged.jsonl").read_bytes().split(b"\n")[:-1]
        assert [json.loads(line) for line in lines] == [asdict(record) for record in journal.select().records]
        journal.start += 1
        journal.append(0, [replace(record, status="outdated", caption=None) for record in written[::2]])
        assert journal.records() == written[1::2]
        journal.append(0, written[:1])
        assert set(journal.records()) == {*written[:1], *written[1::2]}


def test_a_cut_at_any_byte_loses_no_other_record(tmp_path: Path) -> None:
    records = [record_of(key) for key in ("a", "z\u2028é\n\udcff")]
    journal = Journal(tmp_path)
    journal.append(0, records)
    journal.append(1, [record_of("other")])
    shard, _ = journal.shards()
    content = shard.read_bytes()
    ends = [index for index, byte in enumerate(content) if byte == 10]
    assert len(ends) == 2
    for cut in range(len(content) + 1):
        shard.write_bytes(content[:cut])
        complete = sum(end < cut for end in ends)
        assert journal.records() == [*records[:complete], record_of("other")]
    shard.write_bytes(content[:-1])
    Journal(tmp_path, 1).append(0, records[-1:])  # the next start has a shard of its own
    assert Counter(journal.records()) == Counter([*records, record_of("other")])


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(0, [record_of("a")])
    with journal.shards()[0].open("ab") as file:
        file.write(b'{"key": "torn\n[]\n5\nnull\n"key"\n\n{}\n\0\0\0\n\xff\xfe\n{"key": "a", "prompt": "b"}\n')
    journal.append(0, [record_of("b")])
    assert journal.records() == [record_of("a"), record_of("b")]


def test_shards_of_earlier_versions_come_first(tmp_path: Path) -> None:
    for process in range(3):
        Journal(tmp_path, 1).append(process, [record_of(f"{process}", caption="new")])
        (tmp_path / f"captions-{process:05d}.jsonl").write_bytes(json_lines([record_of(f"{process}", caption="old")]))
    assert {record.caption for record in Journal(tmp_path).records()} == {"new"}
    former = {"key": "a.png", "prompt": "p", "status": "ok", "caption": "c", "error": None, "run": "r"}
    (tmp_path / "captions-00000.jsonl").write_text(json.dumps(former) + "\n")
    record = Journal(tmp_path).records()[0]
    assert (record.key, record.caption, record.asked) == ("a.png", "c", None), "they lack newer fields"


def test_merged_records_become_a_table(tmp_path: Path) -> None:
    """As docs/captioning.md says."""
    read_json = pytest.importorskip("pyarrow.json").read_json
    records = [record_of("ä", width=5), replace(record_of("b"), status="error", caption=None, error="no\n")]
    export(records, tmp_path / "out.jsonl")
    rows = read_json(tmp_path / "out.jsonl").to_pylist()
    assert rows == [asdict(record) for record in records]


@pytest.mark.parametrize("keys", [["../a.jpg"], ["/a.jpg"], ["x.parquet#0", "x.parquet#1"], ["../../a.jpg", "b\0.jpg"]])
@pytest.mark.parametrize("source", [None, "x.tar"])
def test_export_writes_no_text_that_is_not_beside_its_picture(
    tmp_path: Path, keys: list[str], source: str | None
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jpg").touch()
    done = export([record_of(key, source=source) for key in keys], tmp_path / "folder")
    assert len(done.absent) + len(done.refused) == len(keys) and not done.written
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.jpg", "folder"]


# --- which items of a run have no record that holds -------------------------------------------------------------------


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


@settings(max_examples=30)
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
