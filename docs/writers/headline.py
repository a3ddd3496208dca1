"""Write README's table and draw its chart; both show the same rows of whole_call.json.

`python docs/writers/tables.py` runs both. A test fails where README shows something else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from xml.sax.saxutils import escape

from documents import ROOT, Document, grid, load, measured_at, title

FILE = "whole_call.json"
CHART = ROOT / "docs" / "speedup.svg"
TOWER_ALONE = 0
"""The number of new tokens that stands for the tower without the language model."""
ANSWER = 64
"""The number of new tokens of an answer in README, where it was timed."""
FLASH = "flash_attention_3"
"""The key of stock's time with FlashAttention-3 in the tower."""
MOST_ROWS = 5
WITH = {"patched": "`patch`", "decoding": "`patch` and `graphed_decoding`"}
"""What a row's own time was measured with, by the key of the file."""
YOU_ADD = {"patched": "`patch`", "decoding": "`patch`, `graphed_decoding`"}
"""The same in README's table."""
PICTURES = {"one 1024²": "one picture (~950x950)", "32 x 34x46": "32 pictures (~500x700)"}
"""A size in pixels: between that of Qwen2.5-VL, whose patches have 14 a side, and that of Qwen3-VL, which has 16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is timed for every model.

    Args:
        size: the pictures, by their name in the file
        tokens: the number of new tokens; `TOWER_ALONE` for the tower
        way: the key of our time: "patched" or "decoding"
    """

    size: str
    tokens: int
    way: str

    @property
    def label(self) -> str:
        """Say what is timed: "answer of 64 tokens, one picture (~950x950)"."""
        names = {TOWER_ALONE: "vision tower", 1: "first token"}
        return f"{names.get(self.tokens, f'answer of {self.tokens} tokens')}, {PICTURES[self.size]}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The milliseconds of stock and ours, of one model in one case; `flash` is stock's with FlashAttention-3."""

    stock: float
    ours: float
    flash: float | None = None

    @property
    def speedup(self) -> float:
        """Return how many times as fast as stock ours is."""
        return self.stock / self.ours

    def text(self) -> str:
        """Write both times and the speed-up, as the table and the chart show them."""
        return f"{four_digits(self.stock)} → {four_digits(self.ours)} ms ({self.speedup:.1f}x)"

    def cells(self) -> list[str]:
        """Write the cells of the table: both times, and the speed-up over FlashAttention-3 if that was timed.

        An asterisk marks where FlashAttention-3 is slower than sdpa.
        """
        if self.flash is None:
            return [self.text()]
        mark = "\\*" if round(self.flash / self.ours, 1) > round(self.speedup, 1) else ""
        return [self.text(), f"{self.flash / self.ours:.1f}x{mark}"]


def four_digits(number: float) -> str:
    """Write a number so that readers who divide two of them get the speed-up that stands beside."""
    decimals = 0 if number >= 1000 else 1 if number >= 100 else 2
    return f"{number:.{decimals}f}"


def models(document: Document) -> list[str]:
    """Return the models of a document, in its order."""
    return list(dict.fromkeys(row["model"] for row in document["rows"]))


def comparisons(document: Document) -> dict[Case, dict[str, Comparison]]:
    """Return all comparisons with stock, by case and model."""
    by_case: dict[Case, dict[str, Comparison]] = {}
    for row in document["rows"]:
        for way in WITH:
            if way in row:
                case = Case(size=row["size"], tokens=row["tokens"], way=way)
                comparison = Comparison(stock=row["stock"], ours=row[way], flash=row.get(FLASH))
                by_case.setdefault(case, {})[row["model"]] = comparison
    return by_case


def complete_cases(document: Document) -> list[Case]:
    """Return the cases that were timed for every model of a document.

    Raises:
        ValueError: if there is none
    """
    expected = set(models(document))
    cases = [case for case, by_model in comparisons(document).items() if by_model.keys() == expected]
    if not cases:
        raise ValueError(f"{FILE}: no case was timed for all of {', '.join(sorted(expected))}")
    return cases


def charted(document: Document) -> list[Case]:
    """Choose the two bars of a model: an answer and the tower, or the shortest case, of the first size."""
    cases = complete_cases(document)
    of_size = [case for case in cases if case.size == cases[0].size]
    shortest = min(case.tokens for case in of_size)
    return [_with_way(of_size, _answer(of_size), "decoding"), _with_way(of_size, shortest, "patched")]


