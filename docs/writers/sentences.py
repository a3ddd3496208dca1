"""Write the numbers in sentences of README.md and docs/ from the JSON files of benchmarks/.

A sentence has `{}` in the place of every number. `tables.py` writes the numbers of a page anew, between words that
stay. A test fails where they differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from documents import Cell, Document, Row, further_token_ms, load, times, title
from headline import ANSWER

NUMBER = r"(-?\w+(?:\.\w+)?)"
"""A number, or a commit."""
PICTURE = "one 1024²"
BATCH = "32 x 34x46"
"""The sizes of whole calls: one picture, and 32 pictures."""
LEAST_GAIN = 0.03
"""The pages list options that are faster than the default by more than this share."""
OPTIONS = {"auto+graph": "cuda_graphs=True"}
"""Contenders that the pages call otherwise."""
EXACT_FILES = (
    *("towers.json", "cuda_extra.json", "plain.json", "held_out.json", "slow_host.json", "training.json"),
    *("families.json", "small.json", "flex.json", "fp8.json"),
)
"""The files that time exact options beside the default."""
OTHER_WAYS = ("checkpointed", "FSDP2", "DDP")
"""Ways to train whose memory the pages state apart: the first two are not captured."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """Declare one sentence, or a part of one, whose numbers come from a file.

    Args:
        page: the page's path from the root
        text: the sentence, with `{}` for every number
        numbers: computes the numbers, as the page shows them
    """

    page: str
    text: str
    numbers: Callable[[], Sequence[str]]

    def filled(self, page: str) -> str:
        """Write the numbers of the sentence anew.

        Args:
            page: the text of the page

        Raises:
            ValueError: if the page has the sentence not once, or there are more or fewer numbers than places
        """
        words = [r"\s+".join(re.escape(word) for word in piece.split(" ")) for piece in self.text.split("{}")]
        matches = list(re.finditer(NUMBER.join(words), page))
        if len(matches) != 1:
            raise ValueError(f"{self.page} has this sentence {len(matches)} times, not once: {self.text}")
        numbers = self.numbers()
        for group, number in reversed(list(zip(range(1, len(words)), numbers, strict=True))):
            page = page[: matches[0].start(group)] + number + page[matches[0].end(group) :]
        return page


def at_least(ratio: float) -> str:
    """Write by how many percent a ratio is above one, rounded down."""
    return str(max(math.floor(100 * (ratio - 1)), 0))


def at_most(ratio: float) -> str:
    """Write by how many percent a ratio is above one, rounded up."""
    return str(max(math.ceil(100 * (ratio - 1)), 0))


def _span(values: Sequence[float], decimals: int = 1) -> list[str]:
    return [f"{bound:.{decimals}f}" for bound in (min(values), max(values))]


def _calls() -> dict[Cell, dict[int, Row]]:
    """Return the rows of whole calls by model and size, then by number of new tokens."""
    by_cell: dict[Cell, dict[int, Row]] = {}
    for row in load("whole_call.json")["rows"]:
        by_cell.setdefault((row["model"], row["size"]), {})[row["tokens"]] = row
    return by_cell


def promised() -> list[str]:
    """Return the least and the most speed-ups of README's answers, captions included, passes over a batch and steps."""
    calls = _calls()
    answers = [by_tokens[ANSWER]["stock"] / by_tokens[ANSWER]["decoding"] for by_tokens in calls.values()]
    answers += [row["patched"] / row["stock"] for row in load("captioning.json")["rows"] if row["tokens"] > 1]
    passes = [rows[1]["stock"] / rows[1]["patched"] for (_, size), rows in calls.items() if size == BATCH]
    steps = [row["stock"]["step"] / row["patched"]["step"] for row in load("training_step.json")["rows"]]
    return [*_span(answers), *_span(passes), *_span(steps)]


