"""Reports a benchmark as a table, as one JSON object and as a figure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hf_vit_accel import machine
from hf_vit_accel.tools.bench.measure import Row, device_of_choice

Document: TypeAlias = Mapping[str, Any]
"""A benchmark as JSON holds it."""
_KEYS = ("model", "size", "contender")
"""What identifies a row of a document."""


def document(
    rows: Sequence[Row],
    *,
    dtype: torch.dtype,
    rounds: int,
    peak: float | None,
    train: bool = False,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Return a benchmark as plain dicts, lists, strings and numbers: what --json writes and `plot` reads.

    Args:
        peak: TFLOP/s of the floor, or None.
    """
    device = machine.cuda_device_name() if device_of_choice().type == "cuda" else "cpu"
    return {
        "versions": machine.versions(),
        "device": device,
        "machine": host(),
        "dtype": str(dtype).removeprefix("torch."),
        "train": train,
        "checkpointing": checkpointing,
        "rounds": rounds,
        "peak_tflops": peak,
        "rows": [asdict(row) for row in rows],
    }


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


def slower(result: Document, before: Document) -> Iterator[str]:
    """Yield a line for every row that takes longer than in an earlier document, then how many were compared.

    A row is slower by 3% at least, and by more than the spread of a run. The first line names the devices, if they
    differ.
    """
    if result.get("device") != before.get("device"):
        yield f"measured on {result.get('device')}, before on {before.get('device')}"
    earlier = {_key(row): row for row in before["rows"] if row["ms"] is not None}
    pairs = []
    for row in result["rows"]:
        if row["ms"] is not None and _key(row) in earlier:
            pairs.append((row, earlier[_key(row)]))
    slower_pairs = [(row, old) for row, old in pairs if _is_slower(row, old)]
    for row, old in sorted(slower_pairs, key=_ratio, reverse=True):
        ratio = _ratio((row, old))
        yield f"slower: {', '.join(_key(row))}: {row['ms']:.2f} ms, before {old['ms']:.2f} ({ratio:.2f}x)"
    yield f"{len(pairs)} compared, {len(slower_pairs)} slower by more than 3% and the spread of their runs"
    if not pairs:
        yield "nothing was compared: the earlier file has no time of these models, sizes and contenders"


def _key(row: Document) -> tuple[str, ...]:
    return tuple(row[name] for name in _KEYS)


def _is_slower(row: Document, old: Document) -> bool:
    return bool(row["ms"] > 1.03 * old["ms"] and row["ms_low"] > old["ms_high"])


def _ratio(pair: tuple[Document, Document]) -> float:
    row, old = pair
    return float(row["ms"] / old["ms"])


def lines(rows: Sequence[Row], *, train: bool = False, skipped: bool = True) -> Iterator[str]:
    """Yield the table of one model and size, and the profile of the row that has one.

    Args:
        train: Whether gradients were compared. Then errors over stock's own (mean and largest) and memory are shown.
        skipped: Whether to say what could not run, and why. It is the same for all sizes of a model.
    """
    yield from _head_lines(rows, train)
    width = max(len(row.contender) for row in rows)
    for row in rows:
        if row.status == "wrong":
            yield f"  {row.contender:{width}}  WRONG: {row.problem}"
        if row.ms is not None:
            yield f"  {row.contender:{width}}  {_times_of(row, train)}".rstrip()
    if skipped:
        names_of: dict[str | None, list[str]] = {}
        for row in rows:
            if row.status == "skipped":
                names_of.setdefault(row.problem, []).append(row.contender)
        for problem, names in names_of.items():
            yield f"  skipped {', '.join(names)}: {problem}"
    for row in rows:
        if row.parts is not None:
            yield from _profile_lines(row, train)


