"""Draw gains.png, README's chart, from plain.json and towers.json; a test fails where it shows something else.

python examples/benchmark/chart.py

Needs matplotlib. Both files come from one machine with a busy host, so their two runs of stock sdpa differ. Every bar
is compared with the faster of the two, so all bars of one input are comparable.
"""

from __future__ import annotations

import json
from pathlib import Path

from documents import HERE, MODELS, digits, load, times, title

CHART = HERE / "gains.png"
BARS = {
    "stock, FlashAttention-3": "0.75",
    "patched, plain install": "tab:cyan",
    "patched, all packages (CUDA graph where faster)": "tab:blue",
}

Bars = dict[str, dict[str, list[tuple[float, float]]]]
"""Milliseconds and speed-up of every bar, by model and size, in the order of BARS."""


def bars() -> Bars:
    """Compute all bars; speed-ups are over the faster of the two runs of stock sdpa."""
    by_model: Bars = {}
    plain = times(load("plain.json"))
    for (model, size), rows in times(load("towers.json")).items():
        plain_rows = plain[model, size]
        stock_ms = min(plain_rows["stock sdpa"]["ms"], rows["stock sdpa"]["ms"])
        best_ms = min(rows["auto"]["ms"], rows["auto+graph"]["ms"])
        lengths = [rows["stock flash_attention_3"]["ms"], plain_rows["auto"]["ms"], best_ms]
        by_model.setdefault(model, {})[size] = [(ms, stock_ms / ms) for ms in lengths]
    return by_model


def shown(by_model: Bars) -> str:
    """Describe the chart as JSON; the PNG holds this text."""
    return json.dumps({"bars": BARS, "shown": by_model})


def draw(path: Path) -> None:
    """Draw the chart into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_model = bars()
    figure = Figure(figsize=(13, 5))
    FigureCanvasAgg(figure)
    height = 0.8 / len(BARS)
    for panel, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        sizes = by_model[model]
        for index, (name, color) in enumerate(BARS.items()):
            lengths = [of_size[index] for of_size in sizes.values()]
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
    figure.savefig(path, dpi=110, metadata={"Description": shown(by_model)})


if __name__ == "__main__":
    draw(CHART)
