"""Draw README's chart: two bars a model, from the rows that README's table shows."""

from __future__ import annotations

import textwrap
from xml.sax.saxutils import escape

from documents import ROOT, Document, measured_at, title
from headline import ANSWER, SHOWN, TOWER, WITH, both_times, row_of, speedup

CHART = ROOT / "docs" / "speedup.svg"
BARS = (ANSWER, TOWER)
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .model { font-weight: 600; font-size: 16px }
  .small { font-size: 12px; fill: #59636e }
  .call { fill: #2563eb } .tower { fill: #7c9cf0 } .line { stroke: #1f2328; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 } .line { stroke: #f0f6fc }
  }
"""
LEFT = 12
"""Where bars begin."""
WIDTH = 560
"""Narrow enough that its text can be read on a phone."""
LONGEST = 350
"""The length of the longest bar; its text stands right of it."""
BAR = 20
STEP = 46
"""From the label of a bar to that of the next."""
LINE = 80
"""Most characters of a line of small text."""


def chart(document: Document) -> str:
    """Draw two bars a model as SVG: how many times as fast as stock an answer and the tower are."""
    unit = LONGEST / max(speedup(document, model, case) for model in SHOWN for case in BARS)
    one = LEFT + unit
    y = 24
    shapes = [f'<text class="small" x="{LEFT}" y="{y}">Speed-up over transformers with sdpa (dashed: 1x)</text>']
    described = []
    for model in SHOWN:
        y += 28
        shapes.append(f'<text class="model" x="{LEFT}" y="{y}">{escape(title(model))}</text>')
        y += 6
        for case, name in zip(BARS, ("call", "tower"), strict=True):
            length = speedup(document, model, case) * unit
            times = both_times(row_of(document, model, case), case)
            bar = y + 22
            shapes += [
                f'<text x="{LEFT}" y="{y + 16}">{escape(case.label)}</text>',
                f'<rect class="{name}" x="{LEFT}" y="{bar}" width="{length:.1f}" height="{BAR}" rx="3"/>',
                f'<line class="line" x1="{one:.1f}" x2="{one:.1f}" y1="{bar - 2}" y2="{bar + BAR + 2}"/>',
                f'<text x="{LEFT + length + 8:.1f}" y="{bar + 15}">{escape(times)}</text>',
            ]
            described.append(f"{title(model)}, {case.label}: {times}")
            y += STEP
    notes = [
        f"Answers: {WITH[ANSWER.way]}. Tower: {WITH[TOWER.way]}. Weights are random.".replace("`", ""),
        measured_at(document),
    ]
    for line in [line for note in notes for line in textwrap.wrap(note, LINE)]:
        y += 18
        shapes.append(f'<text class="small" x="{LEFT}" y="{y}">{escape(line)}</text>')
    size = f'viewBox="0 0 {WIDTH} {y + 14}" width="{WIDTH}" height="{y + 14}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<desc>{escape("; ".join(described))}</desc>'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>\n"])
