"""Run a framework's own program on a tiny captioner, stock and by a recipe of tests/stacks/recipes, and compare.

docs/migrate.md shows the recipes. A test runs the old side of a diff, which is stock, and its new side. Results that
are equal and fast are recorded for SUPPORT.md and README where RECORD_STACKS is set, as `nox -s stacks` does.
"""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from tiny import relative_error
from torch import Tensor, nn

import hf_vit_accel

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).parents[1] / "stacks.json"
"""Framework -> job -> its recipe, and runs with the oldest and the newest versions: date, results of every model."""
REQUIREMENTS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hf-vit-accel"][
    "stacks"
]
"""Framework -> what its environment installs. Its programs are in `tests/stacks/test_NAME.py`."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
every_family = pytest.mark.parametrize("family", FAMILIES)
Checkpoint = Callable[[str], str]
"""Returns the path of a tiny captioner by its family, as the fixture `checkpoint` does."""
RECIPES = ROOT / "tests" / "stacks" / "recipes"
Names = dict[str, Any]
Result = dict[str, float]
"""The number of fast calls, and the relative difference from stock."""


# --- The recipes ---


@dataclass(frozen=True)
class Recipe:
    """A diff: the code of a user before and after."""

    stock: str
    patched: str

    def run(self, *, patched: bool, names: Names, **replaced: str) -> Names:
        """Run the new or the old side of the recipe; return all names, with those that the code defines.

        It gets the names that it assumes, such as the path of a model. Some words of it may be replaced by others.
        """
        code = self.patched if patched else self.stock
        for word, other in replaced.items():
            assert word in code, f"the recipe has no {word!r}"
            code = code.replace(word, other)
        names = dict(names)
        exec(compile(code, "recipe", "exec"), names)
        return names


def read_recipe(file: str) -> str:
    return (RECIPES / file).read_text()


def recipe(name: str) -> Recipe:
    """Return the recipe `NAME.diff`."""
    lines = read_recipe(f"{name}.diff").splitlines()
    stock, patched = ("\n".join(line[2:] for line in lines if (line[:1] or " ") in side) for side in (" -", " +"))
    return Recipe(stock, patched)


# --- Tiny models and pictures ---


def save_captioner(family: str, folder: Path) -> str:
    """Save a tiny captioner of examples/ in fp32, with its processor; return its path."""
    source = ROOT / "tests" / "tiny_captioner" / family
    shutil.copytree(source, folder, dirs_exist_ok=True)
    model = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


def pictures(count: int) -> list[Image.Image]:
    sizes = [(120, 90), (64, 200), (310, 100), (150, 150)]
    random = np.random.default_rng(0)
    drawn = []
    for index in range(count):
        width, height = sizes[index % len(sizes)]
        coarse = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        drawn.append(Image.fromarray(coarse).resize((width, height)))
    return drawn


QUESTION = "describe this picture"
ANSWER = "a small red circle ."


def inputs_of(processor: Any, picture: Image.Image) -> Names:
    """Return the inputs of a model for a question about a picture."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return dict(processor(text=[text], images=[picture], return_tensors="pt"))


def rows_of_captions(folder: Path, question: object = f"<image>{QUESTION}", answer: object = ANSWER) -> list[Names]:
    """Save pictures in a folder; return a row for each: its path, and a question with its answer."""
    rows = []
    for index, picture in enumerate(pictures(8)):
        file = folder / f"{index}.png"
        picture.save(file)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": [str(file)]})
    return rows


