"""Time two versions of the package in one process, in turns, so that the host and the clock are the same for both.

git worktree add ../before COMMIT
python benchmarks/compare.py --before ../before --json build/compare.json

Each cell is one tower with random weights and one input: a forward, a forward from CUDA graphs, or a training step.
Both versions compute the same input; outputs that differ by more than rounding end the run.
A cell where the later version is more than 2% slower is timed again with three times the rounds; both ratios are kept.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from measuring import DEVICE, DTYPE, document_of, outputs_of, timer_of, write_json

import hf_vit_accel
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench import (
    SIZES,
    build_tower,
    family_of_tower,
    largest_error,
    parse_size,
    time_in_turns,
    weight_of,
)

WAYS = ("forward", "graphs", "training")
OTHER_NAMES = {"hf_vit_accel": "hf_vit_before", "flash_vit_auto": "flash_vit_before"}
"""Names that the earlier version gets, so that both can be imported and registered."""


def import_before(checkout: Path) -> ModuleType:
    """Import the package of another checkout under another name."""
    copied = Path(tempfile.mkdtemp())
    for source in (checkout / "hf_vit_accel").rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        for name, other in OTHER_NAMES.items():
            text = text.replace(name, other)
        target = copied / OTHER_NAMES["hf_vit_accel"] / source.relative_to(checkout / "hf_vit_accel")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(copied))
    return importlib.import_module(OTHER_NAMES["hf_vit_accel"])


def step_of(package: ModuleType, tower: Any, way: str, size: str) -> Callable[[], list[torch.Tensor]]:
    """Patch a tower with one version, and return a function that makes one call."""
    _, grid = parse_size(size)
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(0)
    pixels_TP = torch.randn(rows_of(grid), weight[0].numel(), device=weight.device, generator=generator)
    pixels = family_of_tower(tower).pixels(tower, pixels_TP.to(weight.dtype))
    grid_thw = torch.tensor(grid)
    tower.requires_grad_(way == "training")
    package.patch(tower, cuda_graphs=way == "graphs")

    def step() -> list[torch.Tensor]:
        with torch.set_grad_enabled(way == "training"):
            outputs = outputs_of(tower(pixels, grid_thw=grid_thw))
        if way == "training":
            torch.autograd.backward(outputs, outputs)
            tower.zero_grad(set_to_none=True)
        return outputs

    return step


def compare(before: ModuleType, model: str, size: str, way: str, rounds: int) -> dict[str, Any]:
    """Time both versions in turns, and return the medians of a call in milliseconds."""
    tower = build_tower(model, DEVICE, DTYPE)
    steps = {
        "before": step_of(before, copy.deepcopy(tower), way, size),
        "now": step_of(hf_vit_accel, tower, way, size),
    }
    outputs = {name: step() for name, step in steps.items()}
    difference = largest_error(outputs["now"], outputs["before"])
    if difference > 0.02:
        raise SystemExit(f"{model}, {size}, {way}: outputs differ by {difference:.1e}")
    del outputs
    times = time_in_turns({name: timer_of(step) for name, step in steps.items()}, rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "model": model,
        "size": size,
        "way": way,
        **{name: round(value, 3) for name, value in medians.items()},
        "ratio": round(medians["now"] / medians["before"], 4),
    }


def main() -> None:
    """Compare every model, size and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier version")
    parser.add_argument("--models", default="qwen2.5-vl-7b,qwen3-vl-8b,qwen2-vl-7b")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    before = import_before(arguments.before)
    rows = []
    for model in arguments.models.split(","):
        for way in arguments.ways.split(","):
            for size in arguments.sizes.split(","):
                row = compare(before, model, size, way, arguments.rounds)
                if row["ratio"] > 1.02:
                    again = compare(before, model, size, way, 3 * arguments.rounds)
                    row = again | {"first_ratio": row["ratio"]}
                rows.append(row)
                print(row, flush=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    write_json(arguments.json, document_of(rows))


if __name__ == "__main__":
    main()
