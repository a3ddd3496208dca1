"""Provide pictures, an output folder and models that load once to the tests of captioning."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from captioner.journal import Record
from programs import draw, encode
from read_once import read_once
from support_captioning import caption, counted, put, write_tar


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every checkpoint once."""
    read_once(monkeypatch)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Draw three scenes, one of them in a subfolder."""
    put(tmp_path / "photos", "a.png", "b.png", "0/c.png")
    return tmp_path / "photos"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a folder for records."""
    return tmp_path / "captions"


@pytest.fixture(scope="session")
def mixed_inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Create pictures, a damaged one, one whose name is no valid UTF-8, and shards."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    top = tmp_path_factory.mktemp("data")
    put(top / "photos", *(f"{number}.png" for number in range(9)), "deep/a.png", "latin\udce9.png")
    (top / "photos" / "cut.png").write_bytes(encode(draw(1)[0])[:100])
    write_tar(top / "b.tar", ("x.png", encode(draw(2)[0])), ("y.jpg", b""))
    pq.write_table(pa.table({"image": [encode(draw(3)[0]), encode(draw(4)[0])]}), top / "c.parquet")
    return [str(top / "photos"), str(top / "b.tar"), str(top / "c.parquet")]


@pytest.fixture(scope="session")
def alone(mixed_inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Counter[Record]:
    """Return the records of one undisturbed process."""
    output = tmp_path_factory.mktemp("alone")
    assert caption(mixed_inputs, output, "--batch-size=4").exit_code == 0
    return counted(output)
