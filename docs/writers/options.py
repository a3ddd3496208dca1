"""Write which options, and which ways of stock, were faster than the default: for the page of benchmarks."""

from __future__ import annotations

from documents import Row, is_measured, load, times, title

LEAST_GAIN = 0.03
"""The page lists options that are faster than the default by more than this share."""
OPTIONS = {"auto+graph": "cuda_graphs=True"}
"""Contenders that the page calls otherwise."""
EXACT_FILES = (
    *("towers.json", "cuda_extra.json", "plain.json", "held_out.json", "slow_host.json", "training.json"),
    *("families.json", "small.json", "flex.json", "fp8.json"),
)
"""The files that time exact options beside the default."""


def options() -> str:
    """Name the inputs for which stock or an exact option is faster than the default, an option by `LEAST_GAIN`."""
    count = 0
    stock_lines = []
    option_lines = []
    files = [file for file in EXACT_FILES if is_measured(file)]
    for file in files:
        for (model, size), by_contender in times(load(file)).items():
            count += 1
            where = f"{title(model)}, {size}, `{file}`"
            stock = []
            exact = []
            for name, row in by_contender.items():
                if name.startswith("stock "):
                    stock += _faster(name, row, by_contender["auto"], least=0.0)
                elif name != "auto" and "fp8" not in name:
                    exact += _faster(name, row, by_contender["auto"], least=LEAST_GAIN)
            if stock:
                stock_lines.append(f"- {where}: {', '.join(stock)}.\n")
            if exact:
                option_lines.append(f"- {where}: {', '.join(exact)}.\n")
    parts = [f"`bench` timed {count} inputs in {len(files)} files. "]
    if stock_lines:
        parts += ["By medians, stock is faster than the default for these:\n\n", *stock_lines, "\n"]
    else:
        parts.append(
            "No stock tower was faster than the default, not even one that was compiled and captured by hand.\n"
        )
    parts.append(f"By medians, no exact option was more than {100 * LEAST_GAIN:.0f}% faster than the default")
    if option_lines:
        parts += [f" for {count - len(option_lines)} of them. These are the others:\n\n", *option_lines]
    else:
        parts.append(".\n")
    return "".join(parts)


def _faster(name: str, row: Row, default: Row, *, least: float) -> list[str]:
    """Return by how much a contender is faster than the default; nothing if it is not by `least`."""
    if default["ms"] <= (1 + least) * row["ms"]:
        return []
    medians = 100 * (default["ms"] / row["ms"] - 1)
    fastest = 100 * (default["ms_low"] / row["ms_low"] - 1)
    return [f"`{OPTIONS.get(name, name)}` {medians:.1f}% (by the fastest calls {fastest:.1f}%)"]
