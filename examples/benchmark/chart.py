"""Draws gains.png, README's chart, from plain.json and towers.json; a test fails where it shows something else.

python examples/benchmark/chart.py

Needs matplotlib. Both files are of one machine, whose host was busy: their two runs of stock sdpa differ. Each bar is
compared with the faster of them, so all bars of one input can be compared with each other.
"""

from __future__ import annotations

import json
from pathlib import Path

from tables import HERE, MODELS, digits, load, times, title

CHART = HERE / "gains.png"
BARS = {
    "stock, FlashAttention-3": "0.75",
    "patched, plain install": "tab:cyan",
    "patched, all packages (CUDA graph where faster)": "tab:blue",
}

Bars = dict[str, dict[str, list[tuple[float, float]]]]


def bars() -> Bars:
    """Model, then size, to milliseconds and times as fast as the faster stock sdpa, in the order of BARS."""
    found: Bars = {}
    plain, every = times(load("plain.json")), times(load("towers.json"))
    for (model, size), rows in every.items():
        base, ours = (plain[model, size][name]["ms"] for name in ("stock sdpa", "auto"))
        stock, least = min(base, rows["stock sdpa"]["ms"]), min(rows[name]["ms"] for name in ("auto", "auto+graph"))
        flash = rows["stock flash_attention_3"]["ms"]
        found.setdefault(model, {})[size] = [(ms, stock / ms) for ms in (flash, ours, least)]
    return found


def shown(found: Bars) -> str:
    """What the chart says, as its file holds it."""
    return json.dumps({"bars": BARS, "shown": found})


def draw(path: Path) -> None:
    """Draw the chart into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = bars()
    figure = Figure(figsize=(13, 5))
    FigureCanvasAgg(figure)
    for panel, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        sizes, height = found[model], 0.8 / len(BARS)
        for index, (name, color) in enumerate(BARS.items()):
            lengths = [each[index] for each in sizes.values()]
            places = [place + index * height for place in range(len(sizes))]
            drawn = panel.barh(places, [ratio for _, ratio in lengths], height=height, label=name, color=color)
            panel.bar_label(drawn, [f"{ratio:.1f}x, {digits(ms)} ms" for ms, ratio in lengths], fontsize=7, padding=2)
        panel.axvline(1, color="black", linewidth=1, label="stock, sdpa")
        panel.set_yticks([place + height for place in range(len(sizes))], sizes)
        panel.set_title(title(model))
        panel.set_xlabel("times as fast as stock with sdpa")
        panel.set_xlim(0, 1.5 * max(ratio for size in sizes.values() for _, ratio in size))
        panel.invert_yaxis()
    figure.legend(*panel.get_legend_handles_labels(), loc="lower center", ncols=len(BARS) + 1, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Description": shown(found)})


if __name__ == "__main__":
    draw(CHART)
