"""Formats of `merge`, read back as the programs that load them do."""

from __future__ import annotations

import json
import os
import tarfile
from multiprocessing import get_context
from pathlib import Path

import pytest
from programs import draw, encode, words
from support_captioning import call, caption, captions_in, lines, put, write_tar

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    put(tmp_path / "photos", "a.png", "sub/b.c.png")
    (tmp_path / "photos" / "bad.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_metadata_for_imagefolder(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output, "--prompt=describe this video .")
    assert call("merge", output, photos / "metadata.jsonl", "--prefix=sks, ").exit_code == 0
    rows = lines(photos / "metadata.jsonl")
    assert [line["file_name"] for line in rows] == ["a.png", "sub/b.c.png"]
    assert all(line.keys() == {"file_name", "text", "text_2"} for line in rows)
    assert all((photos / line["file_name"]).is_file() and line["text"].startswith("sks, ") for line in rows)
    done = call("merge", output, tmp_path / "else" / "metadata.jsonl")
    assert done.exit_code == 1 and not (tmp_path / "else").exists() and "2 pictures are not in" in words(done)


def test_webdataset_shards_of_files(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output)
    assert call("merge", output, tmp_path / "all.tar").exit_code == 0
    files = members(tmp_path / "all.tar")
    expected = captions_in(output)
    assert list(files) == [f"{number:09d}.{kind}" for number in range(2) for kind in ("png", "txt", "json")]
    for number, key in enumerate(expected):
        assert files[f"{number:09d}.png"] == (photos / key).read_bytes()
        assert files[f"{number:09d}.txt"].decode() == f"{expected[key]}\n"
        assert json.loads(files[f"{number:09d}.json"])["key"] == key
    assert call("merge", output, tmp_path / "part-%03d.tar", "--shard-size=1").exit_code == 0
    parts = members(tmp_path / "part-000.tar") | members(tmp_path / "part-001.tar")
    assert parts == files
    done = call("merge", output, tmp_path / "part-%s-%d.tar")
    assert done.exit_code == 2 and "expected a name with one number" in words(done)


def test_webdataset_shards_of_shards_and_tables(output: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    scenes = [encode(draw(seed)[0], "JPEG" if seed % 2 else "PNG", quality=95) for seed in range(6)]
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "s.tar", ("0.png", scenes[0]), ("1.jpg", scenes[1]), ("1.txt", b"alt"))
    parquet.write_table(pyarrow.table({"blob": scenes[2:], "id": [2, 3, 4, 5]}), tmp_path / "data" / "t.parquet")
    caption([tmp_path / "data" / "s.tar", tmp_path / "data" / "t.parquet"], output, "--column=blob")
    assert call("merge", output, tmp_path / "all.tar").exit_code == 0
    files = members(tmp_path / "all.tar")
    pictures = {name: data for name, data in files.items() if name.endswith(("png", "jpg"))}
    assert sorted(pictures.values()) == sorted(scenes)
    for name, data in pictures.items():
        seed = scenes.index(data)
        assert name.endswith("jpg" if seed % 2 else "png")
        assert (
            files[name[:-3] + "txt"].decode()
            == captions_in(output)[json.loads(files[name[:-3] + "json"])["key"]] + "\n"
        )
    (tmp_path / "data" / "s.tar").unlink()
    done = call("merge", output, tmp_path / "rest.tar")
    assert len(members(tmp_path / "rest.tar")) == 12 and "2 pictures are not in" in words(done)


def test_parquet_can_be_joined(output: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    put(tmp_path / "data", "x.png")
    (tmp_path / "data" / "part").mkdir()
    table = pyarrow.table({"image": [encode(draw(seed)[0]) for seed in range(3)]})
    parquet.write_table(table, tmp_path / "data" / "part" / "t.parquet")
    caption([tmp_path / "data", tmp_path / "data" / "part" / "t.parquet"], output)
    assert call("merge", output, tmp_path / "out.parquet").exit_code == 0
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["source"], row["row"]) for row in rows] == [*(("part/t.parquet", n) for n in range(3)), (None, None)]
    assert {row["asked"] for row in rows} == {"describe this picture ."}


def test_texts_of_videos_and_several_lines(tmp_path: Path) -> None:
    """Captions keep their line ends. Files are valid UTF-8, whatever names they hold."""
    from captioner.exports import Export
    from captioner.journal import Record

    name = b"n\xff.png".decode(errors="surrogateescape")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / name).touch()
    record = Record(key=name, prompt="p", status="ok", caption="two\nlines é \udcff", bytes=0)
    done = Export(tmp_path, {"root": str(tmp_path / "p"), "prompts": ["p"]})
    done([record], tmp_path / "p")
    (written,) = (tmp_path / "p").glob("*.txt")
    assert written.read_bytes() == "two\nlines é \\udcff\n".encode() and done.written == 1
    done([record], tmp_path / "p" / "metadata.jsonl")
    with open(tmp_path / "p" / "metadata.jsonl", encoding="utf-8") as file:
        assert json.loads(file.read())["file_name"] == name


@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
def test_merge_overwrites_no_shard_that_pictures_were_read_from(suffix: str, output: Path, tmp_path: Path) -> None:
    """Shards hold more than captions, and records do not hold the pictures of a table."""
    shard = tmp_path / f"shard{suffix}"
    link = tmp_path / f"link{suffix}"
    pictures = [encode(draw(seed)[0]) for seed in range(2)]
    if suffix == ".tar":
        write_tar(shard, *((f"{index}.png", data) for index, data in enumerate(pictures)))
    else:
        rows = {"image": pictures}
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(rows), shard)
    link.symlink_to(shard)
    assert caption(shard, output).exit_code == 0
    before = shard.read_bytes()
    for name in (shard, link):
        done = call("merge", output, name, "--overwrite")
        assert done.exit_code == 2 and "choose another name" in words(done) and shard.read_bytes() == before
    assert call("merge", output, tmp_path / f"other{suffix}").exit_code == 0


def write_output(path: Path, *arguments: Path) -> None:
    """Caption, and write the console output to a file."""
    names, output = arguments
    path.write_text(call("caption", names, "--output", output, "--demo", "--prompt", "{txt}").output)


def test_pipes_are_errors(output: Path, tmp_path: Path) -> None:
    """Opening a pipe would wait for its writer. A list names one, and one lies beside a picture."""
    put(tmp_path / "photos", "a.png", "b.png")
    for name in ("p.png", "a.txt"):
        os.mkfifo(tmp_path / "photos" / name)
    for name in ("b.txt", "p.txt"):
        (tmp_path / "photos" / name).write_text("red")
    names = tmp_path / "list.txt"
    names.write_text("photos/a.png\nphotos/b.png\nphotos/p.png\n")
    # The run is a process of its own, so that it can be ended if it waits.
    run = get_context("fork").Process(target=write_output, args=(tmp_path / "printed", names, output))
    run.start()
    run.join(timeout=120)
    run.kill()
    printed = (tmp_path / "printed").read_text()
    assert "a.txt is a pipe, socket or device" in printed and "p.png is a pipe" in printed
    assert "1 of 3 records have captions" in printed
