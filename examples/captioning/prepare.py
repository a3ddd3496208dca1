"""What the first process finds out for all, before any model is loaded: which run this is, and what is left to do."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from media.checkpoints import identity
from media.files import fingerprint, lock, say, some
from media.items import Item
from media.sources import Found, find

from captioning.journal import Journal
from captioning.plan import Plan, differences, make_plan

__all__ = [
    "Prepared",
    "Wanted",
    "prepare",
]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line asks for. settings: those that change captions, beside the checkpoint."""

    inputs: list[str]
    output: Path
    model: str
    revision: str | None
    settings: dict[str, Any]
    prompts: list[str]
    column: str | None
    split: str
    root: Path | None
    skip_with: str | None
    limit: int | None
    refuse_above: int
    overwrite: bool
    retry_errors: bool
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run: its name, settings and prompts, what it has to do, the model's name for people, and where keys are
    relative to.

    clashed: whether items share a name.
    """

    run: str
    settings: dict[str, Any]
    prompts: list[str]
    plan: Plan
    title: str
    root: str | None
    clashed: bool


def prepare(wanted: Wanted, stack: ExitStack) -> Prepared:
    """Find the items and what is to do, and say so. The folder is locked for the length of the stack.

    Raises ValueError and OSError for mistakes in what is asked.
    """
    if wanted.skip_with is not None and not wanted.skip_with.startswith("."):
        raise ValueError(f"expected --skip-with to be an extension such as .txt, got {wanted.skip_with}")
    journal = Journal(wanted.output)
    share = None if wanted.dry_run else stack.enter_context(lock(wanted.output, alone=True))
    last = (journal.manifest()["runs"] or [{}])[-1]
    before = last.get("settings", {})
    checkpoint_settings, title = identity(wanted.model, wanted.revision, wanted.output, write=share is not None)
    settings = checkpoint_settings | wanted.settings
    # Anew is another run: whatever goes wrong with it, the records of the one before are still there.
    if again := before.get("again", 0) + wanted.overwrite:
        settings["again"] = again
    run = fingerprint(settings)
    say(f"model {title}")
    found = find(wanted.inputs, column=wanted.column, split=wanted.split, root=_root(wanted, last))
    items = [item for item in found.items if not _has_beside(item, wanted.skip_with)]
    _say_passed_over(found, len(found.items) - len(items), wanted.skip_with)
    items = items[: wanted.limit]
    records = [record for record in journal.records() if record.run == run]
    plan = make_plan(items, wanted.prompts, records, retry_errors=wanted.retry_errors, refuse_above=wanted.refuse_above)
    say(f"{len(items)} items, {len(plan.tasks)} of them to caption (run {run})")
    if plan.changed:
        say(
            f"{plan.changed} captions hold no more: their pictures, or what is asked of them, are others now. They go "
            "to superseded.jsonl"
        )
    if plan.known and not plan.matching:
        say(f"None of the {plan.known} records here is of these inputs; are they another copy? Then see --root.")
    if plan.errors:
        say(f"{plan.errors} earlier errors are left alone; --retry-errors tries them again")
    if last and not records and not wanted.overwrite:
        say("a new run: " + ("; ".join(differences(before, settings)) or "nothing was recorded by the last one"))
    if share is not None:
        share()
    return Prepared(
        run=run,
        settings=settings,
        prompts=wanted.prompts,
        plan=plan,
        title=title,
        root=found.root,
        clashed=bool(found.clashes),
    )


def _root(wanted: Wanted, last: dict[str, Any]) -> str | None:
    if wanted.root is not None:
        if not wanted.root.is_dir():
            raise ValueError(f"--root {wanted.root} is no folder")
        return str(wanted.root.resolve())
    root: str | None = last.get("root")
    if root and not Path(root).is_dir():
        say(f"the last run's pictures were in {root}, which is gone: these are taken for the same ones")
        return None
    return root


def _has_beside(item: Item, extension: str | None) -> bool:
    whole_file = item.row is None and item.length is None
    # `Path.exists` raises for a name that is too long.
    return extension is not None and whole_file and os.path.exists(Path(item.file).with_suffix(extension))


def _say_passed_over(found: Found, captioned: int, extension: str | None) -> None:
    for why, paths in found.passed_over.items():
        say(f"passed over: {len(paths)} {why}: {some(paths)}")
    if captioned:
        say(f"passed over: {captioned} pictures that have a {extension} beside them")
    if found.clashes:
        say(f"error: {len(found.clashes)} names that more than one item has: {some(found.clashes)}")
