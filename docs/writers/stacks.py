"""Write what pages show of `tests/stacks`: recipes as they ran, the versions that ran, and README's table of stacks."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from documents import ROOT, grid

RECIPES = ROOT / "tests" / "stacks" / "recipes"
RECORD = ROOT / "tests" / "stacks.json"
"""Framework -> job -> its recipe, and runs with the oldest and the newest versions."""


class Stack(NamedTuple):
    """A row of README's table; `anchor` is a heading of docs/migrate.md, `line` stands in the first recipe."""

    name: str
    anchor: str
    framework: str
    recipes: tuple[str, ...]
    line: str


PATCH = "model = hf_vit_accel.patch(model)"
EMBEDDING = "  # to embed: patch(model, text=True)"
AFTER = "hf_vit_accel.patch(trainer.model)  # after making the trainer"
ROLLOUTS = "model.generate = functools.partial(model.generate, custom_generate=hf_vit_accel.graphed_decoding)"
PLUGIN = "--external_plugins fast_vision.py --callbacks patch_tower"
VERL = "+actor_rollout_ref.model.override_config.vision_config._attn_implementation=flash_vit_auto"
STACKS = (
    Stack("Trainer, PEFT", "trainer", "transformers", ("trainer", "callback", "peft"), PATCH),
    Stack("TRL: SFT, DPO, GRPO, QLoRA", "trl", "trl", ("trl", "qlora", "qlora_plain_tower"), AFTER),
    Stack("GRPO without vLLM: before the trainer; then TRL's line", "trl", "trl", ("grpo",), ROLLOUTS),
    Stack(
        "LLaMA-Factory: copy a script",
        "llama-factory",
        "llamafactory",
        ("llamafactory",),
        "run_exp(callbacks=[PatchTower()])",
    ),
    Stack("ms-swift 4: copy a plugin", "ms-swift", "swift", ("swift", "swift_gpus"), PLUGIN),
    Stack("axolotl: copy a plugin", "axolotl", "axolotl", ("axolotl",), "- fast_vision.PatchTower"),
    Stack("verl", "verl", "verl", ("verl",), VERL),
    Stack("colpali-engine: ColQwen2, 2.5, 3", "colpali", "colpali_engine", ("colpali",), f"{PATCH}{EMBEDDING}"),
    Stack(
        "sentence-transformers",
        "sentence-transformers",
        "sentence_transformers",
        ("sentence_transformers",),
        f"hf_vit_accel.patch(model){EMBEDDING}",
    ),
    Stack("lmms-eval", "lmms-eval", "lmms_eval", ("lmms_eval",), "hf_vit_accel.patch(lm.model)"),
)


def recipe(file: str) -> str:
    """Write a recipe as a block of code."""
    language = {"diff": "diff", "py": "python"}[file.rpartition(".")[2]]
    return f"```{language}\n{(RECIPES / file).read_text(encoding='utf-8')}```\n"


def versions() -> str:
    """Write the oldest and the newest versions of each stack that ran, with transformers' and the date."""
    rows = []
    for framework in _requirements():
        package = _package(framework)
        dates: dict[tuple[str, ...], str] = {}
        for _, run in _runs(framework):
            names = dict.fromkeys((package, "transformers"))
            key = tuple(run["versions"][name] for name in names)
            dates[key] = max(run["date"], dates.get(key, ""))
        ordered = sorted(dates, key=lambda key: [[int(part) for part in re.findall(r"\d+", name)] for name in key])
        cells = [f"{' with '.join(key)}, {dates[key]}" for key in ordered]
        rows.append([package, cells[-1], cells[0] if len(cells) > 1 else ""])
    return grid(["package", "newest that ran, with transformers", "oldest that ran"], rows)


def table() -> str:
    """Write README's table: the line to write in each stack, and the jobs that are recorded as fast.

    Raises:
        ValueError: if a line is not in its recipe, or no run is recorded
    """
    rows = []
    for stack in STACKS:
        texts = "".join(file.read_text(encoding="utf-8") for file in RECIPES.glob(f"{stack.recipes[0]}.*"))
        runs = [(name, run) for name, run in _runs(stack.framework) if run["recipe"] in stack.recipes]
        jobs = {name for name, _ in runs}
        slow = {name for name, run in runs if not all(family["fast"] for family in run["families"].values())}
        if stack.line not in texts or not jobs:
            raise ValueError(f"{stack.name}: {stack.line!r} is not in its recipe, or no run is recorded")
        fast = f"{len(jobs - slow)}/{len(jobs)}"
        rows.append([f"[{stack.name}](docs/migrate.md#{stack.anchor})", f"`{stack.line}`", fast])
    return grid(["stack (link: whole recipe)", "the key line", "tests on the fast path"], rows)


def _runs(framework: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every run of a framework by the name of its job, with the recipe of the job."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, job in record.get(framework, {}).items():
        for run in job["runs"]:
            yield name, run | {"recipe": job["recipe"]}


def _requirements() -> dict[str, list[str]]:
    """Return what the environment of each framework installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["tool"]["hf-vit-accel"]["stacks"])


def _package(framework: str) -> str:
    """Return the first package that the environment of a framework installs; transformers is in all."""
    if framework == "transformers":
        return framework
    return re.split(r"[=<>!\[ ;]", _requirements()[framework][0])[0]
