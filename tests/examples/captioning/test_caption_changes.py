"""Captions of pictures and prompts that changed, and messages of runs and merges."""

import os
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from captioner.batches import Task
from captioner.items import Item
from captioner.journal import Journal
from captioner.plan import make_plan
from programs import draw, encode, words
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
    merged,
    start_anew,
    texts,
    write_parquet,
    write_tar,
)

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("kind", KINDS)
def test_another_picture_of_the_same_name_and_size_is_captioned_anew(tmp_path: Path, output: Path, kind: str) -> None:
    place = KINDS[kind](tmp_path, FIRST)
    assert "1 of them to caption" in words(caption(place, output))
    before = next(iter(captions_in(output).values()))
    assert "0 of them to caption" in words(caption(place, output))
    size = sum(path.stat().st_size for path in tmp_path.glob("x.*"))
    KINDS[kind](tmp_path, SECOND)
    start_anew()
    assert sum(path.stat().st_size for path in tmp_path.glob("x.*")) == size
    if kind == "file":  # a merge before the next run pairs no picture with the caption of another one
        done = call("merge", output, tmp_path)
        assert done.exit_code == 1 and not texts(tmp_path, "x.txt")
        assert f"{place}: it changed after `caption`" in words(done)
    printed = words(caption(place, output))
    assert "1 of them to caption" in printed and "1 captions are outdated" in printed
    after = next(iter(captions_in(output).values()))
    assert after != before and len(Journal(output).records()) == 1
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
    assert "outdated" not in words(caption(place, output))
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
            write_parquet(tmp_path / "new", {"image": [data for _, data in members]})
        (tmp_path / "new").replace(place)

    def replaced(*arguments: object) -> list[Task]:
        write(("b.bmp", second), ("a.bmp", first))
        return measured(*arguments)

    write(("a.bmp", first), ("b.bmp", second))
    with monkeypatch.context() as patch:
        patch.setattr(batch_caption, "measured", replaced)
        assert "2 of them to caption" in words(caption(place, output))
    start_anew()
    assert "2 captions are outdated" in words(caption(place, output))
    start_anew()
    caption(place, tmp_path / "undisturbed")
    assert captions_in(output) == captions_in(tmp_path / "undisturbed")
    assert "0 of them to caption" in words(caption(place, output))


def test_another_column_is_another_picture(tmp_path: Path, output: Path) -> None:
    scenes = {name: draw(seed) for seed, name in enumerate(("image", "thumb"))}
    table = write_parquet(tmp_path / "t.parquet", {name: [encode(image)] for name, (image, _) in scenes.items()})
    for name, (_, expected) in scenes.items():
        assert "1 of them to caption" in words(caption(table, output, f"--column={name}", WHOLE))
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
    prompts_by_key = {record.key: record.asked for record in merged(output)}
    expected = {"a.png": "video", "b.png": "picture", "0/c.png": "picture"}
    assert prompts_by_key == {key: f"describe this {text} ." for key, text in expected.items()}


def test_pictures_that_cannot_be_read_keep_their_captions(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photos, output)
    records = Journal(output).records()
    times = (1, 1)
    os.utime(photos / "a.png", times)
    (item,) = [Item(key="a.png", file=str(photos / "a.png"))]

    def fail(item: Item) -> None:
        raise PermissionError("not today")

    with monkeypatch.context() as patch:
        patch.setattr("captioner.plan.open_item", fail)
        plan = make_plan([item], [records[0].prompt], records)
    assert not plan.tasks and not plan.updates  # nor is it taken as unchanged
    (update,) = make_plan([item], [records[0].prompt], records).updates
    assert update.key == "a.png" and update.stamp != records[0].stamp


def start(folder: Path, arguments: list[str]) -> None:
    """Run the program in a forked process, as it runs as a script."""
    descriptor = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    signal.signal(signal.SIGINT, batch_caption._stop)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    batch_caption.app(arguments)


def test_ctrl_c_again_and_again_is_one_sentence(photos: Path, output: Path, tmp_path: Path) -> None:
    arguments = ["caption", str(photos), f"--output={output}", f"--model={MODEL}", "--batch-size=1"]
    run = get_context("fork").Process(target=start, args=(tmp_path, [*arguments, "--max-new-tokens=2000"]))
    run.start()
    while not (output / "manifest.json").exists() and run.is_alive():
        time.sleep(0.02)
    while run.is_alive():
        os.kill(run.pid, signal.SIGINT)
        time.sleep(0.01)
    printed = (tmp_path / "printed").read_text()
    assert printed.endswith("\nstopped; the captions so far are kept: start the same command to go on\n"), printed
    assert run.exitcode in (130, -signal.SIGINT)  # in Python's last steps no handler runs
