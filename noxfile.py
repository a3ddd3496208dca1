"""Run the sessions that take too long for every change: `make matrix` runs all, `nox -s NAME` runs one.

pyproject.toml names the versions (`tool.hf-vit-accel.tested`) and the Pythons (its classifiers). Workflows run the
sessions with the tag "ci" at every change, and those with the tag "nightly" every night.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "venv"

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TESTED = PROJECT["tool"]["hf-vit-accel"]["tested"]
STACKS = PROJECT["tool"]["hf-vit-accel"]["stacks"]
NEWEST = {package: TESTED[package][-1] for package in ("transformers", "torch")}
OLDEST = {package: TESTED[package][0] for package in ("transformers", "torch")}
PYTHONS = [name.rsplit(" ", 1)[1] for name in PROJECT["project"]["classifiers"] if ":: 3." in name]
SELF = ".[examples]"
GROUPS = PROJECT["dependency-groups"]
TEST = [*GROUPS["docs"], *(name for name in GROUPS["test"] if isinstance(name, str))]
TEST = [name for name in TEST if not name.startswith(("mypy", "ruff"))]
WRAPPERS = ["bitsandbytes", "liger-kernel", "peft", "torchao"]


def install(session: nox.Session, *packages: str, **versions: str) -> None:
    """Install this package, the packages of its tests and tested versions of transformers and torch.

    Args:
        session: the session
        packages: further packages
        versions: a version by package; by default the newest tested one
    """
    pinned = [f"{package}=={version}.*" for package, version in (NEWEST | versions).items()]
    session.install("-e", SELF, *TEST, *pinned, *packages)
    session.run("python", "-c", "import torch, transformers; print(torch.__version__, transformers.__version__)")


def run_suite(session: nox.Session, *arguments: str) -> None:
    """Run all tests in parallel."""
    options = ["-q", "-n", "auto", "--dist", "worksteal", "--hypothesis-profile=all"]
    session.run("pytest", *options, *arguments, *session.posargs)


@nox.session(tags=["ci"])
@nox.parametrize("transformers", TESTED["transformers"])
def transformers(session: nox.Session, transformers: str) -> None:
    """Run all tests with every tested version of transformers."""
    install(session, transformers=transformers)
    run_suite(session)


CORE = [f"tests/unit/test_{name}.py" for name in ("families", "loading", "proof", "tower", "checks")]


@nox.session(tags=["nightly"])
@nox.parametrize("transformers", TESTED["towers"])
def versions(session: nox.Session, transformers: str) -> None:
    """Run all tests, and every tower in every use, with transformers from the oldest to the newest.

    Left out are tests of what a version lacks: tests/support/lacking.py lists them with reasons. The uses of towers are
    recorded for the table of versions; `make support` writes it. PEFT and accelerate are the newest that install beside
    the version.
    """
    install(session, transformers=transformers)
    run_suite(session)
    matrix = ("pytest", "-q", "--matrix", "tests/integration/test_uses_by_version.py")
    session.run(*matrix, env={"RECORD_VERSIONS": "1"})


@nox.session(tags=["ci"])
@nox.parametrize("torch", TESTED["torch"][:-1])
def torch(session: nox.Session, torch: str) -> None:
    """Run all tests with every tested version of torch but the newest."""
    install(session, torch=torch)
    run_suite(session)


@nox.session(python=PYTHONS, tags=["ci"])
def python(session: nox.Session) -> None:
    """Run all tests with every Python."""
    install(session)
    run_suite(session)


@nox.session(tags=["ci"])
def oldest(session: nox.Session) -> None:
    """Run all tests with the oldest tested versions of transformers and torch."""
    install(session, **OLDEST)
    run_suite(session)


@nox.session(venv_backend="uv", tags=["ci"])
def floors(session: nox.Session) -> None:
    """Run the core of the tests with the lowest versions that pyproject.toml allows.

    pyarrow stays below 22: newer ones refuse numpy before 2.0 (pyarrow 26 does) without declaring it.
    """
    session.install("--resolution", "lowest-direct", "-e", ".[examples]")
    lowest = Path(session.create_tmp()) / "lowest.txt"
    freeze = ("uv", "pip", "freeze", "--exclude-editable")
    lowest.write_text(str(session.run(*freeze, silent=True, stderr=subprocess.DEVNULL)))  # newer uvs write to stderr
    session.install("-e", SELF, *TEST, "pyarrow<22", "--constraint", str(lowest))
    run_suite(session, *CORE)


@nox.session(default=False, tags=["nightly"])
@nox.parametrize("of", ["transformers", "torch"])
def coming(session: nox.Session, of: str) -> None:
    """Run all tests with transformers' main branch, or with torch's newest nightly build.

    The variable TORCH_NIGHTLY_INDEX names the package index of torch's nightly builds.
    """
    if of == "torch" and not os.environ.get("TORCH_NIGHTLY_INDEX"):
        session.error("set TORCH_NIGHTLY_INDEX to the index of torch's nightly builds, as pytorch.org gives it")
    install(session)
    if of == "transformers":
        session.install("transformers @ git+https://github.com/huggingface/transformers")
    else:
        session.install("--pre", "--upgrade", "torch", env={"PIP_INDEX_URL": os.environ["TORCH_NIGHTLY_INDEX"]})
    session.run("python", "-c", "import torch, transformers; print(torch.__version__, transformers.__version__)")
    run_suite(session)


@nox.session
@nox.parametrize("transformers", TESTED["transformers"][1:])
def ways(session: nox.Session, transformers: str) -> None:
    """Run all tests, those marked `matrix` included, with the packages that wrap models.

    Liger 0.8.5 works with transformers 5.17, but not with 5.23.
    """
    install(session, *WRAPPERS, transformers=transformers)
    run_suite(session, "--matrix")


@nox.session(tags=["nightly"])
def seeded(session: nox.Session) -> None:
    """Seed sixty faults one at a time, and see that the suite catches each."""
    install(session)
    session.run("python", "tests/seeded/run.py", *session.posargs)


@nox.session(tags=["nightly"])
@nox.parametrize("framework", list(STACKS))
def stacks(session: nox.Session, framework: str) -> None:
    """Run a framework's own programs, stock and by the recipes of tests/stacks; record the table of frameworks.

    The environment has the transformers that the framework asks for. `make support` writes the table.
    """
    session.install("-e", SELF, "hypothesis", "pytest", "torchvision", *STACKS[framework])
    session.run("python", "-c", "import torch, transformers; print(torch.__version__, transformers.__version__)")
    shims = {"PYTHONPATH": str(ROOT / "tests" / "stacks" / "site")}
    programs = ("pytest", "-q", "-W", "default", f"tests/stacks/test_{framework}.py")
    session.run(*programs, *session.posargs, env={"RECORD_STACKS": "1"} | shims)


@nox.session
@nox.parametrize("transformers", TESTED["transformers"])
def upstream(session: nox.Session, transformers: str) -> None:
    """Run transformers' own model tests, stock beside patched.

    `-- CHECKOUT` runs its suites of single models, which a source distribution lacks.
    """
    suites = ["requests", "datasets"] if session.posargs else []  # the suites of single models import them
    install(session, "parameterized", *suites, transformers=transformers)
    if session.posargs:
        source = Path(session.posargs[0])
    else:
        folder = Path(session.create_tmp())
        package = f"transformers=={transformers}.*"
        session.run("pip", "download", "-q", "--no-deps", "--no-binary", "transformers", "-d", str(folder), package)
        archive = max(folder.glob("transformers-*.tar.gz"), key=lambda path: path.stat().st_mtime)
        session.run("tar", "xzf", str(archive), "-C", str(folder), external=True)
        source = folder / archive.name.removesuffix(".tar.gz")
    session.run("python", "tests/upstream/compare.py", str(source))
