"""Write the blocks of SUPPORT.md and docs/ from declarations in the source and the matrix of ways to wrap a model.

python docs/writers/support_table.py
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import stacks  # noqa: E402
from support import versions as record  # noqa: E402
from support.generate_arguments import ARGUMENTS  # noqa: E402
from support.matrix import ELSEWHERE, ORDERS, ROWS, Row  # noqa: E402
from tiny import FAMILIES  # noqa: E402

from hf_vit_accel import backends, families  # noqa: E402
from hf_vit_accel.decoding.text_models import TEXT_MODELS  # noqa: E402
from hf_vit_accel.ops import PARTS, rows  # noqa: E402

BLOCK = re.compile(r"(<!-- rows: (?P<form>\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
"""Where a page shows what is declared: a table, or sentences."""
PAGES_WITH_BLOCKS = [ROOT / name for name in ("SUPPORT.md", "docs/max-rows.md", "docs/generate-arguments.md")]


def with_blocks(text: str) -> str:
    """Return a page with its blocks written anew."""
    return BLOCK.sub(lambda block: "\n".join((block[1], *FORMS[block["form"]](), "", block[3])), text)


def models_table() -> list[str]:
    """Return the families whose towers run on our operations."""
    fast = [family for family in families.FAMILIES if not family.attention_only]
    return _table(("family", "tower classes in transformers", "layers attend"), map(_family, fast))


def attention_only_table() -> list[str]:
    """Return the families of which the attention alone is ours."""
    attention_only = [family for family in families.FAMILIES if family.attention_only]
    return _table(("family", "tower classes in transformers"), (_family(family)[:2] for family in attention_only))


def versions_table() -> list[str]:
    """Return the versions with which the tests ran."""
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hf-vit-accel"]["tested"]
    names = {"transformers": ("transformers", "all"), "torch": ("torch", "all")}
    names["towers"] = ("transformers", "uses of towers, below")
    return _table(("package", "tests", "pass with"), ((*name, ", ".join(tested[key])) for key, name in names.items()))


def uses_table() -> list[str]:
    """Return what became of every tower in every use, by versions of transformers."""
    return _table(("family", "tower class", "transformers", *record.USES), record.table())


def frameworks_table() -> list[str]:
    """Return what the frameworks' own programs computed."""
    return _table(
        ("framework", "transformers / torch", "job", "recipe", "calls", "results of stock", "date"), stacks.table()
    )


def backends_table() -> list[str]:
    """Return what each backend needs."""
    head = ("backend", "runs on", "packages", "dtypes", "head dim", "gradients")
    head += ("score_mod", "one CUDA graph serves many layouts")
    return _table(head, map(_backend, (*backends.BACKENDS, backends.FP8)))


def rules_of_auto() -> list[str]:
    """Return a sentence for each rule of `auto`."""
    return [
        f"`auto` prefers, in {rule.kind} layers{' with gradients' if rule.grad else ''}"
        f"{f' from {rule.longest_from} rows a segment on' if rule.longest_from else ''}"
        f"{f' and {rule.rows_from} rows in all' if rule.rows_from else ''}"
        f"{', where a CUDA graph of its own layout may replay the call' if rule.in_exact_graph else ''}: "
        f"{', '.join(rule.order)} ({rule.measured})."
        for rule in backends.AUTO
    ]


def parts_table() -> list[str]:
    """Return the parts of a tower that are fused."""
    return _table(("part", "what it is"), ((f"`{part}`", what) for part, what in PARTS.items()))


def ways_table() -> list[str]:
    """Return the ways to wrap a model, and how many tests they make."""
    cells = sum(len(row.orders) for row in ROWS) * len(FAMILIES)
    ways = _table(("way", "outcome", "reason in `status`"), _ways())
    return [*ways, "", f"{cells} cells: {len(ROWS)} rows, orders and families."]


def elsewhere_table() -> list[str]:
    """Return the ways that have tests of their own."""
    return _table(("way", "outcome"), ((name, outcome) for name, (outcome, _) in ELSEWHERE.items()))


def rows_table() -> list[str]:
    """Return the modules that treat each row by itself, with their conditions."""
    return _table(("module", "if"), ((entry.summary, entry.condition) for entry in rows.TABLE))


def arguments_table() -> list[str]:
    """Return every argument of `generate`, and what becomes of it in `graphed_decoding`."""
    words = {"none": "-", "raises": "raises in `generate`", "dropped": "dropped by `generate`"}
    cells = [
        (", ".join(f"`{name}`" for name in argument.names), words.get(argument.outcome, argument.outcome), argument.why)
        for argument in ARGUMENTS
    ]
    return _table(("argument", "outcome", "why, or how"), cells)


def decoded_table() -> list[str]:
    """Return the models that `graphed_decoding` serves, by their text models."""
    cells = [
        (f"`{text.name}`", ", ".join(f"`{name.split('.')[1]}`" for name in text.models.split())) for text in TEXT_MODELS
    ]
    return _table(("text model", "models that are served"), cells)


FORMS = {
    "models": models_table,
    "attention_only": attention_only_table,
    "versions": versions_table,
    "uses": uses_table,
    "frameworks": frameworks_table,
    "backends": backends_table,
    "auto": rules_of_auto,
    "parts": parts_table,
    "ways": ways_table,
    "elsewhere": elsewhere_table,
    "table": rows_table,
    "arguments": arguments_table,
    "decoded": decoded_table,
}
"""What writes the block of a name."""


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


def _takes(needs: backends.base.Needs) -> tuple[str, str]:
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
    for path in PAGES_WITH_BLOCKS:
        path.write_text(with_blocks(path.read_text()))