def _head_lines(rows: Sequence[Row], train: bool) -> Iterator[str]:
    """Yield the title of a table, and the names of its columns."""
    head = rows[0]
    floor = f", floor {head.floor_ms:.3g} ms" if head.floor_ms else ""
    smallest_bound = min(row.bound for row in rows)  # contenders in FP8 have a larger one
    allowed = "" if train else f", error <= {smallest_bound:.1e}"
    yield f"{head.model}, {head.size}: {head.patches} patches{floor}{allowed}"
    width = max(len(row.contender) for row in rows)
    training_columns = f"  {'of stock':>15}  {'peak GB':>8}" if train else ""
    yield (
        f"  {'':{width}}  {'ms':>9}  {'low - high':>19}  {'x floor':>8}  {'speed-up':>8}  {'error':>8}"
        f"{training_columns}"
    )


def _times_of(row: Row, train: bool) -> str:
    """Return the columns of a row that was timed."""
    spread = f"{row.ms_low:.2f} - {row.ms_high:.2f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
    columns = f"{row.ms:9.2f}  {spread:>19}  {ratio:>8}  {speedup:>8}  {row.error:8.1e}"
    if not train:
        return columns
    of_stock = ""
    if row.error_ratio_mean is not None and row.error_ratio is not None:
        of_stock = f"{row.error_ratio_mean:.2f}, <= {row.error_ratio:.2f}"
    peak_gb = "" if row.peak_gb is None else f"{row.peak_gb:.2f}"
    return f"{columns}  {of_stock:>15}  {peak_gb:>8}"


def _profile_lines(row: Row, train: bool) -> Iterator[str]:
    """Yield the profile of a row."""
    parts = row.parts or ()
    total = sum(part.us for part in parts)
    kernels = sum(part.per_layer for part in parts)
    timed = f"one {'step' if train else 'forward'} of {row.contender}"
    yield f"  parts of {timed}: {total:.0f} us, {kernels:.1f} kernels per layer"
    for part in parts:
        yield f"    {part.part:10}  {part.us:9.0f} us  {part.share:5.1%}  {part.per_layer:6.1f} per layer"


def require_matplotlib() -> None:
    """Raise ImportError with the remedy where no figure can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install matplotlib") from error


def plot(result: Document, path: Path) -> None:
    """Draw the milliseconds of a document as bars, a panel per model, into a PNG; the labels are speed-ups.

    Contenders that were not timed leave a gap.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The document has no times.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["ms"] is not None]
    if not rows:
        raise ValueError("nothing to draw: no contender was timed; time at least one contender")
    models = _distinct(rows, "model")
    sizes = _distinct(rows, "size")
    contenders = _distinct(rows, "contender")
    figure = Figure(figsize=(5 * len(models), 2.0 + 0.12 * len(sizes) * (len(contenders) + 1)))
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        times = {(row["size"], row["contender"]): row["ms"] for row in rows if row["model"] == model}
        _draw_bars(panel, times, sizes, contenders)
        panel.set_title(model)
        timed = "forward and backward" if result.get("train") else "forward"
        panel.set_xlabel(f"ms, tower {timed} (lower is better)")
    figure.suptitle(f"{result['device']}, {result['dtype']}, torch {result['versions']['torch']}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(contenders), fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)


def _distinct(rows: Sequence[Document], key: str) -> list[str]:
    """Return the values of a key, in order and without repetitions."""
    return list(dict.fromkeys(row[key] for row in rows))


def _draw_bars(
    panel: Any, times: Mapping[tuple[str, str], float], sizes: Sequence[str], contenders: Sequence[str]
) -> None:
    """Draw a group of bars for every size; `times` has milliseconds by size and contender."""
    height = 0.8 / len(contenders)
    for index, name in enumerate(contenders):
        offsets = []
        lengths = []
        labels = []
        for position, size in enumerate(sizes):
            ms = times.get((size, name))
            if ms is None:
                continue
            first_ms = times.get((size, contenders[0]))
            offsets.append(position + index * height)
            lengths.append(ms)
            labels.append(f"{first_ms / ms:.1f}x" if first_ms else "")
        bars = panel.barh(offsets, lengths, height=height, label=name)
        panel.bar_label(bars, labels, fontsize=7, padding=2)
    panel.set_yticks([position + 0.4 - height / 2 for position in range(len(sizes))], sizes)
    panel.margins(x=0.12)
    panel.invert_yaxis()