def spread_of_patched_calls() -> list[str]:
    """Compare two ways with the same code for one token, and stock with `patch` alone for a further one."""
    calls = _calls().values()
    ratios = [by_tokens[1]["patched"] / by_tokens[1]["decoding"] for by_tokens in calls]
    further = [further_token_ms(rows, "stock") / further_token_ms(rows, "patched") for rows in calls]
    return [at_most(max(max(ratio, 1 / ratio) for ratio in ratios)), *_span(further)]


def without_flash() -> list[str]:
    """Return how much longer a tower takes without FlashAttention, in percent.

    Returns:
        The least and the most of one 1024² with torch's cuDNN, and the most of all sizes in a plain install.
    """
    cells = times(load("towers.json"))
    plain = times(load("plain.json"))
    of_picture = [row["torch_cudnn"]["ms"] / row["auto"]["ms"] for (_, size), row in cells.items() if size == PICTURE]
    of_plain = [plain[cell]["auto"]["ms"] / row["auto"]["ms"] for cell, row in cells.items() if cell in plain]
    return [at_least(min(of_picture)), at_most(max(of_picture)), at_most(max(of_plain))]


def uncertain_tokens() -> list[str]:
    """Return stock's two times of a batch's first token in seconds, and their difference for each further token."""
    low, high = _calls()["qwen2.5-vl-7b", BATCH][1]["ranges"]["stock"]
    return [f"{low / 1e3:.2f}", f"{high / 1e3:.2f}", f"{max((high - low) / (ANSWER - 1), 1):.0f}"]


def spread_of_long_calls() -> list[str]:
    """Return by how much calls of 64 tokens differ in percent: stock's least and most, then at most when decoding."""
    ranges = [by_tokens[ANSWER]["ranges"] for by_tokens in _calls().values()]
    stock = [max(of_way["stock"]) / min(of_way["stock"]) for of_way in ranges]
    decoding = [max(of_way["decoding"]) / min(of_way["decoding"]) for of_way in ranges]
    return [at_least(min(stock)), at_most(max(stock)), at_most(max(decoding))]


def batched_token() -> list[str]:
    """Return how much longer a further token takes for 32 rows than for one, in percent."""
    calls = _calls()
    ratios = [
        further_token_ms(rows, "decoding") / further_token_ms(calls[model, PICTURE], "decoding")
        for (model, size), rows in calls.items()
        if size == BATCH
    ]
    return [at_most(max(ratios))]


def million_patches() -> list[str]:
    """Return memory and seconds of two calls with a million patches."""
    million = load("max_rows.json")["million"]
    pairs = zip(million["beyond_gb"], million["seconds"], strict=True)
    return [text for gb, seconds in pairs for text in (f"{gb:.2f}", f"{seconds:.1f}")]


def _long_videos() -> dict[float, Row]:
    return {row["fps"]: row for row in load("long_video.json")["rows"] if row["way"] == "patched"}


def known_picture() -> list[str]:
    """Return the milliseconds of a picture whose features are kept."""
    (ms,) = {
        row["ms"]["reuse"]
        for row in load("reuse.json")["rows"]
        if row["model"] == "qwen3-vl-8b" and row["what"].startswith("1 picture that is known")
    }
    return [f"{ms:.1f}"]


def reused_chat() -> list[str]:
    """Return the share of the time of a chat about large pictures, and how much more calls without copies took."""
    rows = load("reuse.json")["rows"]
    chats = [row["ratio"] for row in rows if row["what"].startswith("chat") and "4096" in row["what"]]
    return [f"{100 * max(chats):.0f}", at_most(max(row["ratio"] for row in rows if "no copies" in row["what"]))]


def memory_of_captured_steps() -> list[str]:
    """Return what captured steps of one 448² hold more than others, at least and at most, and the commit."""
    document = load("ways.json")
    return [*_span([gb for _, gb in memory_of_ways(document)]), document["commit"]]


