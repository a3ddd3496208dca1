"""Formats of `merge`, read back as the programs that load them do."""

from __future__ import annotations

import json
import os
from multiprocessing import get_context
from pathlib import Path

import pytest
from programs import draw, encode, words
from support_captioning import call, caption, lines, put

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    put(tmp_path / "photos", "a.png", "sub/b.c.png")
    (tmp_path / "photos" / "bad.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def test_metadata_for_imagefolder(photos: Path, output: Path, tmp_path: Path) -> None:
    caption(photos, output, "--prompt=describe this video .")
    done = call("merge", output, photos / "metadata.jsonl")
    assert done.exit_code == 0 and "wrote lines for 2 pictures of run" in words(done)
    rows = lines(photos / "metadata.jsonl")
    assert [line["file_name"] for line in rows] == ["a.png", "sub/b.c.png"]
    assert all(line.keys() == {"file_name", "text", "text_2"} for line in rows)
    assert all((photos / line["file_name"]).is_file() and line["text"] for line in rows)
    done = call("merge", output, tmp_path / "else" / "metadata.jsonl")
    assert done.exit_code == 1 and not (tmp_path / "else").exists() and "2 pictures are not in" in words(done)


def test_records_name_the_rows_of_a_table(output: Path, tmp_path: Path) -> None:
    """So they can be joined."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    put(tmp_path / "data", "x.png")
    (tmp_path / "data" / "part").mkdir()
    table = pyarrow.table({"image": [encode(draw(seed)[0]) for seed in range(3)]})
    parquet.write_table(table, tmp_path / "data" / "part" / "t.parquet")
    caption([tmp_path / "data", tmp_path / "data" / "part" / "t.parquet"], output)
    assert call("merge", output, tmp_path / "out.jsonl").exit_code == 0
    rows = lines(tmp_path / "out.jsonl")
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


def write_output(path: Path, *arguments: Path) -> None:
    """Caption, and write the console output to a file."""
    names, output = arguments
    path.write_text(caption(names, output, prompt="{txt}").output)


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
