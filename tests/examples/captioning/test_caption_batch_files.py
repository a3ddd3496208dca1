"""The parquet files of a cluster: any record, written twice, folded, torn, rewritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from captioner.journal import Batches, Journal, Record
from captioner.plan import Plan
from hypothesis import given
from hypothesis import strategies as st
from support_captioning import (
    counted,
    record_of,
)

pytest.importorskip("pyarrow")


@given(
    st.lists(
        st.builds(
            Record,
            key=st.text(st.characters(), max_size=8),
            prompt=st.text(max_size=4),
            status=st.sampled_from(["ok", "error"]),
            caption=st.none() | st.text(max_size=8),
            width=st.none() | st.integers(0, 1 << 40),
            source=st.none() | st.sampled_from(["a.tar", "latin\udce9", "latin\\udce9"]),
        ),
        max_size=4,
    )
)
def test_parquet_holds_any_record(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    output = tmp_path_factory.mktemp("o")
    batches = Batches.new(output)
    batches.append(3, records)
    assert batches.read(3) == list(Journal(output).records()) == records and batches.read(4) is None
    batches.fold()
    assert list(Journal(output).records()) == records and not batches.folder.exists()


def test_a_batch_that_is_written_twice_is_there_once(tmp_path: Path) -> None:
    batches = Batches.new(tmp_path)
    for number in (0, 1, 0, 0):
        batches.append(number, [record_of(f"{number}a"), record_of(f"{number}b")])
    assert counted(tmp_path) == {record_of(key): 1 for key in ("0a", "0b", "1a", "1b")}


def test_a_fold_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches.new(tmp_path)
    for number in range(3):
        batches.append(number, [record_of(f"{number}")])
    expected = counted(tmp_path)
    for module, name in (("captioner.records", "Path.replace"), ("captioner.journal", "shutil.rmtree")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.{name}", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                batches.fold()
        assert counted(tmp_path) == expected
    assert batches.file.exists() and batches.folder.exists()
    Journal(tmp_path).repair()
    assert counted(tmp_path) == expected and not batches.folder.exists()
    assert Batches.new(tmp_path).folder.name == "captions-ray-00001"


def test_files_that_a_kill_tore_hold_no_records(tmp_path: Path) -> None:
    batches = Batches.new(tmp_path)
    batches.append(0, [record_of("a")])
    (batches.folder / ".0123.part").write_bytes((batches.folder / "00000000.parquet").read_bytes()[:50])
    assert counted(tmp_path) == {record_of("a"): 1}
    Journal(tmp_path).repair()
    assert counted(tmp_path) == {record_of("a"): 1}


def test_records_in_parquet_are_rewritten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        name = f"{number}"
        records = [
            record_of(name, checksum="c", stamp="old"),
            record_of("both", caption=name),
            record_of("no", caption=None),
        ]
        Batches.new(tmp_path).append(0, records[: 3 if number < 2 else 1])
    journal.append(0, [record_of("both", caption="of lines")])
    plan = Plan(stale={("both", "p"), ("1", "p"), ("no", "p")}, stamps={"0": "new"})
    journal.repair()
    untouched = (tmp_path / "captions-ray-00002.parquet").stat().st_ino
    journal.begin({"run": "r"}, lambda record: plan.revised("r", record))
    remaining = {record_of("0", checksum="c", stamp="new"): 1, record_of("2", checksum="c", stamp="old"): 1}
    assert counted(tmp_path) == remaining and journal.newest()["run"] == "r"
    aside = [json.loads(line)["caption"] for line in (tmp_path / "superseded.jsonl").read_text().splitlines()]
    assert aside == ["of lines", "0", "caption of 1", "1"]
    assert (tmp_path / "captions-ray-00002.parquet").stat().st_ino == untouched
    other_plan = Plan(stale={("0", "p")})
    journal.begin({"run": "other"}, lambda record: other_plan.revised("other", record))
    assert counted(tmp_path) == remaining
    journal.note({"run": "third"}, instead=True)
    assert [entry["run"] for entry in journal.manifest()["runs"]] == ["r", "third"]
    journal.rewrite(lambda record: None)
    assert not counted(tmp_path) and len(list(tmp_path.glob("captions-ray-*.parquet"))) == 3


def test_files_of_other_names_are_no_records(tmp_path: Path) -> None:
    Batches.new(tmp_path).append(0, [record_of("a")])
    for name in ("captions-ray-mine.parquet", "captions.parquet"):
        (tmp_path / name).write_bytes(b"no table")
    assert counted(tmp_path) == {record_of("a"): 1}
