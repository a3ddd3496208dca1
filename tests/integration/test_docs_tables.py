"""Tables of README and docs, and README's chart: all are those of the JSON files in `benchmarks`."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "writers"))

import documents  # noqa: E402
import headline  # noqa: E402
import summary  # noqa: E402
import tables  # noqa: E402
from documents import Document  # noqa: E402

README = ROOT / "README.md"
SVG = "{http://www.w3.org/2000/svg}"
COMPARED = re.compile(r"(?P<stock>[\d.]+) → (?P<ours>[\d.]+) ms \((?P<speedup>[\d.]+)x\)")
WAYS = {"`patch`": "patched", "`patch`, `graphed_decoding`": "decoding"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(file: str) -> Document:
    return dict(json.loads((ROOT / "benchmarks" / file).read_text()))


def four_digits(number: float) -> str:
    """Write a number as README's table does, by another way."""
    return f"{number:.0f}" if number >= 999.95 else f"{number:.1f}" if number >= 99.995 else f"{number:.2f}"


@pytest.mark.parametrize("path", tables.PAGES, ids=name)
def test_tables_are_those_of_the_json_files(path: Path) -> None:
    text = path.read_text()
    assert tables.filled(path) == text, "stale: run make tables"
    assert text.count("<!-- table:") == text.count("<!-- end of table -->") == len(tables.PLACE.findall(text))
    assert text.count("<!-- recipe:") == len(tables.RECIPE.findall(text))


def test_every_recipe_is_shown_and_run() -> None:
    """docs/migrate.md shows each file, and a test of a stack reads it."""
    page = (ROOT / "docs" / "migrate.md").read_text()
    shown = {place["file"] for place in tables.RECIPE.finditer(page)}
    assert shown == {file.name for file in tables.stacks.RECIPES.iterdir()}
    programs = "".join(path.read_text() for path in (ROOT / "tests" / "stacks").glob("test_*.py"))
    words = set(re.findall(r'"(\w+)(?:\.py|\.diff)?"', programs))
    assert {name.partition(".")[0] for name in shown} <= words


