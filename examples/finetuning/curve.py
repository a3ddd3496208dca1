"""The loss of a run as an SVG file, written by hand: no plotting library is needed to look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

__all__ = ["Line", "draw"]

Line = Sequence[tuple[float, float]]
"""Steps and values."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 64, 40, 20, 44
COLOURS = ("#1f5fa8", "#d1602b", "#3c8d40", "#7d4aa3", "#8a8a8a", "#b0902c", "#3aa0a0")


def draw(path: Path, title: str, lines: Mapping[str, Line]) -> None:
    """Draw named lines over the steps into an SVG file; those without points are left out."""
    lines = {name: points for name, points in lines.items() if points}
    steps = [step for points in lines.values() for step, _ in points] or [0.0]
    values = [value for points in lines.values() for _, value in points] or [0.0]
    first, last, most = min(steps), max(max(steps), min(steps) + 1), max(max(values), 1e-9) * 1.05

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most, 1)

    def text(left: float, top: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
        return f'<text x="{left}" y="{top}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(WIDTH / 2, 20, title),
        text(WIDTH / 2, HEIGHT - 8, "step"),
    ]
    for tick in range(6):
        value, step = most * tick / 5, first + (last - first) * tick / 5
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts += [text(LEFT - 6, y(value) + 4, f"{value:.3g}", "end"), text(x(step), HEIGHT - BOTTOM + 16, f"{step:g}")]
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        marks = " ".join(f"{x(step)},{y(value)}" for step, value in points)
        parts.append(f'<polyline points="{marks}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x(points[-1][0])}" cy="{y(points[-1][1])}" r="3" fill="{colour}"/>']
        parts.append(text(WIDTH - RIGHT - 4, TOP + 16 * (index + 1), name, "end", colour))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
