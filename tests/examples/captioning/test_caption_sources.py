"""Sources: items of folders, globs, lists, shards, tables and data sets, and their metadata."""

import random
import sys
import tarfile
from pathlib import Path

import pytest
from captioner import sources
from captioner.batches import Task
from captioner.items import Item, fields, fill, named, open_item, size
from captioner.worker import decode
from support_captioning import PICTURE_PROMPT, named_task, start_anew, write_parquet, write_tar


def find_items(inputs: list[str], **options: object) -> list[Item]:
    return sources.find(inputs, **options).items


def keys(*inputs: str | Path, **options: object) -> list[str]:
    return [item.key for item in find_items([str(name) for name in inputs], **options)]


def content(item: Item) -> bytes:
    with open_item(item) as file:
        return file.read()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create pictures, videos and other files."""
    for name in ("a.jpg", "B.PNG", "sub/c.webp", "sub/deep/d.Mp4", "notes.txt", "sub/e.csv", "sub/x[1].gif"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(name.encode())
    (tmp_path / "tree" / "folder.jpg").mkdir()
    return tmp_path / "tree"


def test_folders_are_searched(tree: Path) -> None:
    items = find_items([str(tree)])
    assert [item.key for item in items] == ["B.PNG", "a.jpg", "sub/c.webp", "sub/deep/d.Mp4", "sub/x[1].gif"]
    assert [item.kind for item in items] == ["image", "image", "image", "video", "image"]
    assert [content(item).decode() for item in items] == [item.key for item in items]
    assert all(size(item) == len(content(item)) for item in items)


def test_single_files(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert keys("sub/x[1].gif", "a.jpg", "./a.jpg") == ["a.jpg", "sub/x[1].gif"]
    assert keys("sub/x[1].gif") == ["x[1].gif"] and keys("sub/x[1].gif", root=str(tree)) == ["sub/x[1].gif"]


def test_lists_of_paths(tree: Path) -> None:
    (tree / "list.txt").write_bytes(
        b"\xef\xbb\xbfa.jpg\r\n\n  sub/c.webp  \nsub/x\x0c\xc2\x85\r.png\nn\xff.jpg\nsub/deep/d.Mp4\n"
        + str(tree).encode()
        + b"/B.PNG"
    )
    items = find_items([str(tree / "list.txt")])
    names = ["a.jpg", "n\udcff.jpg", "sub/c.webp", "sub/deep/d.Mp4", "sub/x\x0c\x85\r.png", "B.PNG"]
    assert sorted(item.key for item in items) == sorted(names)
    assert {item.kind for item in items if item.key.endswith("Mp4")} == {"video"}
    assert sum(size(item) is None for item in items) == 2  # not there: an error record each
    (tree / "twice.txt").write_text("a.jpg\na.jpg\n")
    assert keys(tree / "twice.txt") == ["a.jpg"]


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
    items = {
        item.key: item for item in find_items([str(write_tar(tmp_path / "s.tar", *MEMBERS.items(), format=format))])
    }
    media_names = [name for name in MEMBERS if not name.endswith(("json", "txt", "cls"))]
    assert items.keys() == {f"s.tar/{name}" for name in media_names}
    for name in media_names:
        item = items[f"s.tar/{name}"]
        assert content(item) == MEMBERS[name] and size(item) == len(MEMBERS[name])
    assert items["s.tar/dir.x/0001.mp4"].kind == "video"
    first = items["s.tar/0001.jpg"]
    second = items["s.tar/dir.x/0001.left.png"]
    assert fields(first, {"title", "txt"}) == {
        **{"key": "s.tar/0001.jpg", "name": "0001.jpg", "stem": "0001", "folder": "s.tar"},
        **{"title": "One", "n": 1, "txt": "words"},
    }
    assert fields(second, {"title"})["title"] == "Two"


def test_notes_of_macos_in_a_shard_are_no_pictures(tmp_path: Path) -> None:
    members = {"a.png": b"a", "._a.png": b"\0\5\x16\7", "b/._c.json": b"\0\5", "b/c.jpg": b"c"}
    assert keys(write_tar(tmp_path / "s.tar", *members.items())) == ["s.tar/a.png", "s.tar/b/c.jpg"]


def test_damaged_tar_shards(tmp_path: Path) -> None:
    """After a cut or a broken block, the members before it are read, and an error stands for the others."""
    members = {f"{index}.png": bytes([65 + index]) * 700 for index in range(3)}
    complete_shard = write_tar(tmp_path / "s.tar", *members.items()).read_bytes()
    assert len(find_items([str(tmp_path / "s.tar")])) == 3
    step = 512 + 1024
    for cut in range(0, 3 * step + 1, 256):
        (tmp_path / "s.tar").write_bytes(complete_shard[:cut])
        items = find_items([str(tmp_path / "s.tar")])
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
    (tmp_path / "s.tar").write_bytes(
        complete_shard[:step] + b"\x07" * 512 + complete_shard[step + 512 :]
    )  # a header in the middle
    assert keys(tmp_path / "s.tar") == ["s.tar", "s.tar/0.png"]
    (tmp_path / "s.tar").write_bytes(random.Random(0).randbytes(5000))
    assert keys(tmp_path / "s.tar") == ["s.tar"]


def test_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"by path")
    blobs = [{"bytes": bytes([65 + index]), "path": "x.png"} for index in range(7)]
    columns = {"id": list(range(7)), "title": [f"t{index}" for index in range(7)], "image": blobs}
    path = write_parquet(tmp_path / "p.parquet", columns, row_group_size=3)
    items = find_items([str(path)])
    assert [item.key for item in items] == [f"p.parquet#{index:09d}" for index in range(7)]
    assert [content(item) for item in items] == [b"A", b"B", b"C", b"D", b"E", b"F", b"G"]
    assert fields(items[4], {"title"})["title"] == "t4" and fields(items[4], {"id"})["id"] == 4
    assert size(items[0]) == path.stat().st_size
    columns = {"blob": ["there.png", "gone.png", None], "bytes": [b"1", b"2", b""]}
    mixed = write_parquet(tmp_path / "q.parquet", columns)
    named = find_items([str(mixed)], column="blob")
    assert content(named[0]) == b"by path"
    for item, error in ((named[1], FileNotFoundError), (named[2], ValueError)):
        with pytest.raises(error):
            content(item)
    assert content(find_items([str(mixed)])[1]) == b"2"
    videos = find_items([str(write_parquet(tmp_path / "v.parquet", {"video": [b"clip"]}))])
    assert [item.kind for item in videos] == ["video"]
    with pytest.raises(ValueError, match=r"expected a column 'nope' in .*, it has blob, bytes; name it with --column"):
        find_items([str(mixed)], column="nope")


def test_empty_or_unreadable_columns_harm_no_other(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = {
        "image": [b"A", b"B"],
        "title": ["one", None],
        "price": [float("nan"), 2.5],
        "tags": [["x"], None],
        "taken_at": pyarrow.array([1, 2], pyarrow.timestamp("ns")),  # no Python datetime, but pandas' own
    }
    path = write_parquet(tmp_path / "p.parquet", table)
    first, second = find_items([str(path)])
    assert [content(first), content(second)] == [b"A", b"B"]
    columns = {"title", "price", "tags"}
    assert {name: value for name, value in fields(first, columns).items() if name in columns} == {"title": "one"}
    assert {name: value for name, value in fields(second, columns).items() if name in columns} == {"price": 2.5}
    with pytest.raises(
        ValueError,
        match=r"the prompt names \{title\}; there are folder, image, key, name, price, stem, ",
    ):
        fill("{title}", fields(second, {"title"}))


def test_damaged_parquet_files(tmp_path: Path) -> None:
    pictures = [random.Random(index).randbytes(5000) for index in range(6)]
    path = write_parquet(tmp_path / "p.parquet", {"image": pictures}, row_group_size=3)
    complete_file = path.read_bytes()
    for data in (b"", complete_file[: len(complete_file) // 2], b"text"):
        path.write_bytes(data)
        start_anew()
        (item,) = find_items([str(path)])
        assert item.key == "p.parquet" and decode(named_task("p", 0), None).errors[0]
        with pytest.raises(ValueError):
            open_item(item)
    broken = bytearray(complete_file)
    broken[100:4000] = bytes(3900)  # pages of the first group; the footer is intact
    path.write_bytes(broken)
    start_anew()
    errors = [
        decode(Task(item=item, prompts=(PICTURE_PROMPT,), tokens=0), None).errors[0] for item in find_items([str(path)])
    ]
    assert len(errors) == 6 and all(errors)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    start_anew()
    with pytest.raises(ValueError, match="pip install pyarrow"):
        find_items([str(tmp_path / "p.parquet")])


def test_metadata_beside_a_file(tree: Path) -> None:
    (tree / "a.json").write_text('{"title": "Ä", "name": "another", "nested": {"x": 1}, "none": null, "n": NaN}')
    (tree / "a.txt").write_bytes(b"\xef\xbb\xbfwords\r\n")
    (tree / "sub/c.json").write_text("{broken")
    (tree / "sub/c.txt").write_bytes(b"\xff")
    items = {item.key: item for item in find_items([str(tree)])}
    values = fields(items["a.jpg"], {"title"})
    assert (
        not {"none", "n", "nested"} & values.keys()
    )  # their texts "None", "nan" and "{'x': 1}" must not reach a prompt
    assert (values["title"], values["txt"], values["name"], values["stem"], values["folder"]) == (
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
