"""Compute errors, time contenders in turns and write JSON files, for all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hf_vit_accel import machine
from hf_vit_accel.tools.bench.timing import Step, time_in_turns

Row = dict[str, Any]
"""A row of a JSON file."""
Grid = Sequence[tuple[int, int, int]]
"""Frames, height and width in patches of every image or video."""


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ERROR_BAR = 1.1
"""The largest error of ours, in times of stock's own in the same dtype."""

STEPS_UNTIL_STEADY = 4
"""A training step is captured at its third call."""


def largest_error(outputs: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest relative L2 error of an output, computed in fp32."""
    errors = []
    for output, reference in zip(outputs, expected, strict=True):
        reference = reference.float()
        errors.append(float((output.float() - reference).norm() / reference.norm()))
    return max(errors)


def time_rows(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device,
    *,
    before: Mapping[str, Step] = MappingProxyType({}),
    **common: object,
) -> list[Row]:
    """Time warm steps in turns; print and return a row for each.

    Args:
        steps: The steps by the name of the contender.
        rounds: Those of `time_in_turns`.
        device: The device that the steps run on.
        before: What runs before a step and is not timed, by contender.
        common: What all rows say.

    Returns:
        Rows with the median, the least and the most milliseconds of a step.
    """
    rows = []
    for contender, of_step in time_in_turns(steps, rounds, cuda=device.type == "cuda", before=before).items():
        row = common | {"contender": contender, "ms": statistics.median(of_step)}
        rows.append(row | {"ms_low": min(of_step), "ms_high": max(of_step)})
        print(rows[-1], flush=True)
    return rows


def in_turn(contenders: Iterable[str], index: int) -> list[str]:
    """Order the contenders of a round: backwards in every other round, so that drift favours nobody."""
    names = list(contenders)
    return names[::-1] if index % 2 else names


def switch_checkpointing(tower: nn.Module, *, enable: bool, reentrant: bool = False) -> None:
    """Switch gradient checkpointing, by the name that this version of transformers gives it."""
    word = "activation" if hasattr(tower, "activation_checkpointing_enable") else "gradient"
    if enable:
        options = {f"{word}_checkpointing_kwargs": {"use_reentrant": reentrant}}
        getattr(tower, f"{word}_checkpointing_enable")(**options)
    else:
        getattr(tower, f"{word}_checkpointing_disable")()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or "cpu"."""
    return machine.cuda_device_name() if device.type == "cuda" else "cpu"


def host() -> dict[str, str | int | float | None]:
    """Return what decides a machine's speed, beside the name of its GPU.

    Returns:
        cpu: The name of the CPU.
        cores: Cores that this process may use.
        driver: Driver of the first GPU that it may use, by `nvidia-smi`. Without one, this and all below are left out.
        clock: The GPU's clock (MHz).
        largest_clock: The GPU's largest clock (MHz).
        power: The GPU's power limit (W).
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    facts: dict[str, str | int | float | None] = {
        "cpu": None,
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
    }
    with suppress(OSError, StopIteration):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts["cpu"] = next(line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name"))
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--format=csv,noheader,nounits", "-i", index or "0"]
    command.append("--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit")
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        driver, clock, largest_clock, power = answer.split(", ")
        facts |= {
            "driver": driver,
            "clock": int(clock),
            "largest_clock": int(largest_clock),
            "power": float(power),
        }
    return facts


def document_of(rows: list[Row], device: torch.device = DEVICE, **fields: object) -> Row:
    """Return the content of a JSON file: what measured the rows, and the rows, to which more may be added."""
    common = {"device": device_name(device), "dtype": str(DTYPE).removeprefix("torch."), "versions": machine.versions()}
    return common | fields | {"rows": rows}


def measure_models(
    description: str | None, models: str, measure: Callable[[str, int], list[Row]], *, rounds: int = 2, **fields: object
) -> None:
    """Read the options of a benchmark, measure every model, and write the rows to a file.

    Args:
        description: The text of `--help`.
        models: The models by default, comma-separated.
        measure: Returns the rows of a model, by its name and the rounds of timing.
        rounds: The rounds by default.
        fields: What the file says beside the rows.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=models)
    parser.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args()
    document = document_of([], **fields)
    for model in options.models.split(","):
        document["rows"] += measure(model, options.rounds)
        write_json(options.json, document)


def write_json(path: Path | None, document: Row) -> None:
    """Write a document to a file, if one was asked for."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
