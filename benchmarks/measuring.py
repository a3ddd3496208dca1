"""Compute errors, time contenders in turns and write JSON files, for all benchmarks."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from hf_vit_accel import machine
from hf_vit_accel.families.interface import named_tensors
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench import milliseconds, time_in_turns, weight_of

Row = dict[str, Any]
"""A row of a JSON file."""
Grid = Sequence[tuple[int, int, int]]
"""Frames, height and width in patches of every image or video."""
Step = Callable[[], object]
"""What is timed."""
Forward = Callable[[torch.Tensor], object]
"""Calls a tower with pixels."""
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ERROR_BAR = 1.1
"""The largest error of ours, in times of stock's own in the same dtype."""

STEPS_UNTIL_STEADY = 4
"""A training step is captured at its third call."""


def nothing(*_: object) -> None:
    """Do nothing."""


def outputs_of(output: Any) -> list[torch.Tensor]:
    """Return the features that a model takes: merged rows (or a tower's last rows) and deepstack features."""
    if isinstance(output, torch.Tensor):
        return [output]
    if type(output) is tuple:
        return [output[0], *output[1]]
    merged = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return [merged, *(output.get("deepstack_features") or [])]


def timer_of(step: Step, before: Step = nothing) -> Callable[[], float]:
    """Return a function that runs a step once, and returns its milliseconds. `before` is not timed."""

    def timed() -> float:
        before()
        return milliseconds(step, cuda=DEVICE.type == "cuda")

    return timed


def time_rows(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    before: Mapping[str, Step] = MappingProxyType({}),
    **common: object,
) -> list[Row]:
    """Time warm steps in turns; print and return a row for each.

    Args:
        steps: The steps by the name of the contender.
        rounds: Those of `time_in_turns`.
        before: What runs before a step and is not timed, by contender.
        common: What all rows say.

    Returns:
        Rows with the median, the least and the most milliseconds of a step.
    """
    times = time_in_turns({name: timer_of(step, before.get(name, nothing)) for name, step in steps.items()}, rounds)
    rows = [common | {"contender": contender} | spread(of_step) for contender, of_step in times.items()]
    print(*rows, sep="\n", flush=True)
    return rows


def time_set_ups(
    names: Iterable[Name],
    set_up: Callable[[Name], Step],
    rounds: int,
    calls: int,
    *,
    warm_ups: int = STEPS_UNTIL_STEADY,
    after: Callable[[Name], None] = nothing,
) -> dict[Name, list[float]]:
    """Time contenders in turns that are one model, set up anew in every round, since that drops its graphs.

    Args:
        names: The contenders.
        set_up: Prepares the model for a contender, and returns its step.
        rounds: The rounds.
        calls: The timed steps of a contender in a round.
        warm_ups: The steps before them.
        after: Called with a contender after its steps, to note what ran.

    Returns:
        The milliseconds of every timed step.
    """

    def turn(name: Name) -> list[float]:
        times = time_calls(set_up(name), calls, warm_ups=warm_ups)
        after(name)
        return times

    return take_turns(names, turn, rounds)


