"""Releases: the wheel and sdist as built, versions and dates that agree, workflows that name existing commands."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import hf_vit_accel

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SOURCES = {
    str(path.relative_to(ROOT)) for path in (ROOT / "hf_vit_accel").rglob("*") if path.suffix in (".py", ".typed")
}
MIB = 1 << 20


def build(source: Path, target: Path, *kinds: str) -> list[Path]:
    pytest.importorskip("hatchling", reason="building needs hatchling, which the group `test` installs")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *kinds]
    process = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return sorted(target.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"))
    return wheel, sdist


def test_the_wheel_holds_the_package_and_no_more(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert all(archive.read(name) == (ROOT / name).read_bytes() for name in SOURCES)
        (scripts,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    info = f"hf_vit_accel-{hf_vit_accel.__version__}.dist-info"
    others = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert names == SOURCES | {f"{info}/{name}" for name in others}
    assert all(f"{name} = {place}" in scripts for name, place in PROJECT["scripts"].items())
    assert wheel.stat().st_size < MIB


def test_the_sdist_is_small_and_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    assert sdist.stat().st_size < MIB
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # 3.11.4 has it
    (source,) = tmp_path.iterdir()
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    others = ("pyproject.toml", "build_readme.py", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore")
    assert names == SOURCES | set(others)
    (again,) = build(source, tmp_path / "dist", "-t", "wheel")
    with zipfile.ZipFile(again) as ours, zipfile.ZipFile(wheel) as theirs:
        assert {name: ours.read(name) for name in ours.namelist()} == {
            name: theirs.read(name) for name in theirs.namelist()
        }


def test_the_metadata_says_what_an_index_shows(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode())
    assert (fields["Name"], fields["Version"]) == ("hf-vit-accel", hf_vit_accel.__version__)
    assert fields["License-Expression"] == "Apache-2.0" and fields["Requires-Python"] == PROJECT["requires-python"]
    urls = dict(url.split(", ", 1) for url in fields.get_all("Project-URL", []))
    assert fields["Author"] == PROJECT["authors"][0]["name"] and "Homepage" in urls
    assert urls == PROJECT["urls"] and all(url.startswith(urls["Repository"]) for url in urls.values())
    assert fields["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text()
    shown = str(fields.get_payload())
    home = urls["Repository"]
    assert not re.search(r"^\[[^\]]+\]: |<(img|a)\b", readme, re.MULTILINE), "only inline links become absolute"
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    assert not [link for link in links if "/blob/" in link and link.endswith((".png", ".svg"))]
    version = re.escape(hf_vit_accel.__version__)
    relative = re.sub(re.escape(home) + f"/(raw|blob)/v{version}/", "", shown)
    assert relative.replace(f"{home}/actions/", "../../actions/").strip() == readme.strip()


def test_version_changelog_and_citation_agree() -> None:
    """A released version has a date; a .dev version has none."""
    version, _, development = hf_vit_accel.__version__.partition(".dev")
    newest = re.search(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version
    assert newest[2] == "unreleased" if development else re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_vit_accel.__version__ and ("date-released" in citation) == (not development)
    assert citation["license"] == PROJECT["license"] and {"cff-version", "message", "title", "authors"} <= set(citation)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded_and_may_do_little(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert "timeout-minutes" in job, name
        assert all(re.search(r"@(v\d+|release/v\d+)$", step["uses"]) for step in job["steps"] if "uses" in step)
        permissions = {"publish": {"id-token": "write"}, "report": {"issues": "write"}}.get(name)
        assert job.get("permissions") == permissions, name
