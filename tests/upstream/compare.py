"""Run transformers' own model tests on stock and on patched towers, and compare the outcome of every test.

    python tests/upstream/compare.py transformers-5.23.0            # an unpacked source distribution
    python tests/upstream/compare.py path/to/checkout-of-v5.23.0    # with the suites of the single models

The transformers in the tree's `src` is tested, not an installed one. Install the packages that this version needs (its
bound of huggingface-hub) and that the suites import: parameterized, and for a checkout also requests and datasets. The
run is slow and uses no network. `-- -k NAME` passes arguments to pytest.

The script exits with 1 if a test has another outcome on patched towers, or an error of another class.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
SUITES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Files that the common tests import and source distributions lack."""


def prepare(source: Path) -> list[str]:
    """Write the files that a source distribution lacks; return the tests to run."""
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
    """Return variables that make Python import transformers and its tests from the tree, and ours from here."""
    folders = [source / "src", source, HERE, HERE.parent, HERE.parent.parent, os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(str(folder) for folder in folders)
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def version(source: Path) -> str:
    """Return the version and the file of the tested transformers; leave if the file is not in the tree."""
    code = "import transformers; print(transformers.__version__, transformers.__file__)"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=environment(source), check=True, capture_output=True, text=True)
    tested = process.stdout.strip()
    if not Path(tested.partition(" ")[2]).is_relative_to(source):
        raise SystemExit(f"Python imports transformers {tested}, not from {source}. Give the root of its source tree.")
    return tested


def start(source: Path, tests: list[str], *, patched: bool, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start the tests in the background. The output of the process goes to a file beside the report."""
    report = source / f"report-{'patched' if patched else 'stock'}.xml"
    report.unlink(missing_ok=True)
    plugin = ["-p", "patched"] if patched else []
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", f"--junitxml={report}", *plugin, *arguments, *tests]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={source}"]
    with report.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=source, env=environment(source), stdout=log, stderr=log)


def outcomes(report: Path) -> dict[str, str]:
    """Read the outcome of every test from a report: "passed", or the name of the element and the class of the error.

    The rest of a message is not compared: it may hold addresses and temporary paths.
    """
    by_test = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = "passed"
        for child in case:
            if child.tag == "skipped":
                outcome = child.tag
            elif child.tag in ("failure", "error"):
                outcome = f"{child.tag} {child.get('message', '').partition(':')[0].strip()}"
        by_test[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return by_test


def main() -> None:
    """Run the tests on stock and on patched towers, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    source = options.source.resolve()
    tests = prepare(source)
    print(f"transformers {version(source)}")
    runs = {
        "stock": start(source, tests, patched=False, arguments=options.arguments),
        "patched": start(source, tests, patched=True, arguments=options.arguments),
    }
    results = {}
    for name, process in runs.items():
        code = process.wait()
        report = source / f"report-{name}.xml"
        if code not in (0, 1) or not report.exists():
            raise SystemExit(f"the tests of {name} towers ended with {code}: {report.with_suffix('.log').read_text()}")
        results[name] = outcomes(report)
        counts = Counter(outcome.partition(" ")[0] for outcome in results[name].values())
        lines = report.with_suffix(".log").read_text().splitlines()
        print(f"{name}: {dict(counts)}", *(line for line in lines if "towers patched" in line))
    stock = results["stock"]
    patched = results["patched"]
    names = sorted(stock.keys() | patched.keys())
    different = [name for name in names if stock.get(name) != patched.get(name)]
    for name in different:
        print(f"{name}: {stock.get(name)} on stock, {patched.get(name)} on patched towers")
    if different or "passed" not in stock.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