def rows_of_readme(table: str = "headline") -> list[list[str]]:
    """Return the cells of a table of README, the head first."""
    place = next(place for place in tables.PLACE.finditer(README.read_text()) if place["name"] == table)
    lines = [line for line in place[0].splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def expected_cells(case: str, way: str, model: str) -> list[str]:
    """Compute a comparison, and the speed-up over FlashAttention-3, from the rows of the JSON file.

    Args:
        case: what is timed, as README says it
        way: the key of our time
        model: the model's name, as README spells it
    """
    for row in read("whole_call.json")["rows"]:
        names = {0: "vision tower", 1: "first token"}
        timed = names.get(row["tokens"], f"answer of {row['tokens']} tokens")
        sizes = {
            "one 1024²": "one picture (~950x950)",
            "32 x 34x46": "32 pictures (~500x700)",
        }
        if row["model"].lower() == model.lower() and case == f"{timed}, {sizes[row['size']]}":
            stock = row["stock"]
            ours = row[way]
            comparison = f"{four_digits(stock)} → {four_digits(ours)} ms ({stock / ours:.1f}x)"
            flash = row["flash_attention_3"]
            mark = "\\*" if f"{flash / ours:.1f}" > f"{stock / ours:.1f}" else ""
            return [comparison, f"{flash / ours:.1f}x{mark}"]
    raise AssertionError(f"no row for {case} of {model}")


def test_readme_s_table_is_computed_from_the_file_to_a_digit() -> None:
    head, *rows = rows_of_readme()
    models = head[2::2]
    assert len(models) == 2 and head[3::2] == ["gain over FlashAttention-3"] * 2 and 1 <= len(rows) <= 5
    for case, way, *cells in rows:
        first, second = (expected_cells(case, WAYS[way], model) for model in models)
        assert cells == [*first, *second]
    assert "not timed" not in README.read_text()
    is_marked = any(cell.endswith("x\\*") for row in rows for cell in row)
    assert ("\n\\* Here FlashAttention-3 is slower than sdpa." in README.read_text()) == is_marked


def test_readme_s_promise_is_what_its_tables_show() -> None:
    """Of both models: the largest speed-up of an answer, that of a batch that is embedded, those of training steps."""
    (line,) = [line for line in README.read_text().splitlines() if line.startswith("**Answers up to ")]
    promised = re.findall(r"([\d.]+)x", line)
    shown = []
    for model in (0, 1):
        ratios: dict[str, list[float]] = {"answer": [], "embedding": [], "`Trainer`": []}
        cells = [(row[0], row[2 + 2 * model]) for row in rows_of_readme()[1:]]
        cells += [(row[0], row[2 + model]) for row in rows_of_readme("beside_the_headline")[1:]]
        for job, cell in cells:
            if job.split(",")[0].split()[0] in ratios:
                ratios[job.split(",")[0].split()[0]] += [float(x) for x in re.findall(r" → .*\(([\d.]+)x\)", cell)]
        steps = ratios["`Trainer`"]
        shown += [max(ratios["answer"]), *ratios["embedding"], min(steps), max(steps)]
    assert [float(number) for number in promised] == shown


def test_readme_says_how_fast_captions_are_beside_vllm() -> None:
    """The row and the bullet, from the file by another way."""
    rates = {
        (row["model"], row["tokens"], row["side"]): row["pictures/s"]
        for row in read("beside_vllm.json")["rows"]
        if row["job"] == "captioning"
    }
    head, row, *_ = rows_of_readme("beside_the_headline")
    (bullet,) = [line for line in README.read_text().splitlines() if line.startswith("- You [caption by vLLM")]
    for name, cell in list(zip(head, row, strict=True))[2:4]:
        ratio = rates[name.lower(), 32, "ours"] / rates[name.lower(), 32, "vllm"]
        assert cell.endswith(f"({ratio:.2f}x)")
        ratios = [rates[name.lower(), tokens, "ours"] / rates[name.lower(), tokens, "vllm"] for tokens in (1, 32, 128)]
        gain = f"{name} gains {round(100 * min(ratios)) - 100}% to {round(100 * max(ratios)) - 100}%"
        assert (gain in bullet) == (max(ratios) < 1.05)


def test_readers_who_divide_the_times_of_readme_get_its_speedups() -> None:
    comparisons = COMPARED.findall(README.read_text())
    assert len(comparisons) >= 8
    for stock, ours, speedup in comparisons:
        assert f"{float(stock) / float(ours):.1f}" == speedup


def test_fp32_weights_under_autocast_hold_most_as_the_page_says() -> None:
    of_graphs = {}
    for row in read("ways.json")["rows"]:
        if row["size"] == "one 448²" and "total_gb" in row and row["way"] != "DDP":
            of_graphs[row["model"], row["way"]] = row["total_gb"]["default"] - row["total_gb"]["without graphs"]
    assert max(of_graphs, key=of_graphs.get)[1] == "autocast, fp32 weights"


def test_the_chart_is_computed_from_the_file_and_agrees_with_the_table() -> None:
    drawn = headline.CHART.read_text()
    assert drawn == headline.chart(read("whole_call.json")), "stale: run make tables"
    assert f"]({headline.CHART.relative_to(ROOT)})" in README.read_text()
    elements = list(ET.fromstring(drawn))
    texts = [element.text for element in elements if element.tag == f"{SVG}text"]
    lengths = [float(element.attrib["width"]) for element in elements if element.tag == f"{SVG}rect"]
    head, *rows = rows_of_readme()
    in_table = {(row[0], model, cell) for row in rows for model, cell in zip(head[2::2], row[2::2], strict=True)}
    speedups = []
    for model in head[2::2]:
        start = texts.index(model)
        for case, comparison in (texts[start + 1 : start + 3], texts[start + 3 : start + 5]):
            assert (case, model, comparison) in in_table
            speedups.append(float(COMPARED.fullmatch(comparison)["speedup"]))
    assert len(speedups) == len(lengths)
    unit = max(lengths) / max(speedups)
    assert lengths == pytest.approx([speedup * unit for speedup in speedups], abs=0.1 * unit)
    assert any(read("whole_call.json")["commit"] in text for text in texts)


@pytest.fixture
def complete() -> Document:
    """Return a file with everything that whole_call.py times for two models."""
    rows = []
    for model in ("qwen2.5-vl-7b", "qwen3-vl-8b"):
        for size in ("one 1024²", "32 x 34x46"):
            for tokens in (0, 1, 64, 256):
                row = dict(
                    model=model, size=size, tokens=tokens, stock=100.0 * (tokens + 1), patched=50.0 * (tokens + 1)
                )
                rows.append(row if tokens == 0 else row | {"decoding": 20.0 * (tokens + 1)})
    return read("whole_call.json") | {"rows": rows}


@pytest.mark.parametrize("table", tables.TABLES)
def test_a_table_of_two_commits_is_refused(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, run or step was measured at another commit than its file says."""
    mixed = read(tables.TABLES[table].file)
    parts = mixed.get("rows") or mixed["runs"]
    parts[-1]["commit"] = "0000bad"
    monkeypatch.setattr(tables, "load", lambda file: mixed)
    with pytest.raises(ValueError, match=f"mixes measurements of 0000bad and {mixed['commit']}"):
        tables.TABLES[table].text()


def test_the_chart_and_the_summary_of_two_commits_are_refused(
    complete: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete["rows"][0]["commit"] = "0000bad"
    with pytest.raises(ValueError, match="mixes measurements"):
        headline.chart(complete)
    monkeypatch.setattr(headline, "load", lambda file: complete)
    with pytest.raises(ValueError, match="mixes measurements"):
        headline.text()
    mixed = read("towers.json")
    mixed["rows"][0]["commit"] = "0000bad"
    monkeypatch.setattr(summary, "load", lambda file: mixed if file == "towers.json" else read(file))
    with pytest.raises(ValueError, match=r"towers\.json mixes measurements"):
        summary.text()


@pytest.mark.parametrize("table", tables.TABLES)
def test_a_table_reads_one_file_and_names_its_commit(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def load(file: str) -> Document:
        opened.append(file)
        return read(file)

    for module in (tables, summary, headline, documents):
        monkeypatch.setattr(module, "load", load, raising=False)
    text = tables.TABLES[table].text()
    assert opened == [tables.TABLES[table].file]
    assert f"Measured at commit {read(opened[0])['commit']} on " in text and f"benchmarks/{opened[0]}`" in text


def slower(file: str) -> Document:
    """Load a file in which all but stock takes twice as long, and twice the memory."""
    measured = read(file)
    for row in [*measured.get("rows", []), *(row for run in measured.get("runs", []) for row in run["towers"])]:
        for key in ("ms", "error", "patched", "graphs", "shared_ms", "encode", "median", "peak_gb"):
            if row.get(key) is not None and not str(row.get("contender")).startswith("stock"):
                both = isinstance(row[key], dict)
                row[key] = {way: 2 * ms for way, ms in row[key].items()} if both else 2 * row[key]
        for contender, of_contender in row.get("contenders", {}).items():
            of_contender["ms"] *= 1 if contender == "stock" else 2
        if row.get("way") != "stock" and "changed" in row:
            row["changed"] = 2 * row["changed"] + 1
    return measured


def test_every_table_is_shown_and_numbers_follow_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {place["name"] for path in tables.PAGES for place in tables.PLACE.finditer(path.read_text())}
    assert shown == {*tables.DECLARED, *tables.TEXTS}
    others = {"options", "beside_vllm", "captioning_verdict"}  # ratios that stay
    others |= {"stacks", "versions_that_ran"}  # no measurement
    others |= tables.DECLARED.keys() - tables.TABLES.keys()
    before = {table: tables.text_of(table) for table in shown - others}
    lines = before["summary"].splitlines()
    monkeypatch.setattr(tables, "load", slower)
    monkeypatch.setattr(summary, "load", slower)
    monkeypatch.setattr(headline, "load", slower)
    assert not [table for table in before if tables.text_of(table) == before[table]]
    assert not set(lines) & set(tables.text_of("summary").splitlines())


def test_a_file_that_is_missing_leaves_out_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(tables.TABLES, "liger")
    assert tables.text_of("liger") == "Not measured: `liger.json` is missing.\n"


def load_without(contender: str) -> Callable[[str], Document]:
    def load_others(file: str) -> Document:
        measured = read(file)
        rows = measured.get("rows", [])
        measured["rows"] = [row for row in rows if row.get("contender") != contender or row["size"] == "16 x 512²"]
        return measured

    return load_others


@pytest.mark.parametrize(
    "contender", ["auto", "stock flash_attention_3", "stock compile_blocks", "stock compile+graph"]
)
def test_a_summary_over_some_of_the_sizes_is_refused(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "load", load_without(contender))
    with pytest.raises(KeyError, match=re.escape(contender)):
        summary.text()
