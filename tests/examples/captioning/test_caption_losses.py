"""Files and records that must not be lost, and the prompts and pictures that a merge takes."""

import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from captioner.journal import Journal
from programs import draw, encode, lines, words
from support_captioning import MODEL, WHOLE, call, caption, captions_in, merged, put, texts, write_tar

pytestmark = pytest.mark.usefixtures("quick")


def stored(output: Path) -> list[str]:
    """Return the lines of all shards, sorted."""
    return sorted(line for shard in output.glob("captions-*.jsonl") for line in shard.read_text().splitlines())


# --- another attempt ----------------------------------------------------------------------------------------------


def test_an_attempt_that_dies_at_work_keeps_all_records_and_goes_on(
    photos: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs to change the command after a kill: a queue of jobs starts it again as it is."""
    caption(photos, output)
    expected = captions_in(output)
    before = stored(output)
    append = Journal.append
    written = []

    def die_at_the_second_batch(*arguments: object) -> None:
        if written:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        written.append(append(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", die_at_the_second_batch)
        assert caption(photos, output, "--attempt=2", "--batch-size=1").exit_code != 0
    assert set(before) < set(stored(output))
    refusal = words(call("merge", output, tmp_path / "out.jsonl"))
    assert "name what to merge" in refusal and "which writes the 2 records that it lacks" in refusal
    assert "3 items, 2 of them to caption" in words(caption(photos, output, "--attempt=2"))
    assert captions_in(output) == expected
    for attempt in (1, 2):
        assert "3 items, 0 of them to caption" in words(caption(photos, output, f"--attempt={attempt}"))
    assert "3 items, 3 of them to caption" in words(caption(photos, output, "--attempt=3"))


# --- text files beside pictures -----------------------------------------------------------------------------


def test_hand_written_texts_are_left_alone(photos: Path, output: Path, tmp_path: Path) -> None:
    """So are links to texts, and folders that have the name of a text."""
    put(photos, "d.png", "e.png")
    (photos / "a.txt").write_text("sks style")
    (tmp_path / "tags.md").write_text("tags")
    (photos / "d.txt").symlink_to(tmp_path / "tags.md")
    os.mkdir(photos / "e.txt")
    caption(photos, output, prompt="describe {txt} .", model=MODEL)
    caption(photos, output)
    done = call("merge", output, photos)
    assert (photos / "a.txt").read_text() == "sks style"
    assert done.exit_code == 1 and "a.txt" in words(done)
    assert "--extension" in words(done) and "--overwrite" in words(done)
    assert (photos / "b.txt").exists() and (photos / "0/c.txt").exists()  # the others are written
    assert (photos / "d.txt").is_symlink() and (tmp_path / "tags.md").read_text() == "tags"
    assert (photos / "e.txt").is_dir()


def test_texts_of_an_earlier_merge_are_replaced(photos: Path, output: Path) -> None:
    caption(photos, output)
    assert call("merge", output, photos).exit_code == 0
    first = texts(photos)
    assert call("merge", output, photos).exit_code == 0 and texts(photos) == first
    caption(photos, output, "--max-new-tokens=2")
    assert call("merge", output, photos).exit_code == 0
    second = texts(photos)
    assert second != first
    (photos / "b.txt").write_text(second["b.txt"] + "and a hand-written line\n")  # now the file belongs to the user
    done = call("merge", output, photos)
    assert done.exit_code == 1 and "hand-written" in (photos / "b.txt").read_text()
    assert "b.txt: it is there, and was not written by merge, or was edited since" in words(done)
    assert call("merge", output, photos, "--overwrite").exit_code == 0
    assert "hand-written" not in (photos / "b.txt").read_text()


def test_texts_of_another_extension(photos: Path, output: Path) -> None:
    (photos / "a.txt").write_text("sks style")
    caption(photos, output)
    assert call("merge", output, photos, "--extension=.caption").exit_code == 0
    written = texts(photos, "**/*.caption")
    expected = captions_in(output)
    assert written == {key.replace(".png", ".caption"): f"{text}\n" for key, text in expected.items()}
    assert texts(photos) == {"a.txt": "sks style"}
    wrong = call("merge", output, photos, "--extension=.png", "--overwrite")
    assert wrong.exit_code == 2 and (photos / "a.png").read_bytes().startswith(b"\x89PNG")


def test_other_files_are_not_overwritten_either(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)
    for name in ("list.jsonl", "metadata.jsonl"):
        (photos / name).write_text("by hand")
        done = call("merge", output, photos / name)
        assert done.exit_code != 0 and "or was edited since; --overwrite replaces it" in words(done), name
        assert (photos / name).read_text() == "by hand"
        assert call("merge", output, photos / name, "--overwrite").exit_code == 0, name
        assert call("merge", output, photos / name).exit_code == 0, name  # merge wrote it last


# --- one bad name stops itself -----------------------------------------------------------------------------------


def test_two_pictures_of_one_name_stop_only_themselves(photos: Path, output: Path) -> None:
    shutil.copy(photos / "b.png", photos / "a.jpg")
    assert caption(photos, output).exit_code == 0
    done = call("merge", output, photos)
    assert done.exit_code == 1 and "it would be the text of a.jpg and a.png 1 not written" in words(done)
    assert "--extension" not in words(done), "advice that cannot help"
    assert set(texts(photos)) == {"b.txt", "0/c.txt"}


def test_a_member_that_comes_twice_stops_only_itself(tmp_path: Path, output: Path) -> None:
    one = encode(draw(3)[0])
    two = encode(draw(4)[0])
    write_tar(tmp_path / "evil.tar", ("a.png", one), ("b.png", one), ("a.png", two))
    write_tar(tmp_path / "good.tar", ("a.png", one))
    done = caption([tmp_path / "evil.tar", tmp_path / "good.tar"], output)
    assert done.exit_code == 1 and "evil.tar/a.png" in words(done)
    assert captions_in(output).keys() == {"evil.tar/b.png", "good.tar/a.png"}
    assert caption([tmp_path / "evil.tar", tmp_path / "good.tar"], output).exit_code == 1  # every run reports it


def test_equal_names_in_two_folders(tmp_path: Path, output: Path) -> None:
    put(tmp_path / "data" / "train", "a.png")
    put(tmp_path / "data" / "val", "a.png")
    assert caption([tmp_path / "data" / "train", tmp_path / "data" / "val"], output).exit_code == 0
    assert captions_in(output).keys() == {"train/a.png", "val/a.png"}
    assert call("merge", output, tmp_path / "data" / "val").exit_code == 0
    assert set(texts(tmp_path / "data")) == {"val/a.txt"}


# --- the newest run's prompts -------------------------------------------------------------------------------------


def test_empty_captions_do_not_count_and_become_no_text_files(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)
    call("merge", output, photos)
    shard = next(output.glob("captions-*.jsonl"))
    records = lines(shard)
    records[0]["caption"] = " "
    shard.write_text("".join(json.dumps(record) + "\n" for record in records))
    printed = words(call("merge", output, photos))
    assert "1 captions are empty: the model ended at once" in printed and "2 of 3 records have captions" in printed
    old_text = (photos / records[0]["key"]).with_suffix(".txt")
    assert "wrote 2 texts" in printed
    assert f"{old_text}: it is of an earlier merge, and its picture has no caption any more" in printed
    old_text.unlink()
    assert "of an earlier merge" not in words(call("merge", output, photos)) and not old_text.exists()
    old_text.write_text("by hand")
    assert "of an earlier merge" not in words(call("merge", output, photos)) and old_text.read_text() == "by hand"
    call("merge", output, tmp_path / "out.jsonl")
    assert len(lines(tmp_path / "out.jsonl")) == 3, "records are kept as they are"
    shard.write_text("".join(json.dumps(record | {"caption": ""}) + "\n" for record in records))
    for text in photos.rglob("*.txt"):
        text.unlink()
    done = call("merge", output, photos)
    assert done.exit_code == 1 and f"nothing was written to {photos}: no record has" in words(done)


# --- one picture, however the input is spelt ----------------------------------------------------------------------


@pytest.mark.parametrize("first", ["folder", "subfolder", "list"])
def test_a_picture_is_the_same_however_it_is_spelt(
    photos: Path, output: Path, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "all.txt").write_text(f"../photos/a.png\n{photos}/0/c.png\n../photos/0/../b.png\n")
    (tmp_path / "link").symlink_to(photos)
    spelt = {"folder": "photos", "subfolder": "photos/0", "list": "lists/all.txt"}
    caption(spelt[first], output)
    caption("photos", output)
    others = [*spelt.values(), str(photos), "./photos/", "link", "link/0", "photos/0/../a.png", "lists/../photos"]
    for other in others:
        assert re.search(r"\d items?, 0 of them to caption", words(caption(other, output))), other
    assert len(stored(output)) == 3
    assert call("merge", output, "photos").exit_code == 0
    assert set(texts(photos)) == {"a.txt", "b.txt", "0/c.txt"}


def test_a_folder_that_moved_is_known_again(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)
    photos.rename(tmp_path / "moved")
    assert "3 items, 0 of them to caption" in words(caption(tmp_path / "moved", output))
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    printed = words(caption(tmp_path / "copy", output, "--dry-run"))
    assert "3 of them to caption" in printed and "None of the 3 records here is of these inputs" in printed
    printed = words(caption(tmp_path / "copy", output, "--dry-run", f"--root={tmp_path / 'copy'}"))
    assert "0 of them to caption" in printed


def test_merge_writes_no_shard_of_the_records(photos: Path, output: Path) -> None:
    caption(photos, output)
    before = stored(output)
    for name in ("captions-00000.jsonl", "captions-00000-00000.jsonl"):
        done = call("merge", output, output / name, "--overwrite")
        assert done.exit_code == 2 and "has a name of records" in words(done) and stored(output) == before
    assert call("merge", output, output / "captions.jsonl").exit_code == 0


def test_names_that_are_no_text_do_not_stop_merge(photos: Path, output: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"lat\xe9in")
    try:
        shutil.copy(photos / "a.png", photos / f"{name}.png")
    except OSError:
        pytest.skip("this file system has no such names")
    (photos / f"{name}.txt").write_text("mine")
    caption(photos, output)
    for folder, message in ((photos, "not written: "), (tmp_path / "empty", "and got no text: ")):
        folder.mkdir(exist_ok=True)
        done = call("merge", output, folder)  # prints into a stream that takes valid UTF-8 only
        assert done.exit_code == 1 and message in words(done) and r"lat\udce9in" in words(done), done.exception


def test_a_picture_of_the_same_name_elsewhere_gets_no_text(tmp_path: Path, output: Path) -> None:
    for folder, seed in (("cats", 1), ("dogs", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0001.png").write_bytes(encode(draw(seed)[0]))
    shutil.copytree(tmp_path / "cats", tmp_path / "copy")
    caption(tmp_path / "cats", output, WHOLE)
    done = call("merge", output, tmp_path / "dogs")
    assert done.exit_code == 1 and "1 pictures are not in" in words(done) and not texts(tmp_path / "dogs")
    assert call("merge", output, tmp_path / "copy").exit_code == 0
    assert texts(tmp_path / "copy") == {"0001.txt": draw(1)[1] + "\n"}
    caption(tmp_path / "dogs", output, WHOLE)  # and both into one output
    assert call("merge", output, tmp_path / "dogs").exit_code == 0
    assert texts(tmp_path / "dogs") == {"0001.txt": draw(2)[1] + "\n"}


def test_damaged_files_beside_the_records_are_named(photos: Path, output: Path) -> None:
    caption(photos, output)
    for text in ("{", '{"name": "somebody else\'s"}', "[]"):
        (output / "manifest.json").write_text(text)
        for done in (caption(photos, output), call("merge", output, output / "all.jsonl")):
            assert (
                done.exit_code == 2
                and f"{output / 'manifest.json'} is damaged, or no captioning run wrote it " in words(done)
            )
        assert (output / "manifest.json").read_text() == text


def test_other_files_in_the_output_folder_stay(photos: Path) -> None:
    mine = {
        photos / "captions-mine.jsonl": '{"file_name": "a.png", "text": "written by hand, no line end"}',
        photos / "captions-20240101.jsonl": '{"file_name": "a.png", "text": "written by hand, no line end"}',
        photos / ".lock": "1234",
    }
    for file, text in mine.items():
        file.write_text(text)
    for attempt in (1, 2):
        assert caption(photos, photos, f"--attempt={attempt}").exit_code == 0
    assert {file: file.read_text() for file in mine} == mine


# --- a disk that is full ----------------------------------------------------------------------------------------------


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Bound the size of files, as `ulimit -f` does: writes are cut off there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_are_complete_after_the_disk_was_full(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos / "a.png", output, f"--root={photos}")
    (shard,) = Journal(output).shards()
    first = shard.read_bytes()
    room = max((output / "manifest.json").stat().st_size * 2, 9000)
    Journal(output, 1).append(0, [replace(merged(output)[0], run="another", caption="x" * room)])
    _, shard = Journal(output).shards()
    size = shard.stat().st_size
    with limited(size + 1):
        done = caption(photos, output, "--batch-size=1")
    stopped = (
        f"cannot write to {output}: File too large; the captions so far are kept: remove the cause, and start the same"
    )
    assert done.exit_code == 1 and f"{stopped} command to go on" in words(done) and "Traceback" not in words(done)
    assert shard.stat().st_size == size + 1  # a line is torn
    assert captions_in(output).keys() == {"a.png"} and call("merge", output, tmp_path / "all.jsonl").exit_code == 1
    assert "3 items, 2 of them to caption" in words(caption(photos, output))
    assert captions_in(output).keys() == {"a.png", "b.png", "0/c.png"}
    assert Journal(output).shards()[0].read_bytes() == first
    assert sum(record.run == "another" for record in Journal(output).records()) == 1


def test_a_run_that_cannot_begin_to_write_says_so(photos: Path, output: Path) -> None:
    with limited(100):
        done = caption(photos, output)
    assert done.exit_code == 1 and f"cannot write to {output}: File too large;" in words(done)
    assert "3 items, 3 of them to caption" in words(caption(photos, output))


@pytest.mark.parametrize("name", ["all.jsonl", "metadata.jsonl"])
def test_merge_on_a_full_disk_keeps_the_former_files(photos: Path, output: Path, name: str) -> None:
    caption(photos, output)
    assert call("merge", output, photos / name).exit_code == 0
    files = {path: path.read_bytes() for path in photos.rglob("*.*")}
    caption(photos, output, "--max-new-tokens=2")
    with limited(60):
        done = call("merge", output, photos / name)
    assert done.exit_code == 1 and f"cannot write {photos / name}: " in words(done), words(done)
    assert "File too large" in words(done) and "remove the cause, and merge again" in words(done)
    assert {path: path.read_bytes() for path in photos.rglob("*.*")} == files
    assert call("merge", output, photos / name).exit_code == 0


def test_texts_are_merges_own_after_a_disk_was_full(photos: Path, output: Path) -> None:
    caption(photos, output)
    assert call("merge", output, photos).exit_code == 0
    caption(photos, output, "--max-new-tokens=2")
    with limited((output / ".written").stat().st_size + 40):  # texts are smaller
        done = call("merge", output, photos)
    assert done.exit_code == 1 and f"cannot write {photos}: File too large" in words(done)
    for _ in range(2):
        assert call("merge", output, photos).exit_code == 0
        expected = {key.replace(".png", ".txt"): f"{text}\n" for key, text in captions_in(output).items()}
        assert texts(photos) == expected
