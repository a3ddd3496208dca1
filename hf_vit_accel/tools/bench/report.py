"""What a benchmark found, as a table, as one JSON object and as a figure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_vit_accel import machine
from hf_vit_accel.tools.bench.measure import Row, device_of_choice


def document(
    rows: Sequence[Row],
    *,
    dtype: torch.dtype,
    rounds: int,
    peak: float | None,
    train: bool = False,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Everything as plain dicts, lists, strings and numbers: what --json writes and `plot` reads."""
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


def host() -> dict[str, Any]:
    """What of a machine decides how fast it is, beside its GPU's name.

    cpu: its name; cores: those that this process may use. Of the first GPU that it may use, as `nvidia-smi` tells:
    driver, clock and largest clock (MHz), power (the limit, W); without one, nothing.
    """
    linux = hasattr(os, "sched_getaffinity")
    found: dict[str, Any] = {"cpu": None, "cores": len(os.sched_getaffinity(0)) if linux else os.cpu_count()}
    with suppress(OSError, StopIteration):
        lines_ = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        found["cpu"] = next(line.split(":", 1)[1].strip() for line in lines_ if line.startswith("model name"))
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    ask = "nvidia-smi", "--format=csv,noheader,nounits", "-i", index or "0"
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit"
        told = subprocess.run([*ask, query], capture_output=True, text=True, timeout=20, check=True).stdout
        driver, clock, largest, power = told.split(", ")
        found |= {"driver": driver, "clock": int(clock), "largest_clock": int(largest), "power": float(power)}
    return found


def slower(result: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """What takes longer in one `document` than in an earlier one, by 3% at least, and by more than a run's own
    spread: a line for each; then how many were compared. First, if they ran on different devices, on which.
    """
    if result.get("device") != before.get("device"):
        yield f"measured on {result.get('device')}, before on {before.get('device')}"
    key = "model", "size", "contender"
    earlier = {tuple(row[each] for each in key): row for row in before["rows"] if row["ms"] is not None}
    both = [(row, earlier.get(tuple(row[each] for each in key))) for row in result["rows"] if row["ms"] is not None]
    pairs = [(row, old) for row, old in both if old is not None]
    found = [(row, old) for row, old in pairs if row["ms"] > 1.03 * old["ms"] and row["ms_low"] > old["ms_high"]]
    for row, old in sorted(found, key=lambda pair: pair[0]["ms"] / pair[1]["ms"], reverse=True):
        where, ratio = ", ".join(row[each] for each in key), row["ms"] / old["ms"]
        yield f"slower: {where}: {row['ms']:.2f} ms, before {old['ms']:.2f} ({ratio:.2f}x)"
    yield f"{len(pairs)} compared, {len(found)} slower by more than 3% and the spread of their runs"


def lines(rows: Sequence[Row], *, train: bool = False, skipped: bool = True) -> Iterator[str]:
    """The table of one model and size, and the profile of the row that has one.

    train: gradients were compared: each error beside stock's own, the mean and the largest of the ratios, and memory.
    skipped: say also what could not run and why; it is the same for every size of a model.
    """
    head = rows[0]
    floor = f", floor {head.floor_ms:.3g} ms" if head.floor_ms else ""
    allowed = "" if train else f", error <= {min(row.bound for row in rows):.1e}"  # in FP8 it is another
    yield f"{head.model}, {head.size}: {head.patches} patches{floor}{allowed}"
    width = max(len(row.contender) for row in rows)
    more = f"  {'of stock':>15}  {'peak GB':>8}" if train else ""
    yield f"  {'':{width}}  {'ms':>9}  {'low - high':>19}  {'x floor':>8}  {'speed-up':>8}  {'error':>8}{more}"
    for row in rows:
        start = f"  {row.contender:{width}}  "
        if row.status == "wrong":
            yield f"{start}WRONG: {row.problem}"
        if row.ms is None:
            continue
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
        spread = f"{row.ms_low:.2f} - {row.ms_high:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        more = ""
        if train:
            ratios = row.error_ratio_mean, row.error_ratio
            told = "" if None in ratios else "{:.2f}, <= {:.2f}".format(*ratios)
            more = f"  {told:>15}  {'' if row.peak_gb is None else f'{row.peak_gb:.2f}':>8}"
        yield f"{start}{row.ms:9.2f}  {spread:>19}  {ratio:>8}  {speedup:>8}  {row.error:8.1e}{more}".rstrip()
    reasons: dict[str | None, list[str]] = {}
    for row in rows:
        if skipped and row.status == "skipped":
            reasons.setdefault(row.problem, []).append(row.contender)
    yield from (f"  skipped {', '.join(names)}: {problem}" for problem, names in reasons.items())
    for row in rows:
        if row.parts is not None:
            total, kernels = sum(part.us for part in row.parts), sum(part.per_layer for part in row.parts)
            timed = f"one {'step' if train else 'forward'} of {row.contender}"
            yield f"  parts of {timed}: {total:.0f} us, {kernels:.1f} kernels per layer"
            for part in row.parts:
                yield f"    {part.part:10}  {part.us:9.0f} us  {part.share:5.1%}  {part.per_layer:6.1f} per layer"


def require_matplotlib() -> None:
    """Raise ImportError with the remedy where no figure can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install matplotlib") from error


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the milliseconds of a `document` as bars, a panel per model, into a PNG; the labels are speed-ups.

    Contenders that were not timed leave a gap. Raises ImportError without matplotlib, ValueError without times.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["ms"] is not None]
    if not rows:
        raise ValueError("expected at least one contender that was timed, got none; there is nothing to draw")
    models, sizes, contenders = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "size", "contender")
    )
    figure = Figure(figsize=(5 * len(models), 2.0 + 0.12 * len(sizes) * (len(contenders) + 1)))
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    height = 0.8 / len(contenders)
    for panel, model in zip(panels, models, strict=True):
        times = {(row["size"], row["contender"]): row["ms"] for row in rows if row["model"] == model}
        for index, name in enumerate(contenders):
            places = [place for place, size in enumerate(sizes) if (size, name) in times]
            lengths = [times[sizes[place], name] for place in places]
            bars = panel.barh([place + index * height for place in places], lengths, height=height, label=name)
            firsts = [times.get((sizes[place], contenders[0])) for place in places]
            labels = [f"{first / ms:.1f}x" if first else "" for first, ms in zip(firsts, lengths, strict=True)]
            panel.bar_label(bars, labels, fontsize=7, padding=2)
        panel.set_yticks([place + 0.4 - height / 2 for place in range(len(sizes))], sizes)
        panel.set_title(model)
        timed = "forward and backward" if result.get("train") else "forward"
        panel.set_xlabel(f"ms, tower {timed} (lower is better)")
        panel.margins(x=0.12)
        panel.invert_yaxis()
    figure.suptitle(f"{result['device']}, {result['dtype']}, torch {result['versions']['torch']}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(contenders), fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
