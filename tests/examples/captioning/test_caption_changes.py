"""Captions of pictures and prompts that changed, and messages of runs and merges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from captioner.batches import Task
from captioner.items import Item, checksum
from captioner.journal import Journal
from captioner.plan import make_plan
from PIL import Image
from programs import EXAMPLES, ROOT, draw, encode, words
from support_captioning import (
    FIRST,
    KINDS,
    MODEL,
    SECOND,
    WHOLE,
    batch_caption,
    call,
    caption,
    captions_in,
    lines,
    start_anew,
    texts,
    write_tar,
)

pytestmark = pytest.mark.usefixtures("quick")


class Rows:
    """Stand in for a `Dataset` of the `datasets` library."""

    column_names = ("image",)
    features: ClassVar[dict[str, object]] = {}

    def __init__(self, data: list[bytes], fingerprint: str | None) -> None:
        self.data = data
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"image": {"bytes": self.data[index], "path": None}}


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rows]:
    """Replace the `datasets` library. The test fills in what it loads, by split."""
    loads: dict[str, Rows] = {}
    stub: Any = types.ModuleType("datasets")
    stub.load_dataset = lambda name, split: loads[split]
    stub.load_from_disk = lambda name: loads
    monkeypatch.setitem(sys.modules, "datasets", stub)
    return loads


@pytest.mark.parametrize("kind", [*KINDS, "dataset", "dataset without a fingerprint"])
def test_another_picture_of_the_same_name_and_size_is_captioned_anew(
    tmp_path: Path, output: Path, kind: str, datasets: dict[str, Rows]
) -> None:
    def write(image: Image.Image) -> str:
        start_anew()
        if kind in KINDS:
            return KINDS[kind](tmp_path, image)
        data = encode(image, "BMP")
        datasets["train"] = Rows([data], checksum(BytesIO(data)) if kind == "dataset" else None)
        return "dataset:org/name"

    place = write(FIRST)
    assert "1 of them to caption" in words(caption(place, output))
    before = next(iter(captions_in(output).values()))
    assert "0 of them to caption" in words(caption(place, output))
    size = sum(path.stat().st_size for path in tmp_path.glob("x.*"))
    write(SECOND)
    assert sum(path.stat().st_size for path in tmp_path.glob("x.*")) == size
    # A merge before the next run pairs no picture with the caption of another one.
    done = call("merge", output, tmp_path / "out.tar")
    assert done.exit_code == 1 and "1 pictures are not in" in words(done) and not (tmp_path / "out.tar").exists()
    if kind == "file":
        assert call("merge", output, tmp_path).exit_code == 1 and not texts(tmp_path, "x.txt")
    printed = words(caption(place, output))
    assert "1 of them to caption" in printed and "1 captions are outdated" in printed
    after = next(iter(captions_in(output).values()))
    assert after != before and len(list(Journal(output).records())) == 1
    assert [line["caption"] for line in lines(output / "superseded.jsonl")] == [before]
    assert call("merge", output, tmp_path / "out.tar").exit_code == 0
    assert "0 of them to caption" in words(caption(place, output))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_read_once_and_captioned_no_more(
    tmp_path: Path, output: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = KINDS[kind](tmp_path, FIRST)
    caption(place, output)
    os.utime(place, (1, 1))
    start_anew()
    assert "1 items, 0 of them to caption" in words(caption(place, output))
    assert "outdated" not in words(caption(place, output)) and not (output / "superseded.jsonl").exists()
    if kind != "row that names a file":  # the time of its table does not show a change
        monkeypatch.setattr("captioner.plan.checksum", lambda file: pytest.fail("read again"))
    assert "1 items, 0 of them to caption" in words(caption(place, output))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_shard_that_is_replaced_while_a_run_goes(
    tmp_path: Path, output: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of the former shard is in memory, so a place in the file may hold another picture."""
    place = tmp_path / f"x.{kind}"
    measured = batch_caption.measured
    first = encode(FIRST, "BMP")
    second = encode(SECOND, "BMP")

    def write(*members: tuple[str, bytes]) -> None:
        if kind == "tar":
            write_tar(tmp_path / "new", *members)
        else:
            pq = pytest.importorskip("pyarrow.parquet")
            pq.write_table(
                pytest.importorskip("pyarrow").table({"image": [data for _, data in members]}), tmp_path / "new"
            )
        (tmp_path / "new").replace(place)

    def replaced(*arguments: object) -> list[Task]:
        write(("b.bmp", second), ("a.bmp", first))
        return measured(*arguments)

    write(("a.bmp", first), ("b.bmp", second))
    with monkeypatch.context() as patch:
        patch.setattr(batch_caption, "measured", replaced)
        assert "2 of them to caption" in words(caption(place, output))
    start_anew()
    done = call("merge", output, tmp_path / "out.tar")
    assert done.exit_code == 1 and "2 pictures are not in" in words(done) and not (tmp_path / "out.tar").exists()
    start_anew()
    assert "2 captions are outdated" in words(caption(place, output))
    start_anew()
    caption(place, tmp_path / "undisturbed")
    assert captions_in(output) == captions_in(tmp_path / "undisturbed")
    assert "0 of them to caption" in words(caption(place, output))


