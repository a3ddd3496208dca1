"""README and docs: Python runs, commands exist, tables are those of the JSON files, the site builds."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from PIL import Image

import hf_vit_accel
from hf_vit_accel.tools.bench.measure import Row
from hf_vit_accel.tools.bench.report import document
from hf_vit_accel.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "benchmark")]

import chart  # noqa: E402
import tables  # noqa: E402
from media.processors import load_processor  # noqa: E402

README = ROOT / "README.md"
START = ROOT / "docs" / "index.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
WRITTEN = [README, *PAGES, ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md", *sorted((ROOT / "examples").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- run: (?P<needs>\w+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
PARAMETERS = inspect.signature(hf_vit_accel.patch).parameters


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of code on a page.

    Args:
        needs: "" for nothing, "gpu", or the parameter of `patch` that it shows.
        language: Its language.
        code: Its text.
    """

    needs: str
    language: str
    code: str


def blocks(path: Path, *languages: str) -> list[Block]:
    fences = FENCE.finditer(path.read_text())
    all_blocks = [Block(needs=fence["needs"] or "", language=fence["language"], code=fence["code"]) for fence in fences]
    return [block for block in all_blocks if block.language in languages]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Load tiny checkpoints in place of those that the pages name; put a picture into the working folder."""
    folder = ROOT / "examples" / "tiny_captioner"
    folders = {"Qwen/Qwen3-VL-8B-Instruct": folder / "qwen3_vl", "Qwen/Qwen2.5-VL-7B-Instruct": folder / "qwen2_5_vl"}
    processors = {name: load_processor(str(path)) for name, path in folders.items()}
    load: Callable[..., Any] = transformers.AutoModelForImageTextToText.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForImageTextToText,
        "from_pretrained",
        lambda name, **options: load(folders[name], **options),
    )
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", processors.__getitem__)
    monkeypatch.chdir(tmp_path)
    Image.linear_gradient("L").convert("RGB").save("photo.jpg")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def run(path: Path, code_blocks: list[Block], names: dict[str, Any]) -> dict[str, Any]:
    for block in code_blocks:
        exec(compile(block.code, name(path), "exec"), names)
    return names


def started() -> dict[str, Any]:
    """Run Getting started; return the names that all pages assume, such as the model and the picture."""
    names = run(START, blocks(START, "python")[:2], {"torch": torch})
    assert {"model", "processor", "inputs", "tokens"} <= names.keys()
    return names | {"images": [Image.open("photo.jpg")] * 2}


def test_the_readme_is_short_and_its_script_runs_as_it_stands(hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(README.read_text().splitlines()) <= 120
    code_blocks = blocks(README, "python")
    script = code_blocks[0]
    assert not any(block.needs for block in code_blocks) and script.code.count("\n") <= 20
    names = run(README, code_blocks, {})
    printed = capsys.readouterr().out
    assert "1 fast, 0 stock" in printed
    caption = printed.splitlines()[0]
    model, inputs, tokens = (names[key] for key in ("model", "inputs", "tokens"))
    assert caption and torch.equal(hf_vit_accel.unpatch(model).generate(**inputs, max_new_tokens=64), tokens)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name)
def test_python_of_the_docs_runs(path: Path, hub: None, group: None) -> None:
    code_blocks = blocks(path, "python")
    for block in code_blocks:
        compile(block.code, name(path), "exec")
        assert block.needs in ("", "gpu") or re.search(rf"\b{block.needs}=", block.code)
    runnable = [block for block in code_blocks if not block.needs or block.needs in PARAMETERS]
    run(path, runnable, started() if runnable else {})


@pytest.mark.gpu
@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name)
def test_python_of_the_docs_runs_on_a_gpu(path: Path, hub: None, group: None) -> None:
    names = started() | {"images": [Image.open("photo.jpg").resize((320, 320))] * 2}
    assert names["model"].device.type == "cuda"
    try:
        run(path, [block for block in blocks(path, "python") if block.needs in ("", "gpu", *PARAMETERS)], names)
    except hf_vit_accel.BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_say_which_parameters_are_planned(path: Path) -> None:
    shown = {block.needs for block in blocks(path, "python")} - {"", "gpu"}
    if shown:
        assert ("Planned for" in path.read_text()) == bool(shown - PARAMETERS.keys())


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    command = typer.main.get_command(app)
    seen = set()
    for path in WRITTEN:
        text = "".join(block.code for block in blocks(path, "sh", "bash")).replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            program = words[0] if words else ""
            seen.add(program)
            if program == "make":
                assert words[1] in targets, f"{name(path)}: {line}"
            elif program == "hf-vit-accel":
                subcommand = command.commands[words[1]]
                subcommand.make_context(words[1], words[2:])  # raises for an unknown option
            elif program in ("python", "accelerate"):
                files = [word for word in words if word.startswith("examples/") and word.endswith(".py")]
                assert all((ROOT / file).is_file() for file in files), f"{name(path)}: {line}"
    assert {"make", "hf-vit-accel", "python", "accelerate"} <= seen


@pytest.mark.parametrize("path", tables.PAGES, ids=name)
def test_tables_are_those_of_the_json_files(path: Path) -> None:
    text = path.read_text()
    assert tables.filled(text) == text, "stale: run make tables"
    assert text.count("<!-- table:") == text.count("<!-- end of table -->") == len(tables.PLACE.findall(text))


def test_the_chart_is_that_of_the_json_files(tmp_path: Path) -> None:
    """The image describes its bars, each of which is relative to the faster run of stock sdpa."""
    shown = chart.bars()
    with Image.open(chart.CHART) as image:
        assert image.info["Description"] == chart.shown(shown), "stale: run examples/benchmark/chart.py"
    cell = ("qwen3-vl-8b", "one page")
    files = ("plain.json", "towers.json")
    plain, every = (tables.times(tables.load(file))[cell] for file in files)
    stock = min(times["stock sdpa"]["ms"] for times in (plain, every))
    best = min(every[name]["ms"] for name in ("auto", "auto+graph"))
    drawn = every["stock flash_attention_3"]["ms"], plain["auto"]["ms"], best
    assert shown[cell[0]][cell[1]] == [(ms, stock / ms) for ms in drawn]
    pytest.importorskip("matplotlib")
    chart.draw(tmp_path / "again.png")
    with Image.open(tmp_path / "again.png") as image:
        assert image.info["Description"] == chart.shown(shown)


def test_the_balance_of_ranks_stands_beside_what_the_split_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    document = tables.load("data_parallel.json")
    for count, run in enumerate(document["runs"], 1):
        run["towers"] = [row | dict(balance_measured=1 + count / 100, balance=1.0) for row in run["towers"]]
    monkeypatch.setattr(tables, "load", lambda file: document)
    head, _, first, *rows = tables.data_parallel().splitlines()
    assert head.endswith("| 2 GPUs | slowest rank by mean (expected) | 4 GPUs | slowest rank by mean (expected) |")
    assert re.search(r"x\) \| 1\.01 \(1\.00\) \| [\d.]+ \([\d.]+x\) \| 1\.02 \(1\.00\) \|$", first), first
    assert all(row.count("|") == head.count("|") for row in rows if row.startswith("|")), "also where one was not run"


def test_every_table_is_shown_and_numbers_follow_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {place["name"] for path in tables.PAGES for place in tables.PLACE.finditer(path.read_text())}
    assert shown == set(tables.TABLES)
    load = tables.load

    def slower(file: str) -> dict[str, Any]:
        """Load a file in which all but stock takes twice as long."""
        document = load(file)
        for step in tables.steps(document).values():
            step["patched"] = {key: 2 * seconds for key, seconds in step["patched"].items()}
        for row in [*document.get("rows", []), *(row for run in document.get("runs", []) for row in run["towers"])]:
            for key in ("ms", "error", "patched", "graphs", "shared_ms", "per_second", "encode", "median"):
                if key in row and not str(row.get("contender")).startswith("stock"):
                    both = isinstance(row[key], dict)
                    row[key] = {way: 2 * ms for way, ms in row[key].items()} if both else 2 * row[key]
        return document

    before = {table: write() for table, write in tables.TABLES.items()}
    monkeypatch.setattr(tables, "load", slower)
    assert not [table for table, write in tables.TABLES.items() if write() == before[table]]


def test_incomplete_measurements_make_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out sizes or contenders that a heading names, or swap the rows of a pair."""
    load = tables.load

    def load_without(contender: str) -> Callable[[str], dict[str, Any]]:
        def load_others(file: str) -> dict[str, Any]:
            document = load(file)
            rows = document.get("rows", [])
            document["rows"] = [row for row in rows if row.get("contender") != contender or row["size"] == "16 x 512²"]
            return document

        return load_others

    for contender in ("auto", "stock flash_attention_3", "stock compile_blocks", "stock compile+graph"):
        monkeypatch.setattr(tables, "load", load_without(contender))
        with pytest.raises(KeyError, match=re.escape(contender)):
            tables.headline()
    document = load("ways.json")
    rows = document["rows"]
    swapped = [rows[0], rows[3], rows[2], rows[1], *rows[4:]]
    fell_back = [rows[0], rows[1] | {"calls": {"fast": 0, "stock": 7}}, *rows[2:]]
    for wrong in (swapped, fell_back):
        monkeypatch.setattr(tables, "load", lambda file, wrong=wrong: document | {"rows": wrong})
        with pytest.raises(ValueError, match="not a pair"):
            tables.ways()


