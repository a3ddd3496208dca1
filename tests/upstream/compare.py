"""Runs transformers' own model tests on stock towers and on patched ones, and compares what comes out test by test.

    python tests/upstream/compare.py transformers-5.23.0            # an unpacked source distribution
    python tests/upstream/compare.py path/to/checkout-of-v5.23.0    # with the suites of the single models

Either is taken as it stands: the transformers that is tested is the one in its `src`, not an installed one. Install
what that version needs (its bound of huggingface-hub), and what the suites import: parameterized; in a checkout
requests and datasets, too. It is slow, and `-- -k NAME` hands anything to pytest. No network is used.

Exits with 1 where a test comes out otherwise on patched towers: another outcome, or an error of another class.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SUITES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""What the common tests import and source distributions leave out."""


def prepare(source: Path) -> list[str]:
    """The tests to run in a source tree, after what a source distribution lacks was written there."""
    tests = source / "tests"
    models = [tests / "models" / name for name in SUITES]
    if all(model.is_dir() for model in models):
        return [str(path.relative_to(source)) for model in models for path in model.glob("test_modeling_*.py")]
    for name, text in STAND_INS.items():
        path = tests / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        if not path.exists():
            path.write_text(text)
    (tests / "__init__.py").touch()
    shutil.copy(HERE / "suites.py", tests / "test_modeling_towers.py")
    return ["tests/test_modeling_towers.py"]


def environment(source: Path) -> dict[str, str]:
    """The variables with which a Python takes transformers and its tests from the tree, and ours from here."""
    paths = [source / "src", source, HERE, HERE.parent, HERE.parent.parent, os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, paths))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def version(source: Path) -> str:
    """Which transformers is tested, and where it lies. Raises SystemExit if that is not in the tree."""
    code = "import transformers; print(transformers.__version__, transformers.__file__)"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment(source), check=True, capture_output=True, text=True).stdout.strip()
    if not Path(said.partition(" ")[2]).is_relative_to(source):
        raise SystemExit(f"expected transformers in {source}, got {said}; give the root of its source tree")
    return said


def start(source: Path, tests: list[str], *, patched: bool, more: list[str]) -> subprocess.Popen[bytes]:
    """Begin the tests; what they say goes to a file beside the report."""
    report = source / f"report-{'patched' if patched else 'stock'}.xml"
    report.unlink(missing_ok=True)
    plugin = ["-p", "patched"] if patched else []
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", f"--junitxml={report}", *plugin, *more, *tests]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={source}"]
    with report.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=source, env=environment(source), stdout=log, stderr=log)


@dataclass(frozen=True)
class Outcome:
    """What came of one test. message: begins with the class of the error, where there was one."""

    kind: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.error}".strip()

    @property
    def error(self) -> str:
        """The class of the error; messages may hold addresses and temporary paths."""
        return "" if self.kind == "skipped" else self.message.partition(":")[0].strip()


def outcomes(report: Path) -> dict[str, Outcome]:
    """Outcome by test."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = Outcome(bad[0].tag, bad[0].get("message", "")) if bad else Outcome("passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("more", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    tests = prepare(source)
    print(f"transformers {version(source)}")
    found = []
    runs = [start(source, tests, patched=patched, more=arguments.more) for patched in (False, True)]
    for name, process in zip(("stock", "patched"), runs, strict=True):
        code, report = process.wait(), source / f"report-{name}.xml"
        if code not in (0, 1) or not report.exists():
            raise SystemExit(f"the tests of {name} towers ended with {code}: {report.with_suffix('.log').read_text()}")
        found.append(outcomes(report))
        summary = report.with_suffix(".log").read_text().splitlines()
        print(
            f"{name}: {dict(Counter(outcome.kind for outcome in found[-1].values()))}",
            *(line for line in summary if "towers patched" in line),
        )
    stock, patched = found
    names = sorted(stock.keys() | patched.keys())
    different = [name for name in names if str(stock.get(name)) != str(patched.get(name))]
    for name in different:
        print(f"{name}: {stock.get(name)} on stock, {patched.get(name)} on patched towers")
    if different or not any(outcome.kind == "passed" for outcome in stock.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
