"""Draw the loss of a run into an SVG file, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

__all__ = ["Line", "draw"]

Line = Sequence[tuple[float, float]]
"""Steps and values."""
WIDTH = 720
HEIGHT = 400
LEFT = 64
TOP = 40
RIGHT = 20
BOTTOM = 44
COLOURS = ("#1f5fa8", "#d1602b", "#3c8d40", "#7d4aa3", "#8a8a8a", "#b0902c", "#3aa0a0")


class Axes:
    """Scale steps and values to pixels.

    Args:
        lines: the lines to draw
    """

    def __init__(self, lines: Mapping[str, Line]) -> None:
        steps = [step for points in lines.values() for step, _ in points] or [0.0]
        values = [value for points in lines.values() for _, value in points] or [0.0]
        self.first_step = min(steps)
        self.last_step = max(max(steps), self.first_step + 1)
        self.highest = 1.05 * max(max(values), 1e-9)

    def x(self, step: float) -> float:
        """Return the pixel of a step."""
        share = (step - self.first_step) / (self.last_step - self.first_step)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)

    def y(self, value: float) -> float:
        """Return the pixel of a value."""
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.highest, 1)


def draw(path: Path, title: str, lines: Mapping[str, Line]) -> None:
    """Draw named lines over the steps into an SVG file; lines without points are left out."""
    lines = {name: points for name, points in lines.items() if points}
    axes = Axes(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title),
        _text(WIDTH / 2, HEIGHT - 8, "step"),
    ]
    for tick in range(6):
        value = axes.highest * tick / 5
        step = axes.first_step + (axes.last_step - axes.first_step) * tick / 5
        parts.append(f'<path d="M{LEFT} {axes.y(value)}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, axes.y(value) + 4, f"{value:.3g}", "end"))
        parts.append(_text(axes.x(step), HEIGHT - BOTTOM + 16, f"{step:g}"))
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        corners = " ".join(f"{axes.x(step)},{axes.y(value)}" for step, value in points)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        last_step, last_value = points[-1]
        parts.append(f'<circle cx="{axes.x(last_step)}" cy="{axes.y(last_value)}" r="3" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT - 4, TOP + 16 * (index + 1), name, "end", colour))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