def take_turns(names: Iterable[Name], turn: Callable[[Name], Sequence[float]], rounds: int) -> dict[Name, list[float]]:
    """Measure every contender once a round, by `turn`; return all milliseconds of each."""
    times: dict[Name, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in in_turn(times, index):
            times[name] += turn(name)
    return times


def in_turn(contenders: Iterable[Name], index: int) -> list[Name]:
    """Order the contenders of a round: backwards in every other round, so that drift favours nobody."""
    names = list(contenders)
    return names[::-1] if index % 2 else names


def spread(times: Sequence[float]) -> Row:
    """Return the median, the least and the most of some milliseconds, as rows hold them."""
    return {"ms": statistics.median(times), "ms_low": min(times), "ms_high": max(times)}


def time_calls(step: Step, calls: int, *, warm_ups: int, before: Step = nothing) -> list[float]:
    """Run a step to warm up, then return the milliseconds of every further call. `before` is not timed."""
    for _ in range(warm_ups):
        before()
        step()
    timer = timer_of(step, before)
    return [timer() for _ in range(calls)]


def now() -> float:
    """Return the clock's milliseconds once the device is idle, for steps that are no function: those of `Trainer`."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


class Measured(NamedTuple, Generic[Result]):
    """One run: milliseconds, what it returned, and the most GB in all and beyond those before it (None on a CPU)."""

    ms: float
    result: Result
    peak_gb: float | None = None
    beyond_gb: float | None = None


def run_once(step: Callable[[], Result]) -> Measured[Result]:
    """Time one run, without another to warm up, and measure its memory."""
    results: list[Result] = []

    def run() -> None:
        results.append(step())

    if DEVICE.type != "cuda":
        return Measured(milliseconds(run, cuda=False), results[0])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    elapsed = milliseconds(run, cuda=True)
    peak = torch.cuda.max_memory_allocated()
    return Measured(elapsed, results[0], peak / 1e9, (peak - before) / 1e9)


def peak_gigabytes(step: Step) -> float | None:
    """Measure the most memory that a step takes beyond the memory before it; None on a CPU, where nothing runs."""
    return run_once(step).beyond_gb if DEVICE.type == "cuda" else None


class Steps:
    """Run training steps of several towers with the same pixels and the same incoming gradients.

    Args:
        tower: A tower of their class.
        grid: Frames, height and width of every input.
        dtype: The dtype of the pixels.
        autocast: Whether steps run under autocast to bf16.
    """

    def __init__(
        self,
        tower: nn.Module,
        grid: Grid,
        dtype: torch.dtype = torch.bfloat16,
        *,
        autocast: bool = True,
    ) -> None:
        weight = weight_of(tower)
        self.device = weight.device
        self.autocast = autocast
        self.grid = torch.tensor(grid, device=self.device)
        self.pixels_TP = torch.randn(rows_of(grid), weight[0].numel(), device=self.device).to(dtype)
        self.incoming: list[torch.Tensor] = []

    def forward_of(self, tower: nn.Module) -> Forward:
        """Return the forward that calls a tower with the grid."""
        return lambda pixels_TP: tower(pixels_TP, grid_thw=self.grid)

    def step(self, forward: Forward, *, exact: bool = False) -> list[torch.Tensor]:
        """Run forward and backward, with `exact` in fp32 without autocast; return the outputs."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast and not exact):
            output = forward(self.pixels_TP.float() if exact else self.pixels_TP)
            outputs = list(named_tensors(output).values())
        if not self.incoming:
            self.incoming = [torch.randn_like(output) for output in outputs]
        gradients = [gradient.to(output.dtype) for gradient, output in zip(self.incoming, outputs, strict=True)]
        torch.autograd.backward(outputs, gradients)
        return [output.detach() for output in outputs]


def clear(module: nn.Module) -> None:
    """Drop the gradients."""
    module.zero_grad(set_to_none=True)


def switch_checkpointing(tower: nn.Module, *, enable: bool, reentrant: bool = False) -> None:
    """Switch gradient checkpointing, by the name that this version of transformers gives it."""
    word = "activation" if hasattr(tower, "activation_checkpointing_enable") else "gradient"
    if enable:
        options = {f"{word}_checkpointing_kwargs": {"use_reentrant": reentrant}}
        getattr(tower, f"{word}_checkpointing_enable")(**options)
    else:
        getattr(tower, f"{word}_checkpointing_disable")()


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


def document_of(rows: list[Row], **fields: object) -> Row:
    """Return the content of a JSON file: what measured the rows, and the rows, to which more may be added."""
    common = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "dtype": str(DTYPE).removeprefix("torch."),
        "versions": machine.versions(),
    }
    return common | fields | {"rows": rows}


def measure_models(
    description: str | None,
    models: str,
    measure: Callable[..., list[Row]],
    *,
    options: Mapping[str, int | str] = MappingProxyType({"rounds": 2}),
    **fields: object,
) -> Row:
    """Read the options of a benchmark, measure every model, and write the rows to a file.

    Args:
        description: The text of `--help`.
        models: The models by default, comma-separated.
        measure: Returns the rows of a model, by its name and the options.
        options: The other options by name, with their defaults; False for a flag.
        fields: What the file says beside the rows.

    Returns:
        The content of the file.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=models, help=models)
    for name, default in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default, help=str(default))
    chosen = vars(parser.parse_args())
    path = chosen.pop("json")
    names = chosen.pop("models").split(",")
    document = document_of([], **fields, **chosen)
    for name in names:
        document["rows"] += measure(name, **chosen)
        write_json(path, document)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return document


def write_json(path: Path | None, document: Row) -> None:
    """Write a document to a file, if one was asked for. Of several processes the first writes."""
    if path is not None and os.environ.get("RANK", "0") == "0":
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
