"""The parts of `examples/batch_caption.py`: sources, decoding, batches, records on disk, worker, captioner."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import types
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
import pytest
import torch
import transformers
from captioning import captioner as captioner_module
from captioning.captioner import Caption, Captioner, reuse_for, takes_encoded
from captioning.exports import Export
from captioning.journal import Journal, Record
from captioning.plan import differences, make_plan
from captioning.progress import Counts, Progress, clear, read_counts, state, summary
from captioning.worker import Worker, decode
from hypothesis import given, settings
from hypothesis import strategies as st
from media import sources, tables
from media.batches import Task, cost, halve_on_oom, pack, spread
from media.checkpoints import checkpoint
from media.files import fingerprint, lock, replace_file
from media.items import Item, fields, open_item, size
from media.pictures import read_image, upright_size
from media.processors import load_processor, vision_tokens
from media.prompts import fill, named
from media.sources import Found
from packaging.version import Version
from PIL import Image, ImageFile, PngImagePlugin
from programs import EXAMPLES, draw, encode
from standins import alike
from support_captioning import batch_caption, write_tar

import hf_vit_accel

pytestmark = pytest.mark.filterwarnings("ignore::Warning:PIL")  # of damaged metadata, and of bombs
FAMILIES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32}  # the side of a merged token, in pixels
PROMPT = "describe this picture ."
NAMES = st.text(
    st.characters(exclude_categories=()) | st.sampled_from('\n\r\0\u2028\x85\udcff"\\'), min_size=1, max_size=8
).filter(lambda name: json.loads(json.dumps(name)) == name)
"""Any code points, with line ends, U+2028 and lone surrogates. Only two that are no longer lone JSON cannot hold."""


def find(inputs: list[str], **kwargs: Any) -> list[Item]:
    return look(inputs, **kwargs).items


def look(inputs: list[str], **kwargs: Any) -> Found:
    return sources.find(inputs, **kwargs)


def export(records: list[Record], path: Path, **options: Any) -> Export:
    """Of a run that found its pictures in `path`."""
    with tempfile.TemporaryDirectory() as folder:
        done = Export(Path(folder), {"root": str(path), "prompts": ["p", "q"]}, **options)
        done(records, path)
        return done


def named_task(key: str, tokens: int = 1, prompts: Sequence[str] = (PROMPT,), **kwargs: Any) -> Task:
    return Task(item=Item(key=key, file=key, **kwargs), prompts=tuple(prompts), tokens=tokens)


@pytest.fixture(scope="module")
def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))


# --- batches ---------------------------------------------------------------------------------------------------------


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
    def worst(assignment: Sequence[int]) -> int:
        return max(sum(c for c, p in zip(costs, assignment, strict=True) if p == q) for q in range(processes))

    best = min(map(worst, itertools.product(range(processes), repeat=len(costs))))
    found = max(sum(costs[index] for index in share) for share in spread(costs, processes))
    assert found <= (4 / 3 - 1 / (3 * processes)) * best + 1e-9


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
def processor(request: Any) -> Any:
    return load_processor(str(EXAMPLES / "tiny_captioner" / request.param))


@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 900), height=st.integers(1, 900))
def test_vision_tokens_are_the_processors(processor: Any, width: int, height: int) -> None:
    images, picture = processor.image_processor, Image.new("RGB", (width, height))
    try:
        grid = images(picture, return_tensors="pt")["image_grid_thw"][0]
    except ValueError:
        assert max(width, height) > 200 * min(width, height) and vision_tokens(processor, width, height) == 0
    else:
        assert vision_tokens(processor, width, height) == int(grid.prod()) // images.merge_size**2


def test_cost_grows_with_all_that_takes_time() -> None:
    base = cost(named_task("a", 100), 10)
    assert cost(named_task("a", 200), 10) > 2 * (base - cost(named_task("a", 0), 10)) > 0
    assert cost(named_task("a", 100, ("a", "b")), 10) > base < cost(named_task("a", 100), 20)


# --- records on disk -------------------------------------------------------------------------------------------------


def record(key: str = "a", prompt: str = "p", run: str = "r", **kwargs: Any) -> Record:
    return Record(key=key, prompt=prompt, status="ok", caption=f"caption of {key}", run=run, **kwargs)


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


@given(st.lists(RECORDS, max_size=4))
def test_records_come_back_as_they_were(shards: list[list[Record]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        for number, records in enumerate(shards):
            for each in records:
                journal.append(number, [each])
        assert list(journal.records()) == list(itertools.chain(*shards))
        journal.repair()
        journal.rewrite(lambda record: record)
        assert list(journal.records()) == list(itertools.chain(*shards))
        # The same from a file of merged records, which anyone may read as JSON, line by line.
        journal.note({"run": "r"})
        merged = journal.merged("r")
        export(merged, Path(folder) / "merged.jsonl")
        lines = (Path(folder) / "merged.jsonl").read_bytes().split(b"\n")[:-1]
        assert [json.loads(line) for line in lines] == [asdict(each) for each in merged]


def test_a_cut_at_any_byte_loses_no_other_record(tmp_path: Path) -> None:
    records = [record(key) for key in ("a", "z\u2028é", "b\n\udcff", "c")]
    journal = Journal(tmp_path)
    journal.append(0, records)
    journal.append(1, [record("other")])
    (shard, _), whole = journal.shards(), (tmp_path / "captions-00000.jsonl").read_bytes()
    ends = [index for index, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 4
    for cut in range(len(whole) + 1):
        shard.write_bytes(whole[:cut])
        left = sum(end < cut for end in ends)
        assert list(journal.records()) == [*records[:left], record("other")]  # even before it is repaired
        journal.repair()
        assert shard.read_bytes() == whole[: ends[left - 1] + 1 if left else 0]
        journal.append(0, records[left:])
        assert shard.read_bytes() == whole


@pytest.mark.parametrize("length", [65535, 65536, 65537, 200_000])
def test_torn_lines_of_any_length_are_cut_off(tmp_path: Path, length: int) -> None:
    journal = Journal(tmp_path)
    for whole in ([], [record("a")], [record("a" * 70_000), record("b")]):
        for shard in journal.shards():
            shard.unlink()
        journal.append(3, whole)
        with (tmp_path / "captions-00003.jsonl").open("ab") as file:
            file.write(b"x" * length)
        journal.append(7, [record("of another process")])
        journal.repair()
        assert list(journal.records()) == [*whole, record("of another process")]
        assert b"x" * length not in (tmp_path / "captions-00003.jsonl").read_bytes()


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(0, [record("a")])
    with (tmp_path / "captions-00000.jsonl").open("ab") as file:
        file.write(b'{"key": "torn\n[]\n5\nnull\n"key"\n\n{}\n\0\0\0\n\xff\xfe\n{"key": "a", "prompt": "b"}\n')
    journal.append(0, [record("b")])
    journal.repair()
    assert list(journal.records()) == [record("a"), record("b")]


@given(RECORDS, st.sets(NAMES))
def test_rewrite_removes_what_it_is_asked_to_and_keeps_captions_aside(records: list[Record], stale: set[str]) -> None:
    stale |= {each.key for each in records[::2]}
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        journal.append(0, records)
        journal.append(1, [record("other")])
        other = (Path(folder) / "captions-00001.jsonl").stat()
        journal.rewrite(lambda record: None if record.key in stale - {"other"} else record)
        assert list(journal.records()) == [
            each for each in [*records, record("other")] if each.key not in stale - {"other"}
        ]
        assert (Path(folder) / "captions-00001.jsonl").stat().st_ino == other.st_ino
        aside = Path(folder) / "superseded.jsonl"
        gone = [each for each in records if each.key in stale - {"other"} and each.caption]
        assert len(aside.read_bytes().split(b"\n")[:-1] if aside.exists() else []) == len(gone)


def test_merged_is_of_one_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(0, [record("b", run="new"), record("a", run="old"), record("a", "q", run="new")])
    journal.append(5, [record("a", run="new"), record("c", run="old")])
    for run in ("old", "new"):
        journal.note({"run": run})
    assert [(each.key, each.prompt) for each in journal.merged()] == [("a", "p"), ("a", "q"), ("b", "p")]
    assert journal.merged() == journal.merged("new")
    assert [each.key for each in journal.merged("old")] == ["a", "c"]
    journal.note({"run": "new", "prompts": ["q", "p"]})
    assert [(each.key, each.prompt) for each in journal.merged()] == [("a", "q"), ("a", "p"), ("b", "p")]
    journal.note({"run": "new", "prompts": ["q"]})
    chosen = journal.select()
    assert [(each.key, each.prompt) for each in chosen.records] == [("a", "q")]
    assert (chosen.prompts, chosen.runs) == (2, 2)
    assert len(journal.select(all_prompts=True).records) == 3 and journal.newest("old") == {"run": "old"}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, "old")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_export_to_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [record("a\udcff", width=5), replace(record("b"), status="error", caption=None, error="no\n")]
    export(records, tmp_path / "sub" / "out.parquet")
    table = parquet.read_table(tmp_path / "sub" / "out.parquet")
    rows = [asdict(each) for each in records]
    rows[0] |= {"key": "a\\udcff", "caption": "caption of a\\udcff"}  # parquet's strings are valid UTF-8
    assert table.to_pylist() == rows
    export([], tmp_path / "empty.parquet")
    assert parquet.read_table(tmp_path / "empty.parquet").schema == table.schema


def test_export_beside_the_pictures(tmp_path: Path) -> None:
    bad = replace(record("b.jpg"), status="error", caption=None)
    for name in ("a.jpg", "b.jpg", "b.png", "sub/c.d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    made = [record(*of, bytes=0) for of in (("a.jpg",), ("a.jpg", "q"), ("sub/c.d.png",), ("b.png",))]
    export([*made[:2], bad, *made[2:]], tmp_path)
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.txt")}
    both = "caption of a.jpg\ncaption of a.jpg\n"
    assert found == {"a.txt": both, "b.txt": "caption of b.png\n", "sub/c.d.txt": "caption of sub/c.d.png\n"}


@pytest.mark.parametrize("keys", [["../a.jpg"], ["/a.jpg"], ["x.parquet#0", "x.parquet#1"], ["../../a.jpg", "b\0.jpg"]])
@pytest.mark.parametrize("source", [None, "x.tar"])
def test_export_writes_no_text_that_is_not_beside_its_picture(
    tmp_path: Path, keys: list[str], source: str | None
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jpg").touch()
    done = export([record(key, source=source) for key in keys], tmp_path / "folder")
    assert len(done.absent) + len(done.refused) == len(keys) and not done.written
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.jpg", "folder"]


def test_export_to_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.parquet or \.tar, got .*out\.csv"):
        export([record()], tmp_path / "out.csv")


def test_fingerprints_tell_settings_apart() -> None:
    assert fingerprint({"a": 1, "b": [2, None]}) == fingerprint({"b": [2, None], "a": 1})
    assert len({fingerprint({"a": value}) for value in (1, 2, "1", None, 0.5)}) == 5


LOCKED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from media.files import lock
with lock(Path(sys.argv[2]), alone=sys.argv[3] == "alone"):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "with others"])
def test_the_lock_dies_with_its_process(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", LOCKED, str(EXAMPLES), str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another run is writing to"), lock(tmp_path, alone=True):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with lock(tmp_path, alone=True):
        pass


def test_locks_are_shared_within_a_run(tmp_path: Path) -> None:
    with lock(tmp_path / "new", alone=True) as share:
        with pytest.raises(ValueError, match="another run"), lock(tmp_path / "new", alone=False):
            pass
        share()
        with lock(tmp_path / "new", alone=False):
            pass
        with pytest.raises(ValueError, match="another run"), lock(tmp_path / "new", alone=True):
            pass


def test_file_systems_without_locks_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock(tmp_path, alone=True) as share:
        share()


# --- what is still to do ---------------------------------------------------------------------------------------------


def to_do(items: Sequence[Item], records: Sequence[Record], prompts: Sequence[str] = ("p",), **kwargs: Any) -> Any:
    plan = make_plan(items, prompts, records, **kwargs)
    return {task.item.key: list(task.prompts) for task in plan.tasks}, plan.stale


@pytest.fixture
def files(tmp_path: Path) -> list[Item]:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"12345")
    return [Item(key=name, file=str(tmp_path / name)) for name in ("a.png", "b.png", "missing.png")]


def test_done_is_what_has_a_record(files: list[Item]) -> None:
    done = [record(key, bytes=5) for key in ("a.png", "b.png")] + [record("missing.png", bytes=None)]
    assert to_do(files, []) == ({"a.png": ["p"], "b.png": ["p"], "missing.png": ["p"]}, set())
    assert to_do(files, done) == ({}, set())
    assert to_do(files, done, ["p", "q"]) == ({item.key: ["q"] for item in files}, set())
    assert to_do(files[:1], done) == to_do([], done) == ({}, set())


def test_changed_files_are_done_again(files: list[Item]) -> None:
    done = [record("a.png", bytes=5), record("a.png", "q", bytes=4), record("b.png", bytes=None)]
    left, stale = to_do(files, done, ["p", "q"])
    assert left == {"a.png": ["q"], "b.png": ["p", "q"], "missing.png": ["p", "q"]}
    assert stale == {("a.png", "q"), ("b.png", "p")}  # b.png was not there to be measured, now it is
    # Where the same caption is recorded both for the file as it is and as it was, nothing is lost.
    left, stale = to_do(files[:1], [record("a.png", bytes=5), record("a.png", bytes=4)])
    assert left == {"a.png": ["p"]} and stale == {("a.png", "p")}


def test_errors_are_tried_again_only_if_asked_and_only_what_is_tried_is_dropped(files: list[Item]) -> None:
    done = [replace(record(key, bytes=5), status="error") for key in ("a.png", "elsewhere.png")]
    done += [replace(record("a.png", "q", bytes=5), status="error"), record("b.png", bytes=5)]
    assert to_do(files[:2], done) == ({}, set())
    assert to_do(files[:2], done, retry_errors=True) == ({"a.png": ["p"]}, {("a.png", "p")})
    assert to_do(files[1:2], done, retry_errors=True) == ({}, set())


def test_a_mended_shard_has_no_error_any_more(tmp_path: Path) -> None:
    done = [replace(record("x.tar"), status="error"), record("x.tar/a.png", bytes=3), record("y.tar/a.png", bytes=9)]
    damaged = [Item(key="x.tar", file="dir/x.tar", problem="damaged")]
    member = [Item(key="x.tar/a.png", file="dir/x.tar", offset=512, length=3, source="x.tar")]
    assert to_do(damaged + member, done) == ({}, set())
    assert to_do(member, done) == ({}, {("x.tar", "p")})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_killed_anywhere_add_up_to_one(data: st.DataObject) -> None:
    """Any numbers of processes, prompts, batch sizes; killed at any byte of any shard."""
    items = [Item(key=f"item {index}", file="nowhere") for index in range(data.draw(st.integers(1, 12)))]
    prompts = ["p", "q\u2028", "r"][: data.draw(st.integers(1, 3))]
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        for last in (False, False, False, True):
            processes, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
            some = prompts if last else data.draw(st.lists(st.sampled_from(prompts), unique=True, min_size=1))
            journal.repair()
            plan = make_plan(items, some, journal.records())
            tasks = plan.tasks
            assert not plan.stale
            for process, share in enumerate(spread([cost(task, 8) for task in tasks], processes)):
                before = sum(shard.stat().st_size for shard in journal.shards() if f"{process:05d}" in shard.name)
                for batch in pack([tasks[index] for index in share], 1000, batch_size):
                    journal.append(process, [record(task.item.key, p) for task in batch for p in task.prompts])
                shard = Path(folder) / f"captions-{process:05d}.jsonl"
                if not last and shard.exists():
                    os.truncate(shard, data.draw(st.integers(before, shard.stat().st_size)))
        found = [(each.key, each.prompt) for each in journal.records()]
        assert Counter(found) == Counter((item.key, prompt) for item in items for prompt in prompts)


def test_a_checkpoint_is_known_by_its_content(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    found = [checkpoint(model, {})[0]]
    for name in ("model.safetensors", "config.json", "preprocessor_config.json", "chat_template.jinja", "merges.txt"):
        (model / name).write_text("{}")
        found.append(checkpoint(model, {})[0])
    (model / "config.json").write_text("[]")  # as long as before
    found.append(checkpoint(model, {})[0])
    assert len({json.dumps(each) for each in found}) == 7
    (model / "notes.md").touch()
    (model / "trainer_state.json").touch()
    os.utime(model / "config.json", (0, 0))
    model.rename(tmp_path / "moved")
    assert checkpoint(tmp_path / "moved", {})[0] == found[-1]


def test_checksums_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_text("weights")
    found, known = checkpoint(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert checkpoint(tmp_path, known) == (found, known)
    (tmp_path / "model.safetensors").write_text("WEIGHTS")
    os.utime(tmp_path / "model.safetensors", (0, 0))
    assert checkpoint(tmp_path, known)[0] != found


def test_differences_are_for_people() -> None:
    old = {"files": {"a.json": "1", "b.json": "2"}, "max_new_tokens": 24, "sampling": None}
    new = {"files": {"a.json": "1", "b.json": "3", "c.json": "4"}, "max_new_tokens": 3, "sampling": None}
    assert differences(old, new) == ["the checkpoint's b.json, c.json", "max_new_tokens: 24 before, 3 now"]
    assert differences(old, old) == []
    assert differences({"model": "x", "files": [["a", 1, 2]]}, old)[0] == "the checkpoint's a.json, b.json"


# --- sources ---------------------------------------------------------------------------------------------------------


def keys(*inputs: str | Path, **kwargs: Any) -> list[str]:
    return [item.key for item in find([str(each) for each in inputs], **kwargs)]


def content(item: Item) -> bytes:
    with open_item(item) as file:
        return file.read()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Pictures, videos and other files."""
    for name in ("a.jpg", "B.PNG", "sub/c.webp", "sub/deep/d.Mp4", "notes.txt", "sub/e.csv", "sub/x[1].gif"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(name.encode())
    (tmp_path / "tree" / "folder.jpg").mkdir()
    return tmp_path / "tree"


def test_folders_are_searched(tree: Path) -> None:
    items = find([str(tree)])
    assert [item.key for item in items] == ["B.PNG", "a.jpg", "sub/c.webp", "sub/deep/d.Mp4", "sub/x[1].gif"]
    assert [item.kind for item in items] == ["image", "image", "image", "video", "image"]
    assert [content(item).decode() for item in items] == [item.key for item in items]
    assert all(size(item) == len(content(item)) for item in items)


def test_globs_and_single_files(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert keys("*.jpg") == ["a.jpg"]
    assert keys("**/*") == ["B.PNG", "a.jpg", "sub/c.webp", "sub/deep/d.Mp4", "sub/x[1].gif"]
    assert keys("sub/x[1].gif", "a.jpg", "./a.jpg", "sub/x[[]1].gif") == ["a.jpg", "sub/x[1].gif"]
    assert keys("sub/x[1].gif") == ["x[1].gif"] and keys("sub/x[1].gif", root=str(tree)) == ["sub/x[1].gif"]


def test_lists_of_paths(tree: Path) -> None:
    (tree / "list.txt").write_bytes(
        b"\xef\xbb\xbfa.jpg\r\n\n  sub/c.webp  \nsub/x\x0c\xc2\x85\r.png\nn\xff.jpg\nsub/deep/d.Mp4\n"
        + str(tree).encode()
        + b"/B.PNG"
    )
    items = find([str(tree / "list.txt")])
    names = ["a.jpg", "n\udcff.jpg", "sub/c.webp", "sub/deep/d.Mp4", "sub/x\x0c\x85\r.png", "B.PNG"]
    assert sorted(item.key for item in items) == sorted(names)
    assert {item.kind for item in items if item.key.endswith("Mp4")} == {"video"}
    assert sum(size(item) is None for item in items) == 2  # not there: an error record each
    (tree / "twice.txt").write_text("a.jpg\na.jpg\n")
    assert keys(tree / "twice.txt") == ["a.jpg"]


def test_inputs_that_hold_nothing(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    for name in ("empty", "empty.txt", "tree/notes.md", "nothing/*.jpg", "tree/sub/e.csv"):
        with pytest.raises(ValueError, match=r"no images or videos in|there is no file|no picture or video by"):
            find([str(tree), str(tmp_path / name)])


def test_two_folders_with_equal_names(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "sub").mkdir(parents=True)
    (tmp_path / "other" / "a.jpg").touch()
    found = look([str(tree), str(tmp_path / "other")])
    assert {"tree/a.jpg", "other/a.jpg"} <= {item.key for item in found.items} and not found.clashes
    assert found.root == str(tmp_path)


def test_a_member_that_comes_twice_is_a_problem(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for name in ("a.png", "b.png", "a.png"):
            archive.addfile(tarfile.TarInfo(name))
    found = look([str(tmp_path / "s.tar"), f"{tmp_path}/*.tar"])
    assert [item.key for item in found.items] == ["s.tar/a.png", "s.tar/b.png"] and set(found.clashes) == {
        "s.tar/a.png"
    }
    with pytest.raises(ValueError, match="more than one item has this name"):
        open_item(found.items[0])


MEMBERS = {
    "0001.jpg": b"first",
    "0001.json": b'{"title": "One", "n": 1}',
    "0001.txt": b" words \n",
    "dir.x/0001.left.png": b"left",
    "dir.x/0001.json": b'{"title": "Two"}',
    "dir.x/0001.mp4": b"clip",
    "long/" + "n" * 200 + ".webp": b"",
    "0002.cls": b"5",
}


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_shards(tmp_path: Path, format: int) -> None:
    items = {item.key: item for item in find([str(write_tar(tmp_path / "s.tar", *MEMBERS.items(), format=format))])}
    wanted = [name for name in MEMBERS if not name.endswith(("json", "txt", "cls"))]
    assert items.keys() == {f"s.tar/{name}" for name in wanted}
    for name in wanted:
        item = items[f"s.tar/{name}"]
        assert content(item) == MEMBERS[name] and size(item) == len(MEMBERS[name])
    assert items["s.tar/dir.x/0001.mp4"].kind == "video"
    first, second = items["s.tar/0001.jpg"], items["s.tar/dir.x/0001.left.png"]
    assert fields(first, {"title", "txt"}) == {
        **{"key": "s.tar/0001.jpg", "name": "0001.jpg", "stem": "0001", "folder": "s.tar"},
        **{"title": "One", "n": 1, "txt": "words"},
    }
    assert fields(second, {"title"})["title"] == "Two"


def test_notes_of_macos_in_a_shard_are_no_pictures(tmp_path: Path) -> None:
    members = {"a.png": b"a", "._a.png": b"\0\5\x16\7", "b/._c.json": b"\0\5", "b/c.jpg": b"c"}
    assert keys(write_tar(tmp_path / "s.tar", *members.items())) == ["s.tar/a.png", "s.tar/b/c.jpg"]


def test_damaged_tar_shards(tmp_path: Path) -> None:
    """Cut or broken at any block: members before are read, and an error stands for the rest."""
    members = {f"{index}.png": bytes([65 + index]) * 700 for index in range(3)}
    whole = write_tar(tmp_path / "s.tar", *members.items()).read_bytes()
    assert len(find([str(tmp_path / "s.tar")])) == 3
    step = 512 + 1024
    for cut in range(0, 3 * step + 1, 256):
        (tmp_path / "s.tar").write_bytes(whole[:cut])
        items = find([str(tmp_path / "s.tar")])
        assert items[0].key == "s.tar" and size(items[0]) is None
        with pytest.raises(ValueError, match="the shard is damaged"):
            open_item(items[0])
        complete = 0
        for item in items[1:]:
            try:
                complete += content(item) == members[item.key.removeprefix("s.tar/")]
            except ValueError as error:
                assert "the shard ends within the file" in str(error)
        assert complete == sum(cut - index * step >= 512 + 700 for index in range(3))
    (tmp_path / "s.tar").write_bytes(whole[:step] + b"\x07" * 512 + whole[step + 512 :])  # a header in the middle
    assert keys(tmp_path / "s.tar") == ["s.tar", "s.tar/0.png"]
    (tmp_path / "s.tar").write_bytes(random.Random(0).randbytes(5000))
    assert keys(tmp_path / "s.tar") == ["s.tar"]
    write_tar(tmp_path / "t.tar.gz")
    with pytest.raises(ValueError, match="decompress it"):
        open_item(find([str(tmp_path / "t.tar.gz")])[0])


def write_parquet(path: Path, **columns: Any) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def test_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"by path")
    blobs = [{"bytes": bytes([65 + index]), "path": "x.png"} for index in range(7)]
    path = write_parquet(
        tmp_path / "p.parquet", id=list(range(7)), title=[f"t{index}" for index in range(7)], image=blobs
    )
    items = find([str(path)])
    assert [item.key for item in items] == [f"p.parquet#{index:09d}" for index in range(7)]
    assert [content(item) for item in items] == [b"A", b"B", b"C", b"D", b"E", b"F", b"G"]
    assert fields(items[4], {"title"})["title"] == "t4" and fields(items[4], {"id"})["id"] == 4
    assert size(items[0]) == path.stat().st_size
    mixed = write_parquet(tmp_path / "q.parquet", blob=["there.png", "gone.png", None], bytes=[b"1", b"2", b""])
    named = find([str(mixed)], column="blob")
    assert content(named[0]) == b"by path"
    for item, error in ((named[1], FileNotFoundError), (named[2], ValueError)):
        with pytest.raises(error):
            content(item)
    assert content(find([str(mixed)])[1]) == b"2"
    videos = find([str(write_parquet(tmp_path / "v.parquet", video=[b"clip"]))])
    assert [item.kind for item in videos] == ["video"]
    with pytest.raises(ValueError, match=r"expected a column 'nope' in .*, it has blob, bytes; name it with --column"):
        find([str(mixed)], column="nope")


def test_columns_that_say_nothing_or_cannot_be_read_are_no_matter_to_others(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = write_parquet(
        tmp_path / "p.parquet",
        image=[b"A", b"B"],
        title=["one", None],
        price=[float("nan"), 2.5],
        tags=[["x"], None],
        at=pyarrow.array([1, 2], pyarrow.timestamp("ns")),  # no Python datetime, but pandas' own
    )
    first, second = find([str(path)])
    assert [content(first), content(second)] == [b"A", b"B"]
    wanted = {"title", "price", "tags"}
    assert {name: value for name, value in fields(first, wanted).items() if name in wanted} == {"title": "one"}
    assert {name: value for name, value in fields(second, wanted).items() if name in wanted} == {"price": 2.5}
    with pytest.raises(
        ValueError, match=r"the prompt names \{title\}; there are at, folder, image, key, name, price, "
    ):
        fill("{title}", fields(second, {"title"}))


def test_a_column_that_comes_twice_is_not_guessed(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table([[b"A"], [b"B"], [b"C"]], names=["image", "image", "jpg"])
    parquet.write_table(table, tmp_path / "p.parquet")
    assert [content(item) for item in find([str(tmp_path / "p.parquet")])] == [b"C"]
    with pytest.raises(ValueError, match=r"expected a column 'image' in .*, it has image, image, jpg"):
        find([str(tmp_path / "p.parquet")], column="image")


def test_damaged_parquet_files(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", image=[random.Random(index).randbytes(5000) for index in range(6)])
    whole = path.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"text"):
        path.write_bytes(data)
        tables.clear_caches()
        (item,) = find([str(path)])
        assert item.key == "p.parquet" and decode(named_task("p", 0), None).errors[0]
        with pytest.raises(ValueError):
            open_item(item)
    broken = bytearray(whole)
    broken[100:4000] = bytes(3900)  # pages of the first group; the footer is whole
    path.write_bytes(broken)
    tables.clear_caches()
    errors = [decode(Task(item=item, prompts=(PROMPT,), tokens=0), None).errors[0] for item in find([str(path)])]
    assert len(errors) == 6 and all(errors)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    tables.clear_caches()
    with pytest.raises(ValueError, match="pip install pyarrow"):
        find([str(tmp_path / "p.parquet")])
    with pytest.raises(ValueError, match="pip install pyarrow"):
        export([record()], tmp_path / "out.parquet")


def test_parquet_groups_are_read_once_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "p.parquet", image=[bytes([index]) * 1000 for index in range(30)])
    items, reads = find([str(path)]), Counter[int]()
    file = tables.parquet_file(str(path))

    def read_row_group(group: int) -> Any:
        reads[group] += 1
        time.sleep(0.01)
        return file.read_row_group(group)

    tables.clear_caches()
    monkeypatch.setattr(tables, "parquet_file", lambda _: SimpleNamespace(read_row_group=read_row_group))
    found: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda start=start: found.update({i: content(items[i]) for i in range(start, 6, 3)}))
        for start in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: bytes([index]) * 1000 for index in range(6)} and reads == {0: 1, 1: 1}


def test_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for the library: its pictures are taken undecoded."""

    class Feature:
        def __init__(self, decode: bool = True) -> None:
            self.decode = decode

    class DatasetsImage(Feature): ...

    class Rows:
        column_names = ("title", "picture")

        def __init__(self) -> None:
            self.features: Any = {"picture": DatasetsImage(), "title": object()}

        def __len__(self) -> int:
            return 3

        def cast_column(self, column: str, feature: Feature) -> Rows:
            rows = Rows()
            rows.features = self.features | {column: feature}
            return rows

        def __getitem__(self, index: int) -> dict[str, Any]:
            assert not self.features["picture"].decode
            return {"picture": {"bytes": b"%d" % index, "path": None}, "title": f"t{index}"}

    loaded = []

    def load_dataset(name: str, split: str) -> Any:
        loaded.append((name, split))
        if name == "gone":
            raise FileNotFoundError("there is no dataset 'gone' on the Hub")
        return Rows()

    stub: Any = types.ModuleType("datasets")
    stub.Image, stub.Video, stub.load_dataset = DatasetsImage, type("Video", (Feature,), {}), load_dataset
    stub.load_from_disk = lambda name: {"test": Rows()}
    monkeypatch.setitem(sys.modules, "datasets", stub)
    tables.clear_caches()
    items = find(["dataset:org/na:me"], split="train[:3]")
    assert [item.key for item in items] == [f"org/na:me/train[:3]#{index:09d}" for index in range(3)]
    assert content(items[2]) == b"2" and fields(items[1], {"title"})["title"] == "t1"
    assert loaded == [("org/na:me", "train[:3]")]
    assert [content(item) for item in find([f"dataset:{tmp_path}"], split="test")] == [b"0", b"1", b"2"]
    with pytest.raises(OSError, match="no dataset 'gone'"):
        find(["dataset:gone"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        find(["dataset:other"])


def test_metadata_beside_a_file(tree: Path) -> None:
    (tree / "a.json").write_text('{"title": "Ä", "name": "another", "nested": {"x": 1}, "none": null, "n": NaN}')
    (tree / "a.txt").write_bytes(b"\xef\xbb\xbfwords\r\n")
    (tree / "sub/c.json").write_text("{broken")
    (tree / "sub/c.txt").write_bytes(b"\xff")
    items = {item.key: item for item in find([str(tree)])}
    found = fields(items["a.jpg"], {"title"})
    assert not {"none", "n", "nested"} & found.keys()  # "None", "nan" and "{'x': 1}" would be asked
    assert (found["title"], found["txt"], found["name"], found["stem"], found["folder"]) == (
        "Ä",
        "words",
        "a.jpg",
        "a",
        "",
    )
    assert fields(items["sub/c.webp"], {"kind", "name", "folder"})["folder"] == "sub"  # the broken files are not read
    with pytest.raises(ValueError):
        fields(items["sub/c.webp"], {"title"})
    with pytest.raises(ValueError, match=r"the prompt names \{title\}; there are folder, key, name, stem"):
        fill("{title}", fields(items["B.PNG"], {"title"}))


def test_prompts_are_filled() -> None:
    assert named(["a {b} {c}", "{d}{b}", "{ e } {}"]) == {"b", "c", "d"}
    assert fill('{a} {{"a": {b}}} { a } {}', {"a": "{b}", "b": 2}) == '{b} {{"a": 2}} { a } {}'


# --- decoding --------------------------------------------------------------------------------------------------------


def read(data: bytes, **kwargs: Any) -> np.ndarray:
    return np.asarray(read_image(io.BytesIO(data), **kwargs)[0])


def decoded(tmp_path: Path, data: bytes, name: str = "file.png", **kwargs: Any) -> Any:
    (tmp_path / name).write_bytes(data)
    item = Item(key=name, file=str(tmp_path / name), kind="video" if name.endswith("mp4") else "image")
    return decode(Task(item=item, prompts=(PROMPT,), tokens=0), kwargs.pop("processor", None), **kwargs)


@pytest.mark.parametrize("format", ["PNG", "PPM", "TIFF", "JPEG2000"])
def test_16_bit_greys_are_scaled(format: str) -> None:
    grey = np.array([[0, 257], [32768, 65535]], dtype=np.uint16)
    options = {"irreversible": False} if format == "JPEG2000" else {}
    assert read(encode(Image.fromarray(grey), format, **options)).tolist() == [
        [[0] * 3, [1] * 3],
        [[127] * 3, [255] * 3],
    ]


def test_transparency_is_laid_on_white() -> None:
    colour, clear = (10, 20, 30), (40, 50, 60)
    rgba = Image.new("RGBA", (2, 1), (*colour, 255))
    rgba.putpixel((1, 0), (*clear, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette(colour + clear)
    palette.putpixel((1, 0), 1)
    grey = Image.new("LA", (2, 1), (20, 255))
    grey.putpixel((1, 0), (40, 0))
    for data in (encode(rgba), encode(palette, transparency=1), encode(palette, "GIF", transparency=1)):
        assert read(data).tolist() == [[[10, 20, 30], [255] * 3]]
    assert read(encode(rgba, "WEBP", lossless=True)).tolist() == [[[10, 20, 30], [255] * 3]]
    assert read(encode(grey)).tolist() == [[[20] * 3, [255] * 3]]
    rgba.putpixel((1, 0), (0, 0, 0, 51))
    assert read(encode(rgba)).tolist() == [[[10, 20, 30], [204] * 3]]


_YCBCR = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow reads no such TIFF before 13")


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", pytest.param("YCbCr", marks=_YCBCR), "I", "F", "LAB"])
def test_modes(noise: Image.Image, mode: str) -> None:
    image = noise.convert("RGB" if mode == "LAB" else mode)
    if mode == "LAB":
        image = Image.frombytes("LAB", image.size, image.tobytes())
    data = encode(image, "TIFF")
    if mode == "F":
        with pytest.raises(ValueError):
            read(data)
    else:
        assert read(data).shape == (64, 96, 3)
    if mode == "CMYK":  # in JPEG files the inks are stored the other way round
        assert np.abs(read(encode(image, "JPEG", quality=100)).astype(int) - read(data)).mean() < 3


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
def test_orientations_turn_the_pixels(format: str, mode: str) -> None:
    upright = Image.new(mode, (48, 32), "black")
    upright.paste("white", (0, 0, 48, 8))
    upright.paste("grey", (0, 0, 12, 32))
    turns = [None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM]
    turns += [
        Image.Transpose.TRANSPOSE,
        Image.Transpose.ROTATE_90,
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_270,
    ]
    for number, turn in enumerate(turns, start=1):
        stored = upright if turn is None else upright.transpose(turn)
        exif = Image.Exif()
        exif[0x0112] = number
        data = encode(stored, format, exif=exif, **({"quality": 95} if format == "JPEG" else {}))
        assert np.abs(read(data) - np.asarray(upright.convert("RGB")).astype(int)).mean() < 3
        assert upright_size(io.BytesIO(data)) == (48, 32)


def test_damaged_exif_data_costs_no_picture(noise: Image.Image) -> None:
    chance = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x8298] = "somebody"
    exif.get_ifd(0x8769)[0x9003] = "2020:01:01 00:00:00"
    blob = exif.tobytes()
    for _ in range(300):
        broken = bytearray(blob)
        for _ in range(chance.randint(1, 6)):
            broken[chance.randrange(6, len(blob))] = chance.randrange(256)
        for format in ("PNG", "WEBP", "JPEG"):
            data = encode(noise, format, exif=bytes(broken))
            assert read(data).shape in ((64, 96, 3), (96, 64, 3))
            assert upright_size(io.BytesIO(data)) in ((96, 64), (64, 96))


def test_headers_are_enough_for_sizes(noise: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {format: encode(noise, format, exif=exif) for format in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")}
    plain = {format: encode(noise, format) for format in (*turned, "BMP", "PPM", "JPEG2000")}
    loads: list[Any] = []
    for kind in (ImageFile.ImageFile, PngImagePlugin.PngImageFile):
        monkeypatch.setattr(kind, "load", lambda image: loads.append(image.format))
    assert {upright_size(io.BytesIO(data)) for data in turned.values()} == {(64, 96)}
    assert {upright_size(io.BytesIO(data)) for data in plain.values()} == {(96, 64)}
    assert not loads


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_animations_give_their_first_frame(format: str) -> None:
    colours = ["red", "lime", "blue"] * 20
    first, *rest = (Image.new("RGB", (8, 8), colour) for colour in colours)
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(first, format, save_all=True, append_images=rest, **options)
    assert Image.open(io.BytesIO(data)).n_frames == 60
    assert np.abs(read(data).astype(int) - (255, 0, 0)).max() < 8


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {}),
    "progressive jpeg": ("JPEG", {"progressive": True}),
    "cmyk jpeg": ("JPEG", {}),
    "png": ("PNG", {}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "lzw tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "webp": ("WEBP", {}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "ppm": ("PPM", {}),
    "avif": ("AVIF", {}),
    "jpeg 2000": ("JPEG2000", {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_files_are_errors(tmp_path: Path, noise: Image.Image, name: str) -> None:
    format, options = FORMATS[name]
    data = encode(noise.convert("CMYK") if "cmyk" in name else noise, format, **options)
    assert decoded(tmp_path, data).errors[0] is None
    for share in (0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9):
        row = decoded(tmp_path, data[: int(share * len(data))])
        assert row.errors[0] and row.medium is None and row.bytes == int(share * len(data)), share


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_never_stop_the_run(tmp_path: Path, noise: Image.Image, name: str) -> None:
    format, options = FORMATS[name]
    data, chance = encode(noise.resize((24, 16)), format, **options), random.Random(0)
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(chance.choice([1, 1, 4, 20])):
            broken[chance.randrange(len(data))] = chance.randrange(256)
        row = decoded(tmp_path, bytes(broken), refuse_above=100_000)
        assert row.errors[0] or (row.medium.mode == "RGB" and row.medium.size == (row.width, row.height))


OTHERS = {
    "empty": b"",
    "zeros": bytes(1000),
    "text": b"This is no picture.\n" * 50,
    "html": b"<html><body>404</body></html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "zip": b"PK\x03\x04" + bytes(100),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
    "short": b"\xff\xd8\xff",
    "heic": struct.pack(">I", 24) + b"ftypheic" + bytes(200),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_errors(tmp_path: Path, name: str) -> None:
    row = decoded(tmp_path, OTHERS[name], "file.jpg")
    assert row.errors[0].startswith("ValueError: " + ("the file is empty" if name == "empty" else "not an image")), (
        row.errors[0]
    )


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, data: bytes = b"") -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def test_bombs_are_refused_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    gif = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x00\x00\x00" + b"\x2c" + struct.pack("<HHHH", 0, 0, 9, 9)
    for data in (png(100_000, 100_000), png(12_000, 12_000), png(1 << 30, 1), gif + bytes(9)):
        error = decoded(tmp_path, data).errors[0]
        assert "limit" in error and "pixels" in error, error
        with pytest.raises((ValueError, Image.DecompressionBombError)):
            upright_size(io.BytesIO(data))
    assert (
        decoded(tmp_path, png(600, 600), refuse_above=300_000).errors[0]
        == "TooLarge: 600 x 600 pixels, the limit is 300000"
    )


def test_chunks_that_unpack_to_much_are_refused(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(200 << 20), 9)
    pixels = zlib.compress(bytes(4))
    for kind, head in ((b"zTXt", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0"), (b"iCCP", b"k\0\0")):
        row = decoded(tmp_path, png(1, 1, png_chunk(kind, head + bomb), data=pixels))
        assert row.errors[0] is None or "too large" in row.errors[0], row.errors[0]
    row = decoded(tmp_path, png(1, 1, png_chunk(b"tEXt", b"k\0" + b"x" * (3 << 20)), data=pixels))
    assert row.errors[0] is None or "large" in row.errors[0]


def test_a_frame_larger_than_its_gif_is_refused(tmp_path: Path) -> None:
    header = b"GIF89a" + struct.pack("<HH", 10, 10) + b"\x00\x00\x00"
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 60000, 60000) + b"\x00\x02\x02\x4c\x01\x00\x3b"
    assert decoded(tmp_path, header + frame).errors[0]


def test_videos_need_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install torchvision" in decoded(tmp_path, b"clip", "clip.mp4", processor=SimpleNamespace()).errors[0]
    from transformers import video_utils

    for name in ("torchcodec", "av", "cv2"):
        monkeypatch.setattr(video_utils, f"is_{name}_available", lambda: False)
    processor = SimpleNamespace(video_processor=SimpleNamespace())
    assert "pip install av" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors[0]


def test_videos_are_read_as_the_processor_samples_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import video_utils

    metadata = video_utils.VideoMetadata(total_num_frames=100, fps=25.0, width=6, height=4)
    lost = 0

    def load_video(path: str, backend: str, sample_indices_fn: Any) -> Any:
        assert Path(path).read_bytes() == b"clip" and path.endswith(".mp4") and backend == "pyav"
        if not Path(path).is_relative_to(tmp_path):
            raise RuntimeError(f"no video in {path}")
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        return np.zeros((len(metadata.frames_indices) - lost, 4, 6, 3)), metadata

    monkeypatch.setattr(video_utils, "is_torchcodec_available", lambda: False)
    monkeypatch.setattr(video_utils, "is_av_available", lambda: True)
    monkeypatch.setattr(video_utils, "load_video", load_video)
    asked: list[Any] = []

    def sample_frames(metadata: Any, **how: Any) -> range:
        asked.append(how)
        return range(0, 100, 20)

    videos = SimpleNamespace(sample_frames=sample_frames)
    processor = SimpleNamespace(video_processor=videos)
    row = decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    assert row.errors[0] is None and (row.width, row.height) == (6, 4) and len(row.medium.frames) == 5
    videos.fps = 4
    decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    videos.num_frames = 8
    decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    assert asked == [{"fps": 2.0}, {"fps": 4}, {"num_frames": 8}]
    assert "limit is 20" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor, refuse_above=20).errors[0]
    assert "the file is empty" in decoded(tmp_path, b"", "clip.mp4", processor=processor).errors[0]
    lost = 1
    row = decoded(tmp_path, b"clip", "clip.mp4", processor=processor)
    assert len(row.medium.frames) == len(row.medium.metadata.frames_indices) == 4
    lost = 2
    assert "has 3 of 5 frames" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors[0]
    (tmp_path / "clip.tar").write_bytes(b"..clip..")
    member = Item(key="x/clip.mp4", file=str(tmp_path / "clip.tar"), kind="video", offset=2, length=4)
    row = decode(Task(item=member, prompts=("p",), tokens=0), processor)
    assert row.errors == ("ValueError: RuntimeError: no video in /video.mp4",)  # the same in every run
    metadata.total_num_frames = 0
    assert "how many frames" in decoded(tmp_path, b"clip", "clip.mp4", processor=processor).errors[0]


def test_errors_of_sources_and_prompts_are_records(tmp_path: Path) -> None:
    missing = named_task("gone.png")
    assert "FileNotFoundError" in (decode(missing, None).errors[0] or "") and decode(missing, None).bytes is None
    assert decode(named_task("x", problem="damaged"), None).errors[0] == "ValueError: damaged"
    (tmp_path / "a.png").write_bytes(encode(Image.new("RGB", (4, 4))))
    task = replace(named_task("a.png"), item=Item(key="a.png", file=str(tmp_path / "a.png")), prompts=("{nope}",))
    assert "the prompt names {nope}" in (decode(task, None).errors[0] or "")
    row = decode(replace(task, prompts=("{kind} {stem}", "{nope}", "x")), None)
    assert row.prompts == ("picture a", "", "x") and (row.width, row.height) == (4, 4)
    assert row.errors[::2] == (None, None) and "{nope}" in str(row.errors[1])  # no matter to the other prompts
    (tmp_path / "a.png").write_bytes(b"bad")
    row = decode(replace(task, prompts=("{nope}", "x")), None)
    assert "{nope}" in str(row.errors[0]) and "not an image" in str(row.errors[1])
    (tmp_path / "a.json").write_text("{broken")
    row = decode(replace(task, prompts=("{stem}", "{nope}")), None)
    assert "not an image" in str(row.errors[0]) and "JSONDecodeError" in str(row.errors[1])


# --- the worker ------------------------------------------------------------------------------------------------------


class FakeCaptioner:
    """Captions are the pictures' red values; more than `most` rows at once are too many for the memory."""

    max_new_tokens = 4

    def __init__(self, most: int = 1 << 30, error: Exception | None = None, refused: tuple[int, ...] = ()) -> None:
        self.most, self.error, self.refused = most, error or torch.OutOfMemoryError("CUDA out of memory"), refused
        self.batches: list[int] = []
        self.encoded = 0
        self.processor = None

    def seed_of(self, key: str, prompt: str) -> int:
        return 0

    def encode(self, seen: Sequence[Image.Image], prompts: Sequence[str]) -> Any:
        self.encoded += 1
        red = [image.getpixel((0, 0))[0] for image in seen]
        if set(red) & set(self.refused):
            raise IndexError("refused")
        return {"input_ids": red, "prompts": list(prompts)}

    def send(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def vision_tokens(self, inputs: Any) -> int:
        return 10 * len(inputs["input_ids"])

    def generate(self, inputs: Sequence[Any], seeds: Sequence[Sequence[int]]) -> list[list[Caption]]:
        self.batches.append(len(seeds[0]))
        if len(seeds[0]) > self.most:
            raise self.error
        return [[Caption(f"{p}{r}", 2) for r, p in zip(e["input_ids"], e["prompts"], strict=True)] for e in inputs]


def work(tmp_path: Path, captioner: Any, count: int, prompts: Sequence[str] = ("p",), **options: Any) -> list[Record]:
    """What a worker writes for pictures of 10 tokens each; numbers 1, 11, 21 and so on are unreadable."""
    tasks = []
    for index in range(count):
        name = f"{index:03d}.png"
        (tmp_path / name).write_bytes(b"bad" if index % 10 == 1 else encode(Image.new("RGB", (4, 4), (index, 0, 0))))
        item = Item(key=name, file=str(tmp_path / name))
        tasks.append(Task(item=item, prompts=tuple(prompts), tokens=10))
    progress = Progress(tmp_path / "progress", 0, 1, count, sum(cost(task, captioner.max_new_tokens) for task in tasks))
    options = {"batch_tokens": 100, "batch_size": 8, "decoders": 2} | options
    worker = Worker(captioner=captioner, journal=Journal(tmp_path), progress=progress, process=0, run="r", **options)
    try:
        worker.work(tasks)
    finally:
        progress.close()
    return list(Journal(tmp_path).records())


def check_fake(records: list[Record], count: int, prompts: Sequence[str] = ("p",)) -> None:
    assert [(each.key, each.prompt) for each in records] == [
        *(
            (f"{index:03d}.png", prompt)
            for start in range(0, count, 8)
            for bad in (True, False)
            for index in range(start, min(start + 8, count))
            if (index % 10 == 1) == bad
            for prompt in prompts
        )
    ]
    for each in records:
        index = int(each.key[:3])
        good = index % 10 != 1
        assert each.caption == (f"{each.prompt}{index}" if good else None) and (each.error is None) == good
        assert each.status == ("ok" if good else "error") and each.run == "r" and each.bytes
        assert (each.width, each.tokens) == ((4, 2) if good else (None, None))


@pytest.mark.parametrize("prompts", [("p",), ("p", "q")])
def test_worker_writes_every_record_once(tmp_path: Path, prompts: tuple[str, ...]) -> None:
    captioner = FakeCaptioner()
    check_fake(work(tmp_path, captioner, 45, prompts), 45, prompts)
    assert captioner.encoded == 6 * len(prompts)  # each batch once
    (counts,) = read_counts(tmp_path / "progress", 1)
    assert (counts.items, counts.of, counts.failed, counts.halved) == (45, 45, 5 * len(prompts), 0)
    assert counts.cost == pytest.approx(counts.of_cost)
    assert (counts.vision, counts.text) == (400, 80 * len(prompts))


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6])
def test_out_of_memory_halves_batches(tmp_path: Path, most: int) -> None:
    captioner = FakeCaptioner(most)
    check_fake(work(tmp_path, captioner, 45, ("p", "q")), 45, ("p", "q"))
    failed = [rows > most for rows in captioner.batches]
    done = list(itertools.accumulate(0 if f else rows for f, rows in zip(failed, captioner.batches, strict=True)))
    # The first batch, of seven good items, finds out what fits: nothing larger is tried later.
    assert failed[0] and not any(f for f, rows in zip(failed, done, strict=True) if rows >= 7)
    (counts,) = read_counts(tmp_path / "progress", 1)
    assert counts.halved == sum(failed) and "halved" in summary([counts])


def test_one_row_too_large_is_an_error(tmp_path: Path) -> None:
    records = work(tmp_path, FakeCaptioner(0), 5)
    assert {each.error for each in records if each.key != "001.png"} == {"OutOfMemoryError: CUDA out of memory"}
    assert all(each.status == "error" and each.caption is None for each in records) and len(records) == 5


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"), RuntimeError("CUDA error: illegal memory access")]
)
def test_other_errors_of_the_model_stop_the_run(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(RuntimeError, match=str(error)):
        work(tmp_path, FakeCaptioner(3, error), 45)
    assert list(Journal(tmp_path).records()) == []


@pytest.mark.parametrize("slow", ["encode", "generate"])
def test_it_is_told_whether_the_model_waits_for_pictures(tmp_path: Path, slow: str) -> None:
    captioner = FakeCaptioner()
    quick = getattr(captioner, slow)
    setattr(captioner, slow, lambda *args: time.sleep(0.1) or quick(*args))
    work(tmp_path, captioner, 45)
    (counts,) = read_counts(tmp_path / "progress", 1)
    assert counts.waited > 0.1 if slow == "encode" else counts.waited < 0.5 * counts.seconds


def test_one_item_that_the_processor_refuses_costs_no_other(tmp_path: Path) -> None:
    records = work(tmp_path, FakeCaptioner(refused=(4, 5, 30)), 45)
    refused = {each.key: each.error for each in records if "refused" in (each.error or "")}
    assert refused == dict.fromkeys(("004.png", "005.png", "030.png"), "IndexError: refused")
    assert len(records) == 45 and sum(each.status == "ok" for each in records) == 37


def test_halves_keep_the_order() -> None:
    def run(rows: Sequence[int]) -> list[int]:
        if len(rows) > 3 or 7 in rows:
            raise torch.OutOfMemoryError
        return [row * 2 for row in rows]

    found = halve_on_oom(run, list(range(20)))
    assert [row for row in found if isinstance(row, int)] == [2 * row for row in range(20) if row != 7]
    assert isinstance(found[7], torch.OutOfMemoryError) and found[7].__traceback__ is None


def test_progress_is_of_all_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Progress(tmp_path, 1, 2, of=30, of_cost=300)
    assert read_counts(tmp_path, 2) == [Counts(process=1, of=30, of_cost=300, seconds=pytest.approx(0, abs=1))]
    first = Progress(tmp_path, 0, 2, of=10, of_cost=100)
    other.add(items=6, cost=60.0, vision=600, text=60, failed=2)
    first.add(items=4, cost=40.0, vision=400, text=40)
    other.close()
    first.close()
    assert "waited" not in summary([first.counts]), "a cluster does not know"
    first.add(waited=1.0)
    other.add(waited=4.0)
    first.counts, other.counts = (replace(each.counts, seconds=10.0) for each in (first, other))
    assert state([first.counts, other.counts]) == "1.0 items/s, 100 vision and 10 text tokens/s, about 30 s left"
    text = summary([first.counts, other.counts])
    assert "10 items in 10.0 s: 1.00 items/s, 100 vision tokens/s, 10 text tokens/s; models waited" in text
    assert "for pictures 25% of the time" in text
    assert "process 1: 6 of 30 items in 10.0 s, 2 records failed" in text
    clear(tmp_path)
    assert read_counts(tmp_path, 2) == []
    assert "items/s" in capsys.readouterr().err


# --- the captioner ---------------------------------------------------------------------------------------------------


def load(family: str, **options: Any) -> Captioner:
    folder = str(EXAMPLES / "tiny_captioner" / family)
    model = batch_caption.load_model(folder, torch.float32, torch.device("cpu"))
    return Captioner(model, load_processor(folder), max_new_tokens=24, **options)


def generate(
    captioner: Captioner, images: Sequence[Image.Image], *prompts: str, first_seed: int = 0
) -> list[list[str]]:
    """Captions by prompt."""
    inputs = [captioner.encode(images, [prompt] * len(images)) for prompt in prompts]
    seeds = [range(first_seed, first_seed + len(images))] * len(prompts)
    return [[caption.text for caption in captions] for captions in captioner.generate(inputs, seeds)]


@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl", "qwen2_vl"))
def test_prompts_share_the_encoded_pictures(family: str) -> None:
    captioner = load(family)
    batch_caption.hf_vit_accel.patch(captioner.model)
    drawn = [draw(seed, FAMILIES[family]) for seed in range(6)]
    images = [image for image, _ in drawn]
    prompts = [PROMPT, "describe this video : red ?", "is the text above ?"]
    calls = []
    captioner.model.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    together = generate(captioner, images, *prompts)
    assert takes_encoded(captioner.model) == (Version(transformers.__version__) >= Version("5.18"))
    assert len(calls) == (1 if takes_encoded(captioner.model) else 3)
    calls.clear()
    assert together == [generate(captioner, images, prompt)[0] for prompt in prompts]
    assert len(calls) == 3
    right = sum(found == caption for found, (_, caption) in zip(together[0], drawn, strict=True))
    assert right >= 5 and len({tuple(captions) for captions in together}) > 1


def test_prompts_are_encoded_one_by_one_by_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner, image = load("qwen2_vl"), draw(0, 28)[0]
    together = generate(captioner, [image], PROMPT, "is the text above ?")
    assert (reuse_for(captioner.model, ["one", "two"]) is False) == takes_encoded(captioner.model)
    monkeypatch.setattr("captioning.captioner.takes_encoded", lambda _: False)
    calls = []
    captioner.model.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    assert generate(captioner, [image], PROMPT, "is the text above ?") == together and len(calls) == 2
    # Patched as here, the tower is still called, and encodes once.
    assert reuse_for(captioner.model, [PROMPT]) is False
    with hf_vit_accel.patched(captioner.model, reuse=reuse_for(captioner.model, [PROMPT, "is the text above ?"])):
        assert generate(captioner, [image], PROMPT, "is the text above ?") == together
        reused = hf_vit_accel.status(captioner.model).towers[0].reuse
    assert (reused.items, reused.encoded, reused.hits) == (2, 1, 1)


def test_inputs_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was moved to the GPU and did not fit there must not be kept there by who tries again with less."""
    captioner = load("qwen2_vl")
    inputs = captioner.encode([draw(0, 28)[0]], [PROMPT])
    before = dict(inputs)
    monkeypatch.setattr(type(captioner.model), "device", torch.device("meta"))
    monkeypatch.setattr(captioner.model, "generate", lambda **kwargs: kwargs["input_ids"])
    monkeypatch.setattr(captioner.processor.tokenizer, "batch_decode", lambda *_, **__: [])
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        captioner.generate([inputs], [[0]])
    assert all(inputs[name] is before[name] for name in before)


def test_samples_do_not_depend_on_their_batch() -> None:
    captioner = load("qwen3_vl", temperature=3.0)
    images = [draw(seed)[0] for seed in range(8)]
    (together,) = generate(captioner, images, PROMPT)
    alone = [generate(captioner, [image], PROMPT, first_seed=seed)[0][0] for seed, image in enumerate(images)]
    assert together == alone
    (others,) = generate(captioner, images, PROMPT, first_seed=100)
    assert sum(one != other for one, other in zip(together, others, strict=True)) >= 4
    assert generate(captioner, images[:1] * 8, PROMPT)[0][1:] != [together[0]] * 7  # each row has its own noise


def test_every_record_has_its_own_seed() -> None:
    captioner: Any = SimpleNamespace(seed=0)
    seeds = {Captioner.seed_of(captioner, key, prompt) for key in ("a", "b", "a\udcff") for prompt in ("p", "q")}
    captioner.seed = 1
    assert Captioner.seed_of(captioner, "a", "p") not in seeds and len(seeds) == 6
    torch.Generator().manual_seed(max(seeds))


def test_samples_are_distributed_as_softmax() -> None:
    logits, rows = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]), 400
    sampler = captioner_module._Sampler(range(rows), torch.device("cpu"))
    counts = torch.zeros(5)
    for _ in range(60):
        counts += sampler(torch.zeros(rows, 1).long(), logits.expand(rows, -1)).argmax(-1).bincount(minlength=5)
    assert torch.allclose(counts / counts.sum(), logits.softmax(-1), atol=0.01)
    barred = torch.tensor([[0.0, float("-inf")]]).expand(rows, -1)
    assert not sampler(torch.zeros(rows, 1).long(), barred).argmax(-1).any()


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"), [(0.5, 0.75, {0}), (1.0, 0.75, {0, 1}), (1.0, 1.0, {0, 1, 2})]
)
def test_temperature_comes_before_top_p(temperature: float, top_p: float, expected: set[int]) -> None:
    """As everywhere: the nucleus is of the probabilities that are sampled from."""
    captioner = load("qwen2_vl", temperature=temperature, top_p=top_p)
    logits, rows, found = torch.tensor([0.6, 0.3, 0.1]).log(), 200, set()

    def fake(**kwargs: Any) -> torch.Tensor:
        scores = logits.expand(rows, -1)
        for processor in kwargs["logits_processor"]:
            scores = processor(kwargs["input_ids"], scores)
        found.update(scores.argmax(-1).tolist())
        return torch.cat([kwargs["input_ids"], scores.argmax(-1, keepdim=True)], 1)

    captioner.model.generate = fake
    captioner.generate([{"input_ids": torch.zeros(rows, 1, dtype=torch.long)}], [range(rows)])
    assert found == expected


def test_prompts_that_hold_image_tokens_are_errors(tmp_path: Path) -> None:
    """A name of a file is no way to smuggle a placeholder in."""
    captioner = load("qwen3_vl")
    drawn = {f"{seed}.png": draw(seed) for seed in range(3)}
    drawn["<|image_pad|>.png"] = draw(3)
    tasks = []
    for name, (image, _) in drawn.items():
        image.save(tmp_path / name)
        item = Item(key=name, file=str(tmp_path / name))
        tasks.append(Task(item=item, prompts=(PROMPT + " {name}",), tokens=30))
    progress = Progress(tmp_path / "progress", 0, 1, 4, 1)
    journal = Journal(tmp_path)
    Worker(captioner, journal, progress, 0, "r", batch_tokens=1000, batch_size=8).work(tasks)
    assert {each.key: each.status for each in journal.records()} == {
        name: "error" if "image" in name else "ok" for name in drawn
    }


def walk() -> Iterator[Path]:
    yield EXAMPLES / "batch_caption.py"
    yield from sorted((EXAMPLES / "captioning").glob("*.py"))


def test_files_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 400 for path in walk())