def memory_of_ways(document: Document) -> list[tuple[str, float]]:
    """Return the ways to train whose steps of one 448² are captured, and the GB that each holds more with graphs."""
    pairs = []
    for row in document["rows"]:
        if row["size"] == "one 448²" and "total_gb" in row and not row["way"].startswith(OTHER_WAYS):
            pairs.append((row["way"], row["total_gb"]["default"] - row["total_gb"]["without graphs"]))
    return pairs


def memory_under_ddp() -> list[str]:
    """Return what steps of one 448² hold more with graphs under DDP, at least and at most."""
    rows = [row for row in load("ways.json")["rows"] if (row["size"], row["way"]) == ("one 448²", "DDP")]
    totals = [row["total_gb"] for row in rows if "total_gb" in row]
    return _span([total["default"] - total["without graphs"] for total in totals])


def memory_of_a_tower() -> list[str]:
    """Return the memory of a training tower with graphs and without, and the commit."""
    document = load("ways.json")
    (total,) = [
        row["total_gb"]
        for row in document["rows"]
        if (row["model"], row["size"], row["way"]) == ("qwen2.5-vl-7b", "one 448²", "all weights") and "total_gb" in row
    ]
    return [f"{total['default']:.1f}", f"{total['without graphs']:.1f}", document["commit"]]


def eager_on_a_slow_host() -> list[str]:
    """Return how many times as long small calls take without graphs."""
    cells = times(load("slow_host.json"))
    ratios = [cell["auto+eager"]["ms"] / cell["auto"]["ms"] for (_, size), cell in cells.items() if size == "one 448²"]
    return [f"{max(ratios):.1f}"]


def _saved_by_fp8(size: str) -> list[float]:
    """Return what FP8 saves in models whose layers all attend to whole pictures, in percent."""
    cells = times(load("fp8.json"))
    pairs = [
        (cell["auto+fp8"]["ms"], cell["auto"]["ms"])
        for (model, name), cell in cells.items()
        if name == size and model != "qwen2.5-vl-7b"
    ]
    return [100 * (1 - fp8 / exact) for fp8, exact in pairs]


def fp8_gains() -> list[str]:
    """Return what FP8 saves of a page at least and at most, in percent."""
    of_page = _saved_by_fp8("one page")
    return [str(math.floor(min(of_page))), str(math.ceil(max(of_page)))]


def fp8_of_small_calls() -> list[str]:
    """Return the percentage below which two medians of the same code differ."""
    cells = times(load("fp8.json"))
    ratios = [cell["auto+fp8"]["ms"] / cell["auto"]["ms"] for (_, size), cell in cells.items() if size == "one 448²"]
    return [str(math.floor(100 * max(abs(ratio - 1) for ratio in ratios)) + 1)]


def checks() -> list[str]:
    """Return the least and the most milliseconds of the checks of a call."""
    return _span([row["median"] / 1e3 for row in load("checks.json")["rows"] if "grad" in row])