def write_rows(rows: list[Names], file: Path) -> str:
    """Write a row of JSON a line; return the path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def short_training(folder: Path, **options: Any) -> Names:
    """Return arguments of a few steps on the CPU for transformers' Trainer and those that inherit from it."""
    fixed = {"output_dir": str(folder), "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True}
    return fixed | {"report_to": [], "save_strategy": "no", "disable_tqdm": True} | options


def losses(log: Sequence[Mapping[str, float]]) -> Tensor:
    """Return the losses that a transformers Trainer logged."""
    return torch.tensor([entry["loss"] for entry in log if "loss" in entry], dtype=torch.float64)


# --- Results ---


def calls_of(*models: nn.Module) -> tuple[int, int, list[str]]:
    """Return the fast and the stock calls of all towers, and the reasons for stock."""
    towers = [tower for model in models for tower in hf_vit_accel.status(model).towers]
    reasons = [reason for tower in towers for reason in (*tower.fallbacks, *tower.against_fast)]
    fast_calls = sum(tower.calls for tower in towers)
    stock_calls = sum(tower.stock_calls for tower in towers)
    return fast_calls, stock_calls, list(dict.fromkeys(reasons))


def expect_same_and_fast(stock: Tensor, patched: Tensor, *models: nn.Module, bound: float = 1e-4) -> Result:
    """Expect results of stock, up to a relative difference, and from the patched models' `status` only fast calls."""
    difference = expect_same(stock, patched, bound)
    fast_calls, stock_calls, reasons = calls_of(*models)
    assert fast_calls > 0 and stock_calls == 0 and not reasons, (fast_calls, stock_calls, reasons)
    return {"fast": fast_calls, "difference": difference}


def expect_same(stock: Tensor, patched: Tensor, bound: float) -> float:
    """Expect results of stock up to a relative difference; return it."""
    assert stock.numel() > 0 and stock.any()
    difference = relative_error(patched, stock)
    assert difference <= bound, f"{difference:.1e} from stock\n{patched}\n{stock}"
    return float(f"{difference:.1e}")


@dataclass(frozen=True)
class Job:
    """A job of a framework."""

    framework: str  # a name of `REQUIREMENTS`
    name: str
    recipe: str  # that it follows, without the ending of its file

    def expect(self, family: str, stock: Tensor, patched: Tensor, *models: nn.Module, bound: float = 1e-4) -> None:
        """Expect results of stock and only fast calls, as `expect_same_and_fast`, and record them for a family."""
        result = expect_same_and_fast(stock, patched, *models, bound=bound)
        if os.environ.get("RECORD_STACKS"):
            self._record(family, result)

    def expect_printed(
        self, family: str, stock: Tensor, patched: Tensor, printed: str, *, processes: int, bound: float
    ) -> None:
        """Expect the same of a program whose processes each print the status of their tower, and record it."""
        difference = expect_same(stock, patched, bound)
        calls = re.findall(r"^ +calls +(\d+) fast, (\d+) stock", printed, flags=re.MULTILINE)
        assert len(calls) == processes, printed[-4000:]
        assert all(int(fast) > 0 and int(stock_calls) == 0 for fast, stock_calls in calls), calls
        assert "fallback" not in printed, printed[-4000:]
        if os.environ.get("RECORD_STACKS"):
            self._record(family, {"fast": sum(int(fast) for fast, _ in calls), "difference": difference})

    def _record(self, family: str, result: Result) -> None:
        record = read()
        job = record.setdefault(self.framework, {}).setdefault(self.name, {"runs": []})
        job["recipe"] = self.recipe
        installed = {distribution.name.replace("_", "-").lower() for distribution in distributions()}
        names = [name for name in _packages(self.framework) if name in installed]
        versions = {name: version(name) for name in (*names, "transformers", "torch")}
        today = {"date": datetime.now(UTC).date().isoformat(), "versions": versions}
        others = [run for run in job["runs"] if run["versions"] != versions]
        same_day = [run for run in job["runs"] if today.items() <= run.items()]
        results = same_day[0]["families"] if same_day else {}
        runs = sorted([*others, today | {"families": results | {family: result}}], key=self._order)
        job["runs"] = [runs[0], runs[-1]] if len(runs) > 1 else runs
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")

    def _order(self, run: dict[str, Any]) -> tuple[Version, ...]:
        """Order runs by the version of the framework, then of transformers and torch."""
        own = "transformers" if self.framework == "transformers" else _packages(self.framework)[0]
        names = (own, "transformers", "torch")
        return tuple(Version(run["versions"][name]) for name in names)


def read() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def table() -> list[tuple[str, ...]]:
    """Return the rows of the table of frameworks, in the order of their declaration."""
    record = read()
    return [
        (*_versions(framework, run["versions"]), name, job["recipe"], *_results(run), run["date"])
        for framework in REQUIREMENTS
        for name, job in record.get(framework, {}).items()
        for run in job["runs"]
    ]


def _versions(framework: str, versions: dict[str, str]) -> tuple[str, str]:
    own = ", ".join(f"{name} {versions[name]}" for name in _packages(framework) if name in versions)
    return own, " / ".join(versions[name].partition("+")[0] for name in ("transformers", "torch"))


def _packages(framework: str) -> list[str]:
    """Return the names of what a framework's environment installs."""
    return [re.split(r"[=<>!\[ ;]", requirement)[0] for requirement in REQUIREMENTS[framework]]


def _results(run: dict[str, Any]) -> tuple[str, str]:
    results = run["families"].values()
    largest = max(result["difference"] for result in results)
    fast = sum(result["fast"] for result in results)
    return f"{fast} fast", "equal" if largest == 0 else f"to {largest:.0e}"
