"""Records on disk: written, torn, rewritten, selected and exported."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from captioner.journal import Journal, Record
from hypothesis import given
from hypothesis import strategies as st
from support_captioning import counted, export, record_of

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
    """Return one record of every picture and prompt: the newest one, since a cluster may write twice."""
    return list({(record.run, record.key, record.prompt): record for record in records}.values())


@given(st.lists(RECORDS, max_size=4))
def test_records_come_back_as_they_were(shards: list[list[Record]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        for number, records in enumerate(shards):
            for record in records:
                journal.append(number, [record])
        assert list(journal.records()) == newest(itertools.chain(*shards))
        journal.repair()
        journal.rewrite(lambda record: record)
        assert list(journal.records()) == newest(itertools.chain(*shards))
        # A file of merged records holds the same values, as lines of JSON.
        journal.note({"run": "r"})
        merged = journal.merged("r")
        export(merged, Path(folder) / "merged.jsonl")
        lines = (Path(folder) / "merged.jsonl").read_bytes().split(b"\n")[:-1]
        assert [json.loads(line) for line in lines] == [asdict(record) for record in merged]


def test_a_cut_at_any_byte_loses_no_other_record(tmp_path: Path) -> None:
    records = [record_of(key) for key in ("a", "z\u2028é", "b\n\udcff", "c")]
    journal = Journal(tmp_path)
    journal.append(0, records)
    journal.append(1, [record_of("other")])
    shard, _ = journal.shards()
    content = shard.read_bytes()
    ends = [index for index, byte in enumerate(content) if byte == 10]
    assert len(ends) == 4
    for cut in range(len(content) + 1):
        shard.write_bytes(content[:cut])
        complete = sum(end < cut for end in ends)
        assert list(journal.records()) == [*records[:complete], record_of("other")]  # even before it is repaired
        journal.repair()
        assert shard.read_bytes() == content[: ends[complete - 1] + 1 if complete else 0]
        journal.append(0, records[complete:])
        assert shard.read_bytes() == content


@pytest.mark.parametrize("length", [65535, 65536, 65537, 200_000])
def test_torn_lines_of_any_length_are_cut_off(tmp_path: Path, length: int) -> None:
    journal = Journal(tmp_path)
    for complete in ([], [record_of("a")], [record_of("a" * 70_000), record_of("b")]):
        for shard in journal.shards():
            shard.unlink()
        journal.append(3, complete)
        with (tmp_path / "captions-00003.jsonl").open("ab") as file:
            file.write(b"x" * length)
        journal.append(7, [record_of("of another process")])
        journal.repair()
        assert list(journal.records()) == [*complete, record_of("of another process")]
        assert b"x" * length not in (tmp_path / "captions-00003.jsonl").read_bytes()


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(0, [record_of("a")])
    with (tmp_path / "captions-00000.jsonl").open("ab") as file:
        file.write(b'{"key": "torn\n[]\n5\nnull\n"key"\n\n{}\n\0\0\0\n\xff\xfe\n{"key": "a", "prompt": "b"}\n')
    journal.append(0, [record_of("b")])
    journal.repair()
    assert list(journal.records()) == [record_of("a"), record_of("b")]


@given(RECORDS, st.sets(NAMES))
def test_rewrite_moves_removed_captions_aside(records: list[Record], stale: set[str]) -> None:
    stale |= {record.key for record in records[::2]}
    stale -= {"other"}
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        journal.append(0, records)
        journal.append(1, [record_of("other")])
        other = (Path(folder) / "captions-00001.jsonl").stat()
        journal.rewrite(lambda record: None if record.key in stale else record)
        expected = [record for record in [*records, record_of("other")] if record.key not in stale]
        assert list(journal.records()) == newest(expected)
        assert (Path(folder) / "captions-00001.jsonl").stat().st_ino == other.st_ino
        aside = Path(folder) / "superseded.jsonl"
        removed = [record for record in records if record.key in stale and record.caption]
        assert len(aside.read_bytes().split(b"\n")[:-1] if aside.exists() else []) == len(removed)


def test_merged_is_of_one_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(0, [record_of("b", run="new"), record_of("a", run="old"), record_of("a", "q", run="new")])
    journal.append(5, [record_of("a", run="new"), record_of("c", run="old")])
    for run in ("old", "new"):
        journal.note({"run": run})
    assert [(record.key, record.prompt) for record in journal.merged()] == [("a", "p"), ("a", "q"), ("b", "p")]
    assert journal.merged() == journal.merged("new")
    assert [record.key for record in journal.merged("old")] == ["a", "c"]
    journal.note({"run": "new", "prompts": ["q", "p"]})
    assert [(record.key, record.prompt) for record in journal.merged()] == [("a", "q"), ("a", "p"), ("b", "p")]
    journal.note({"run": "new", "prompts": ["q"]})
    selection = journal.select()
    assert [(record.key, record.prompt) for record in selection.records] == [("a", "q")]
    assert (selection.prompts, selection.runs) == (2, 2)
    assert len(journal.select(all_prompts=True).records) == 3 and journal.newest("old") == {"run": "old"}


def test_export_to_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [record_of("a\udcff", width=5), replace(record_of("b"), status="error", caption=None, error="no\n")]
    export(records, tmp_path / "sub" / "out.parquet")
    table = parquet.read_table(tmp_path / "sub" / "out.parquet")
    rows = [asdict(record) for record in records]
    rows[0] |= {"key": "a\\udcff", "caption": "caption of a\\udcff"}  # parquet's strings are valid UTF-8
    assert table.to_pylist() == rows
    export([], tmp_path / "empty.parquet")
    assert parquet.read_table(tmp_path / "empty.parquet").schema == table.schema


def test_export_beside_the_pictures(tmp_path: Path) -> None:
    bad = replace(record_of("b.jpg"), status="error", caption=None)
    for name in ("a.jpg", "b.jpg", "b.png", "sub/c.d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [("a.jpg", "p"), ("a.jpg", "q"), ("sub/c.d.png", "p"), ("b.png", "p")]
    records = [record_of(key, prompt, bytes=0) for key, prompt in names]
    export([*records[:2], bad, *records[2:]], tmp_path)
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.txt")}
    both = "caption of a.jpg\ncaption of a.jpg\n"
    assert texts == {"a.txt": both, "b.txt": "caption of b.png\n", "sub/c.d.txt": "caption of sub/c.d.png\n"}


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


def test_export_to_something_else(tmp_path: Path) -> None:
    for name in ("out.csv", "photos"):
        with pytest.raises(ValueError, match=rf"there is no folder .*{name}; names of files end in .*or \.tar"):
            export([record_of()], tmp_path / name)


def test_records_that_a_worker_wrote_twice_count_once(tmp_path: Path) -> None:
    """A node of a cluster that seemed dead may write its batch once more, into a shard of its own."""
    journal = Journal(tmp_path)
    shards = [journal.new_shard() for _ in range(3)]
    assert shards == [0, 1, 2]
    for shard, keys in zip(shards, ("ab", "bc", "a"), strict=True):
        journal.append(shard, [record_of(key) for key in keys])
    assert counted(tmp_path) == {record_of(key): 1 for key in "abc"}


def test_records_of_an_earlier_version_on_ray_are_refused_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "captions-ray-00000.parquet").touch()
    with pytest.raises(ValueError, match="merge them with that version"):
        list(Journal(tmp_path).records())
