"""Write SUPPORT.md, and blocks of docs/, from declarations in the source and the matrix of ways to wrap a model.

python tests/support_table.py
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from support import stacks  # noqa: E402
from support import versions as record  # noqa: E402
from support.generate_arguments import ARGUMENTS  # noqa: E402
from support.matrix import ELSEWHERE, ORDERS, ROWS, Row  # noqa: E402
from tiny import FAMILIES  # noqa: E402

from hf_vit_accel import backends, families  # noqa: E402
from hf_vit_accel.decoding.text_models import TEXT_MODELS  # noqa: E402
from hf_vit_accel.ops import PARTS, rows  # noqa: E402

PAGE = ROOT / "SUPPORT.md"
NAMES = ("transformers", "torch")
BLOCK = re.compile(r"(<!-- rows: (?P<form>\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
"""Where a page of docs/ shows the modules that treat each row by itself, or the arguments of `generate`."""
GENERATE_PAGE = ROOT / "docs" / "generate-arguments.md"
PAGES_WITH_BLOCKS = [ROOT / "docs" / "max-rows.md"]


def page() -> str:
    """The whole page."""
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hf-vit-accel"]
    fast = [family for family in families.FAMILIES if not family.attention_only]
    oldest = versions["tested"]["towers"][0]
    attention_only = [family for family in families.FAMILIES if family.attention_only]
    parts = [
        "# What is supported",
        "",
        "Written by `make support` from the declarations in the source; a test fails where it is stale.",
        "",
        "## Models",
        "",
        *_table(("family", "tower classes in transformers", "layers attend"), map(_family, fast)),
        "",
        "Whatever holds such a tower can be patched: the full model, the tower alone, a retrieval model built on one",
        "(`tests/integration/test_retrieval.py`). All of these load by name, too",
        "(`tests/integration/test_composites.py`).",
        "",
        "Attention only: the tower's own forward runs, on our attention, and is told its segments. Nothing else of it",
        "is fused, replayed from CUDA graphs or in FP8; `status` says so.",
        "",
        *_table(("family", "tower classes in transformers"), (_family(family)[:2] for family in attention_only)),
        "",
        'MiniMax-M3 loads by `{"vision_config": ...}` only: transformers puts a kernel of its own in the place of any',
        'plain name that contains "flash". Before transformers 5.23 it does not load by name at all, and stays stock',
        "when patched, as `status` says: its layers know no segments, so all pictures of a call attend to each other.",
        "In Muse a host sync a layer stays: its layers ask for the longest segment.",
        "",
        "transformers 5.24 has no tower class for Ling-3.0-Flash, OpenCUA and InternS1-Pro, so these were not tested.",
        "Towers from remote code need `like=`.",
        "",
        "Towers of remote code that copy a tower of the first table are served by `patch(model, like=...)`. One family",
        'is for such code alone: dots.ocr and dots.mocr, by `like={"DotsVisionTransformer": "dots_ocr"}`. It was',
        "tested with a tiny tower in the manner of their code (`tests/integration/test_dots_ocr.py`).",
        "",
        "## Versions",
        "",
        *_table(("package", "all tests pass with"), ((name, ", ".join(versions["tested"][name])) for name in NAMES)),
        "",
        "On an H200 and an H100 (torch 2.11) ran: all tests with transformers 5.17. On an H100 also whole towers of",
        "Qwen2-VL, Qwen2.5-VL and Qwen3-VL with 4.57.6 and 5.24, verified by `hf-vit-accel bench`; with 5.24 also",
        "towers whose attention alone is ours.",
        "torch 2.10 passed the core of the tests on the CPU, and never ran on a GPU.",
        f"transformers from {oldest} on is supported. Others up to 5.24 are expected to work. With a newer one,",
        "`status` and `hf-vit-accel doctor` say that it is untested. Towers that are built otherwise stay stock, with",
        "one warning that says what changed.",
        "",
        "All tests that the version's classes allow passed on the CPU with transformers 4.57.6, 5.0.0, 5.9.0, 5.15.1",
        "and 5.24.0. `tests/support/lacking.py` lists the others with reasons: before 5.3 models know no",
        "types of tokens, so `every_rank` and positions on the host are untested; before 5.4 stock decodes, and",
        "examples/ does not run.",
        "",
        f"With transformers {', '.join(versions['tested']['towers'])}, tiny towers of every class ran on the CPU in",
        "these uses, compared with stock (`nox -s versions`, which writes the table). *fast*: all calls were. *stock*:",
        "the original forward ran, for that reason. No cell differs from stock. A version that is missing lacks the",
        "class; before 5.9, PaddleOCR-VL takes other arguments, and stays stock. From 4.57.6 to 5.8 the stock forward",
        "computes its own metadata, and in 4.57 its own attention, too, unless the fast path serves the call.",
        "",
        *_table(("family", "tower class", "transformers", *record.USES), record.table()),
        "",
        "## Frameworks",
        "",
        "Each framework ran its own trainer or encoder on a tiny model on the CPU, stock and by the recipe of",
        "docs/migrate.md (`nox -s stacks`, which writes the table). `status` counted fast calls alone. Losses,",
        "gradients, embeddings or tokens were compared with stock: the table has the largest relative difference.",
        "",
        *_table(
            ("framework", "transformers / torch", "job", "recipe", "calls", "results of stock", "date"), stacks.table()
        ),
        "",
        "## Attention backends",
        "",
        *_table(
            (
                *("backend", "runs on", "packages", "dtypes", "head dim", "gradients"),
                "score_mod",
                "one CUDA graph serves many layouts",
            ),
            map(_backend, (*backends.BACKENDS, backends.FP8)),
        ),
        "",
        f"`{backends.FP8.name}` is what `patch(fp8=True)` adds, and is not exact; it cannot be named.",
        "Orders were chosen from times that were measured by hand at earlier commits, without CUDA graphs unless they",
        "say so.",
        *(
            f"`auto` prefers, in {rule.kind} layers{' with gradients' if rule.grad else ''}"
            f"{f' from {rule.longest_from} rows a segment on' if rule.longest_from else ''}"
            f"{f' and {rule.rows_from} rows in all' if rule.rows_from else ''}"
            f"{', where a CUDA graph of its own layout may replay the call' if rule.in_exact_graph else ''}: "
            f"{', '.join(rule.order)} ({rule.measured})."
            for rule in backends.AUTO
        ),
        "",
        "## Fused parts",
        "",
        *_table(("part", "what it is"), ((f"`{part}`", what) for part, what in PARTS.items())),
        "",
        "## Ways to wrap a model",
        "",
        "Each is tested in every family: patched before and after, used, compared with stock, unpatched. Fast: every",
        "call takes the fast path. Stock: the original forward runs, with metadata and attention supplied if it takes",
        "them, and `status` says why. Not patched: what comes out is a stock model.",
        "",
        *_table(("way", "outcome", "reason in `status`"), _ways()),
        "",
        "Tested on their own:",
        "",
        *_table(("way", "outcome"), ((name, outcome) for name, (outcome, _) in ELSEWHERE.items())),
        "",
        f"{sum(len(row.orders) for row in ROWS) * len(FAMILIES)} cells: {len(ROWS)} rows, orders and families.",
        "",
    ]
    return "\n".join(parts)


def with_blocks(text: str) -> str:
    """Return a page of docs/ with its blocks written anew."""
    forms = {"table": rows_table, "arguments": arguments_table, "decoded": decoded_table}
    return BLOCK.sub(lambda block: f"{block[1]}\n{forms[block['form']]()}\n{block[3]}", text)


def rows_table() -> str:
    """Return the modules that treat each row by itself, with their conditions."""
    lines = _table(("module", "if"), ((entry.summary, entry.condition) for entry in rows.TABLE))
    return "\n".join((*lines, ""))


def arguments_table() -> str:
    """Return every argument of `generate`, and what becomes of it in `graphed_decoding`."""
    words = {"none": "-", "raises": "raises in `generate`", "dropped": "dropped by `generate`"}
    cells = [
        (", ".join(f"`{name}`" for name in argument.names), words.get(argument.outcome, argument.outcome), argument.why)
        for argument in ARGUMENTS
    ]
    return "\n".join((*_table(("argument", "outcome", "why, or how"), cells), ""))


def decoded_table() -> str:
    """Return the models that `graphed_decoding` serves, by their text models."""
    cells = [
        (f"`{text.name}`", ", ".join(f"`{name.split('.')[1]}`" for name in text.models.split())) for text in TEXT_MODELS
    ]
    return "\n".join((*_table(("text model", "models that are served"), cells), ""))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _family(family: families.Family) -> tuple[str, str, str]:
    towers = ", ".join(f"`{kind}`" for _, kind in family.towers)
    return family.name, towers, "per window, some per frame" if family.windows else "per frame"


def _backend(backend: backends.Backend) -> tuple[str, ...]:
    needs = backend.needs
    packages = needs.packages if needs.cuda else ()  # torch for CUDA brings the others
    place = "CUDA" if needs.cuda else "any device"
    if needs.capability is not None:
        (low, minor), (above, _) = needs.capability
        place += f", compute capability {low}.{minor} up to, not including, {above}.0"
    return (
        f"`{backend.name}`",
        place,
        ", ".join(f"`{package.distribution}`" for package in packages) or "none beside torch",
        *(cell if needs.cuda or cell == "any" else f"any; on CUDA {cell}" for cell in _takes(needs)),
        *("yes" if flag else "no" for flag in (needs.differentiable, needs.score_mods, backend.replays_other_layouts)),
    )


def _takes(needs: backends.Needs) -> tuple[str, str]:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in needs.dtypes or ()]
    dim = [f"a multiple of {needs.head_dim_multiple}"] if needs.head_dim_multiple > 1 else []
    dim += [f"up to {needs.head_dim_max}"] if needs.head_dim_max else []
    return ", ".join(dtypes) or "any", ", ".join(dim) or "any"


def _ways() -> Iterable[tuple[str, str, str]]:
    for row in ROWS:
        needed = f" ({', '.join(f'`{package}`' for package in row.needs)})" if row.needs else ""
        yield row.name + needed, _outcome(row), "; ".join(row.reasons)


def _outcome(row: Row) -> str:
    outcome = {"fast": "fast", "stock": "stock", "unpatched": "not patched"}[row.outcome]
    outcome += ", the patch embedding as its module" if row.unfused else ""
    return outcome if row.orders == ORDERS else f"{outcome} ({row.orders[0]})"


if __name__ == "__main__":
    PAGE.write_text(page())
    for path in (*PAGES_WITH_BLOCKS, GENERATE_PAGE):
        path.write_text(with_blocks(path.read_text()))