def test_tables_take_what_bench_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed rows fill cells; skipped and wrong rows leave them empty, ours included."""

    def row(size: str, contender: str, ms: float | None, gb: float | None = None) -> Row:
        model = "qwen3-vl-8b"
        status = "skipped" if ms is None else "timed"
        return Row(
            model=model,
            size=size,
            patches=9,
            contender=contender,
            status=status,
            floor_ms=1,
            bound=1,
            ms=ms,
            peak_gb=gb,
        )

    rows = [row("small", "stock sdpa", 123.4, 4.25), row("small", "stock liger", None), row("small", "auto", 100, 2)]
    rows += [row("large", "stock sdpa", 30, 1), row("large", "stock compile_blocks", 20), row("large", "auto", None)]
    rows += [row("large", "auto+graph", 10, 1)]
    written = document(rows, dtype=torch.bfloat16, rounds=5, peak=None, train=True) | {"commit": "abc1234"}
    monkeypatch.setattr(tables, "load", lambda file: json.loads(json.dumps(written)))
    head, _, *cells, _, caption = tables.TABLES["training"]().splitlines()
    assert cells == [
        "| Qwen3-VL-8B | small | 9 | 123 (4.2) |  |  | 100 (2.0) |  |",
        "| Qwen3-VL-8B | large | 9 | 30.0 (1.0) |  | 20.0 |  | 10.0 |",
    ]
    assert head.count("|") == cells[0].count("|") and "commit abc1234" in caption and torch.__version__ in caption
    with pytest.raises(KeyError, match="auto"):  # no range over some of the sizes
        list(tables.gains("training.json", "auto", ("sdpa",)))
    written["rows"] = [row for row in written["rows"] if row["size"] == "small"]
    assert list(tables.gains("training.json", "auto", ("sdpa",))) == ["", "1.2x", ""]


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.parent != ROOT / "docs"], ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    """The build of the site checks the links of docs/."""
    for target in re.findall(r"\]\((?![a-z]+:)([^)]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), f"{target} in {name(path)}"
        heads = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w\s-]", "", head.replace("`", "")).strip().lower().replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, f"{target} in {name(path)}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="the documentation needs the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert process.returncode == 0 and "WARNING" not in process.stderr, process.stdout + process.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    missing = [public for public in hf_vit_accel.__all__ if f'id="hf_vit_accel.{public}"' not in api]
    assert not missing
    for path in PAGES:
        page = tmp_path / "site" / ("" if path == START else path.stem) / "index.html"
        assert "-8&lt;-" not in page.read_text(), f"{path.name}: a file that is not included"


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert not [path.name for path in PAGES if f": {path.name}\n" not in menu]


def test_the_home_is_named_in_one_place() -> None:
    """A fork, or the first release, changes it in pyproject.toml alone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a checkout")
    home = "github.com/hf-vit-accel"
    named = {file for file in listed if (ROOT / file).suffix in (".md", ".toml", ".yml", ".cff", ".py")}
    named = {file for file in named if home in (ROOT / file).read_text(errors="ignore")} - {name(Path(__file__))}
    assert named == {"pyproject.toml"}
