"""Tables of README and docs, and README's chart, are those of the JSON files; SUPPORT.md says what is declared."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support_table import BLOCK, PAGES_WITH_BLOCKS, with_blocks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "writers"))

import headline  # noqa: E402
import tables  # noqa: E402
from documents import Document  # noqa: E402

README = ROOT / "README.md"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(file: str) -> Document:
    return dict(json.loads((ROOT / "benchmarks" / file).read_text()))


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


def test_readme_s_promise_is_what_its_tables_show() -> None:
    """Of both models: the largest speed-up of an answer, that of a batch that is embedded, those of training steps."""
    (line,) = [line for line in README.read_text().splitlines() if line.startswith("**Answers ")]
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
        shown += [max(ratios["answer"]), *ratios["embedding"], *steps]
    assert [float(number) for number in promised] == shown


def test_the_chart_is_computed_from_the_file() -> None:
    assert headline.CHART.read_text() == headline.chart(read("whole_call.json")), "stale: run make tables"
    assert f"]({headline.CHART.relative_to(ROOT)})" in README.read_text()


@pytest.mark.parametrize("table", tables.TABLES)
def test_a_table_names_the_one_commit_of_its_file(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one row, run or step was measured at another commit than its file says, there is no table."""
    file = tables.TABLES[table].file
    content = read(file)
    text = tables.TABLES[table].text()
    assert f"Measured at commit {content['commit']} on " in text and f"benchmarks/{file}`" in text
    parts = content.get("rows") or content["runs"]
    parts[-1]["commit"] = "0000bad"
    monkeypatch.setattr(tables, "load", lambda file: content)
    with pytest.raises(ValueError, match=f"mixes measurements of 0000bad and {content['commit']}"):
        tables.TABLES[table].text()


def test_every_table_is_shown() -> None:
    shown = {place["name"] for path in tables.PAGES for place in tables.PLACE.finditer(path.read_text())}
    assert shown == {*tables.DECLARED, *tables.TEXTS}


@pytest.mark.parametrize("path", PAGES_WITH_BLOCKS, ids=lambda path: path.name)
def test_a_page_says_what_is_declared(path: Path) -> None:
    text = path.read_text()
    assert with_blocks(text) == text, "stale: run make support"
    assert text.count("<!-- rows:") == text.count("<!-- end of rows -->") == len(BLOCK.findall(text)) > 0