SENTENCES = (
    Sentence(
        page="README.md",
        text="answers and captions {} to {}x, embedding a batch {} to {}x, training steps {} to {}x",
        numbers=promised,
    ),
    Sentence(
        page="README.md",
        text="the patched tower needs [up to {}% more time]",
        numbers=lambda: without_flash()[2:],
    ),
    Sentence(
        page="docs/benchmarks.md",
        text="with one token by up to {}%, for a further token from {}x to {}x",
        numbers=spread_of_patched_calls,
    ),
    Sentence(
        page="docs/benchmarks.md",
        text="Batch captioning of {} JPEGs, one process",
        numbers=lambda: [str(load("captioning.json")["images"])],
    ),
    Sentence(
        page="docs/benchmarks.md",
        text="and the tower takes {} to {}% longer. Of all sizes, a plain install took up to {}% longer,",
        numbers=without_flash,
    ),
    Sentence(
        page="docs/benchmarks.md",
        text="described {} held-out scenes each",
        numbers=lambda: [str(max(row["scenes"] for row in load("captions.json")["rows"]))],
    ),
    Sentence(
        page="docs/captioning.md",
        text="The {} JPEGs were captioned by full-size models",
        numbers=lambda: [str(load("captioning.json")["images"])],
    ),
    Sentence(
        page="docs/generate.md",
        text="took {} and {} s (Qwen2.5-VL). So stock's times are uncertain by some {} ms a token.",
        numbers=uncertain_tokens,
    ),
    Sentence(
        page="docs/generate.md",
        text="calls of 64 tokens differ by {} to {}%, those of `graphed_decoding` by at most {}%.",
        numbers=spread_of_long_calls,
    ),
    Sentence(
        page="docs/generate.md",
        text="32 rows share them, and take up to {}% longer than one.",
        numbers=batched_token,
    ),
    Sentence(
        page="docs/max-rows.md",
        text="{} GB beyond weights and outputs. The first call compiled kernels and took {} s, the second took {} GB "
        "and {} s.",
        numbers=million_patches,
    ),
    Sentence(
        page="docs/max-rows.md",
        text="The patched one needs {} GB beside the weights.",
        numbers=lambda: [f"{_long_videos()[2.0]['encode']['peak_gb'] - 17.5:.1f}"],
    ),
    Sentence(
        page="docs/max-rows.md",
        text="The {} s are the first call's, without compilation.",
        numbers=lambda: [f"{_long_videos()[0.5]['generate']['seconds']:.2f}"],
    ),
    Sentence(page="docs/reuse.md", text="(a known picture takes {} ms with Qwen3-VL-8B,", numbers=known_picture),
    Sentence(
        page="docs/reuse.md",
        text="With pictures of 4,096 patches its time falls to {}%. Calls without copies took at most {}% more.",
        numbers=reused_chat,
    ),
    Sentence(
        page="docs/cuda-graphs.md",
        text="took {} to {} GB more, most with fp32 weights under autocast (`ways.json`, {}).",
        numbers=memory_of_captured_steps,
    ),
    Sentence(page="docs/cuda-graphs.md", text="Under DDP the difference was {} to {} GB.", numbers=memory_under_ddp),
    Sentence(page="docs/cuda-graphs.md", text="such calls take up to {} times as long", numbers=eager_on_a_slow_host),
    Sentence(
        page="docs/training.md",
        text="took {} GB with weights and gradients. Without graphs it took {} GB (`ways.json`, {}).",
        numbers=memory_of_a_tower,
    ),
    Sentence(
        page="docs/fp8.md",
        text="A page of Qwen3-VL or Qwen2-VL gains {} to {}%.",
        numbers=fp8_gains,
    ),
    Sentence(
        page="docs/fp8.md",
        text="At 8,464 patches it gains nothing yet: it takes up to {}% longer than `patch(model)`.",
        numbers=lambda: [at_most(1 - min(_saved_by_fp8("1x92x92")) / 100)],
    ),
    Sentence(page="docs/fp8.md", text="their medians differ by less than {}%.", numbers=fp8_of_small_calls),
    Sentence(page="docs/how-it-works.md", text="All these checks take [{} to {} ms]", numbers=checks),
)


def filled(page: str, text: str) -> str:
    """Write the numbers in all sentences of a page anew.

    Args:
        page: the page's path from the root
        text: its text

    Raises:
        ValueError: if a sentence does not stand there once
    """
    for sentence in SENTENCES:
        if sentence.page == page:
            text = sentence.filled(text)
    return text


def options() -> str:
    """Name the inputs for which stock or an exact option is faster than the default, an option by `LEAST_GAIN`."""
    count = 0
    stock_lines = []
    option_lines = []
    for file in EXACT_FILES:
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
    parts = [f"`bench` timed {count} inputs in {len(EXACT_FILES)} files. "]
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
