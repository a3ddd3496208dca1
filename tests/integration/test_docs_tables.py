"""Tables of README and docs, and README's chart, are those of the JSON files; SUPPORT.md says what is declared."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "writers"))

import chart  # noqa: E402
import tables  # noqa: E402
from documents import Document  # noqa: E402
from support_table import BLOCK, PAGES_WITH_BLOCKS, with_blocks  # noqa: E402

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


def rows_of_readme(table: str) -> list[list[str]]:
    """Return the cells of a table of README, the head first."""
    place = next(place for place in tables.PLACE.finditer(README.read_text()) if place["name"] == table)
    lines = [line for line in place[0].splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("model", "columns"), [("Qwen2.5-VL-7B", (2, 2)), ("Qwen3-VL-8B", (4, 3))])
def test_readme_s_gains_are_those_of_its_jobs(model: str, columns: tuple[int, int]) -> None:
    """An answer about one picture, a batch that is embedded, both training steps, and captions."""
    [gains] = [row[1:] for row in rows_of_readme("gains") if row[0] == model]
    jobs = rows_of_readme("jobs")
    other = next(index for index, row in enumerate(jobs[1:], 1) if row[0] == "job")  # the head of the second table
    assert jobs[0][columns[0]] == jobs[other][columns[1]] == model
    shown = [row[columns[0]] for row in jobs[1:other] if re.match("answer .*, one picture", row[0])]
    for job in ("embedding", "`Trainer`", "captions"):
        shown += [row[columns[1]] for row in jobs[other + 1 :] if row[0].startswith(job)]
    assert gains == [re.search(r" → .*\(([\d.]+x)\)", cell)[1] for cell in shown]  # type: ignore[index]


MEASURED = re.compile(r"(?<![A-Za-z\d.])\d[\d.,]*\s?(?:x|ms|%|s|h|[kMG]i?B|times)(?![\w²])")
NO_PROSE = re.compile(r"```.*?```|<!-- table:.*?<!-- end of table -->|^\|.*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def test_measured_numbers_stand_in_tables() -> None:
    """A sentence with such a number would go stale with the next measurement."""
    for path in (README, ROOT / "docs" / "benchmarks.md"):
        lines = NO_PROSE.sub("", path.read_text()).splitlines()
        assert not [line for line in lines if MEASURED.search(line)], name(path)
    assert all(MEASURED.search(line) for line in ("Answers 4.5x as fast", "in 3 ms.", "7.5% more", "20 GB", "2 times"))


def test_the_chart_is_computed_from_the_file() -> None:
    assert chart.CHART.read_text() == chart.chart(read("whole_call.json")), "stale: run make tables"
    assert f"]({chart.CHART.relative_to(ROOT)})" in README.read_text()


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


def test_recorded_commands_name_scripts() -> None:
    commands = [json.loads(path.read_text())["command"] for path in (ROOT / "benchmarks").glob("*.json")]
    scripts = [re.findall(r"\S+\.py", command) for command in commands]
    assert all(names and (ROOT / names[0]).exists() for names in scripts), scripts


def test_every_table_is_shown() -> None:
    shown = {place["name"] for path in tables.PAGES for place in tables.PLACE.finditer(path.read_text())}
    assert shown == {*tables.DECLARED, *tables.TEXTS}


@pytest.mark.parametrize("path", PAGES_WITH_BLOCKS, ids=lambda path: path.name)
def test_a_page_says_what_is_declared(path: Path) -> None:
    text = path.read_text()
    assert with_blocks(text) == text, "stale: run make support"
    assert text.count("<!-- rows:") == text.count("<!-- end of rows -->") == len(BLOCK.findall(text)) > 0
