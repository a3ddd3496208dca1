"""Write which options, and which ways of stock, were faster than the default: for the page of benchmarks."""

from __future__ import annotations

from documents import Row, grid, is_measured, load, times, title

LEAST_GAIN = 0.03
"""The page lists options that are faster than the default by more than this share."""
NAMES = {"auto+graph": "`cuda_graphs=True`"}
"""Contenders that the page calls otherwise."""
EXACT_FILES = (
    *("towers.json", "cuda_extra.json", "plain.json", "held_out.json", "slow_host.json", "training.json"),
    *("families.json", "small.json", "flex.json", "fp8.json"),
)
"""The files that time exact options beside the default."""


def options() -> str:
    """List the inputs for which stock or an exact option is faster than the default, an option by `LEAST_GAIN`."""
    rows = []
    inputs = 0
    others = 0
    files = [file for file in EXACT_FILES if is_measured(file)]
    for file in files:
        for (model, size), by_contender in times(load(file)).items():
            default = by_contender["auto"]
            faster = [name for name, row in by_contender.items() if is_faster(name, row, default)]
            for name in faster:
                gains = [gain(by_contender[name], default, key) for key in ("ms", "ms_low")]
                rows.append([NAMES.get(name, f"`{name}`"), *gains, title(model), size, f"`{file}`"])
            inputs += 1
            others += not faster
    other_inputs = f"the other {others} of {inputs} inputs"
    rows.append(["neither stock nor an option", "", "", other_inputs, "", f"all {len(files)} files"])
    head = [f"faster than the default (options: from {LEAST_GAIN:.0%})", "by medians", "by the fastest calls"]
    return grid([*head, "model", "input", "file"], rows)


def is_faster(name: str, row: Row, default: Row) -> bool:
    """Say whether the page lists a contender: stock where it is faster at all. FP8 rounds more, so it is left out."""
    if name == "auto" or "fp8" in name:
        return False
    least = 0.0 if name.startswith("stock ") else LEAST_GAIN
    return bool(default["ms"] > (1 + least) * row["ms"])


def gain(row: Row, default: Row, key: str) -> str:
    """Write by how much a contender is faster than the default."""
    return f"{default[key] / row[key] - 1:.1%}"