def test_another_column_is_another_picture(tmp_path: Path, output: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    scenes = {name: draw(seed) for seed, name in enumerate(("image", "thumb"))}
    pq.write_table(pa.table({name: [encode(image)] for name, (image, _) in scenes.items()}), tmp_path / "t.parquet")
    for name, (_, expected) in scenes.items():
        assert "1 of them to caption" in words(caption(tmp_path / "t.parquet", output, f"--column={name}", WHOLE))
        assert list(captions_in(output).values()) == [expected]


def test_a_prompt_that_names_another_text_now_is_asked_anew(photos: Path, output: Path) -> None:
    for name in ("a", "b", "0/c"):
        (photos / f"{name}.txt").write_text("picture")
    options = dict(prompt="describe this {txt} .")
    caption(photos, output, **options)
    assert "0 of them to caption" in words(caption(photos, output, **options))
    (photos / "a.txt").write_text("video")
    (photos / "b.txt").unlink()  # captions that were made with it stay
    printed = words(caption(photos, output, **options))
    assert "3 items, 1 of them to caption" in printed and "1 captions are outdated" in printed
    prompts_by_key = {record.key: record.asked for record in Journal(output).merged()}
    expected = {"a.png": "video", "b.png": "picture", "0/c.png": "picture"}
    assert prompts_by_key == {key: f"describe this {text} ." for key, text in expected.items()}


def test_pictures_that_cannot_be_read_keep_their_captions(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photos, output)
    records = list(Journal(output).records())
    times = (1, 1)
    os.utime(photos / "a.png", times)
    (item,) = [Item(key="a.png", file=str(photos / "a.png"))]

    def fail(item: Item) -> None:
        raise PermissionError("not today")

    with monkeypatch.context() as patch:
        patch.setattr("captioner.plan.open_item", fail)
        plan = make_plan([item], [records[0].prompt], records)
    assert not plan.tasks and not plan.stale and not plan.stamps  # nor is it taken as unchanged
    assert make_plan([item], [records[0].prompt], records).stamps.keys() == {"a.png"}


def test_a_dataset_is_the_same_however_it_is_spelt(
    tmp_path: Path, output: Path, datasets: dict[str, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sets" / "ds").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    datasets["train"] = Rows([encode(draw(0)[0]), encode(draw(1)[0])], "f")
    start_anew()
    assert caption("dataset:sets/ds", output).exit_code == 0
    for other in ("dataset:sets/ds/", f"dataset:{tmp_path}/sets/ds", "dataset:./sets/../sets/ds"):
        assert "2 items, 0 of them to caption" in words(caption(other, output)), other
    monkeypatch.chdir(tmp_path / "sets")  # and merged from anywhere
    assert call("merge", output, tmp_path / "out.tar").exit_code == 0
    assert "dataset:ds has no split val; it has train" in words(caption("dataset:ds", output, "--split=val"))


def test_shards_of_an_earlier_merge_are_reported(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)
    names = tmp_path / "x-%d.tar"
    assert call("merge", output, names, "--shard-size=1").exit_code == 0
    done = call("merge", output, names)
    assert done.exit_code == 1 and "x-1.tar: it is of an earlier merge" in words(done)
    for name in ("x-1.tar", "x-2.tar"):
        (tmp_path / name).unlink()
    assert call("merge", output, names).exit_code == 0


def test_pixel_limits_that_cross_are_not_the_models_fault(photos: Path, output: Path) -> None:
    printed = words(caption(photos, output, "--min-pixels=100000", "--max-pixels=1000"))
    assert "Invalid value for --min-pixels: --min-pixels 100000 is above --max-pixels 1000" in printed


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the program so that Ctrl-C reaches it as in a terminal."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "captioner" / "main.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_ctrl_c_while_it_starts_is_one_sentence(tmp_path: Path) -> None:
    """Its first library takes long to import."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    run = started("caption", "photos", "--output=o", "--demo", PYTHONPATH=str(tmp_path))
    assert run.stdout is not None and run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=60)[0].strip() == "stopped before anything was begun" and run.returncode == 130


def test_ctrl_c_again_and_again_is_one_sentence(photos: Path, output: Path) -> None:
    arguments = ["caption", str(photos), f"--output={output}", f"--model={MODEL}", "--batch-size=1"]
    run = started(*arguments, "--max-new-tokens=2000", PYTHONPATH=str(ROOT))
    while not (output / ".progress").exists() and run.poll() is None:
        time.sleep(0.05)
    while run.poll() is None:
        run.send_signal(signal.SIGINT)
        time.sleep(0.01)
    printed = run.communicate(timeout=60)[0]
    assert printed.endswith("\nstopped; the captions so far are kept: start the same command to go on\n"), printed
    assert run.returncode in (
        130,
        -signal.SIGINT,
    )  # a shell reports 130 for both; in Python's last steps no handler runs


def test_a_late_second_ctrl_c_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.9, 2.1])
    ended = []
    monkeypatch.setattr(batch_caption, "_PRESSED", [])
    monkeypatch.setattr(batch_caption.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(batch_caption.os, "_exit", ended.append)
    with pytest.raises(KeyboardInterrupt):
        batch_caption._stop()
    batch_caption._stop()
    assert not ended
    batch_caption._stop()
    assert ended == [130] and "without --overwrite, to go on" in capfd.readouterr().out