def _answer(cases: Iterable[Case]) -> int:
    """Return the number of new tokens of an answer: `ANSWER` where it was timed, else the largest."""
    tokens = {case.tokens for case in cases}
    return ANSWER if ANSWER in tokens else max(tokens)


def _with_way(cases: Iterable[Case], tokens: int, preferred: str) -> Case:
    """Return the case of a number of tokens, in the preferred way where it was timed."""
    by_way = {case.way: case for case in cases if case.tokens == tokens}
    return by_way.get(preferred) or by_way["patched"]


def tabled(document: Document) -> list[Case]:
    """Choose the rows of the table, at most `MOST_ROWS`: those of the chart, then answers, then first tokens.

    First tokens are those of the last size, a batch: with one picture the host limits the language model.
    """
    cases = complete_cases(document)
    answers = {size: _answer(case for case in cases if case.size == size) for size in {case.size for case in cases}}
    is_answer = {case: case.tokens == answers[case.size] for case in cases}
    chosen = charted(document)
    chosen += [case for case in cases if is_answer[case] and case.way == "decoding"]
    chosen += [case for case in cases if case.tokens == 1 and case.way == "patched" and case.size == cases[-1].size]
    rows = list(dict.fromkeys(chosen))[:MOST_ROWS]
    return [case for case in cases if case in rows]


def text() -> str:
    """Write README's table, and below it a note on asterisks and the conditions of the measurement.

    Raises:
        ValueError: if the file mixes measurements of two commits
    """
    document = load(FILE)
    rows = table(document)
    note = "\\* Here FlashAttention-3 is slower than sdpa. " * ("\\*" in rows)
    return f"{rows}\n{note}*{measured_at(document, FILE)}*\n"


def table(document: Document) -> str:
    """Write the rows of README's table: stock beside ours, at most five rows, no empty cell."""
    by_case = comparisons(document)
    cases = tabled(document)
    head = ["job", "you add"]
    rows = [[case.label, YOU_ADD[case.way]] for case in cases]
    for model in models(document):
        columns = [by_case[case][model].cells() for case in cases]
        count = min(len(cells) for cells in columns)
        head += [title(model), "over FlashAttention-3"][:count]
        for row, cells in zip(rows, columns, strict=True):
            row += cells[:count]
    return grid(head, rows)


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
    """Draw two bars a model as SVG: how many times as fast as stock a whole call and the tower are."""
    by_case = comparisons(document)
    cases = charted(document)
    unit = LONGEST / max(by_case[case][model].speedup for case in cases for model in models(document))
    y = 24
    shapes = [f'<text class="small" x="{LEFT}" y="{y}">Speed-up over transformers with sdpa (dashed: 1x)</text>']
    for model in models(document):
        y += 28
        shapes.append(f'<text class="model" x="{LEFT}" y="{y}">{escape(title(model))}</text>')
        y += 6
        for case, name in zip(cases, ("call", "tower"), strict=True):
            comparison = by_case[case][model]
            length = comparison.speedup * unit
            bar = y + 22
            one = LEFT + unit
            shapes += [
                f'<text x="{LEFT}" y="{y + 16}">{escape(case.label)}</text>',
                f'<rect class="{name}" x="{LEFT}" y="{bar}" width="{length:.1f}" height="{BAR}" rx="3"/>',
                f'<line class="line" x1="{one:.1f}" x2="{one:.1f}" y1="{bar - 2}" y2="{bar + BAR + 2}"/>',
                f'<text x="{LEFT + length + 8:.1f}" y="{bar + 15}">{escape(comparison.text())}</text>',
            ]
            y += STEP
    notes = [
        f"Answers: {WITH[cases[0].way]}. Tower: {WITH[cases[1].way]}. Weights are random.".replace("`", ""),
        measured_at(document),
    ]
    for line in [line for note in notes for line in textwrap.wrap(note, LINE)]:
        y += 18
        shapes.append(f'<text class="small" x="{LEFT}" y="{y}">{escape(line)}</text>')
    described = "; ".join(
        f"{title(model)}, {case.label}: {by_case[case][model].text()}" for model in models(document) for case in cases
    )
    size = f'viewBox="0 0 {WIDTH} {y + 14}" width="{WIDTH}" height="{y + 14}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<desc>{escape(described)}</desc>'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>\n"])
