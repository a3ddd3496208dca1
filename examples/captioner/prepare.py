"""Find out, in the first process and before a model is loaded, which run this is and what it has to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from captioner.checkpoints import identity
from captioner.files import Settings, fingerprint, lock, say, some
from captioner.items import Item
from captioner.journal import Entry, Journal
from captioner.options import Options
from captioner.places import kept_root
from captioner.plan import Plan, differences, make_plan, unknown_fields
from captioner.sources import Found, find


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can begin."""

    run: str
    settings: Settings
    prompts: list[str]
    plan: Plan
    title: str
    root: str | None
    clashed: bool  # items share a key
    overwrite: str | None  # the command that began it with `--overwrite`, as a fingerprint


def prepare(options: Options, on_cuda: bool, stack: ExitStack) -> Prepared:
    """Find the items, plan what to do, and print both. The folder is locked as long as the stack is open."""
    if options.skip_with is not None and not options.skip_with.startswith("."):
        raise ValueError(f"expected --skip-with to be an extension such as .txt, got {options.skip_with}")
    journal = Journal(options.output)
    share_lock = None if options.dry_run else stack.enter_context(lock(options.output, alone=True))
    last_run = (journal.manifest()["runs"] or [{}])[-1]
    last_settings = last_run.get("settings", {})
    checkpoint_settings, title = identity(options.named, options.revision, options.output, write=share_lock is not None)
    settings = checkpoint_settings | options.settings(on_cuda)
    again = last_settings.get("again", 0)
    if again:
        settings["again"] = again
    goes_on = _is_unfinished_overwrite(options, fingerprint(settings), journal)
    if options.overwrite and not goes_on:
        # --overwrite makes another run, so the earlier records stay, even if this run fails.
        settings["again"] = again + 1
    run = fingerprint(settings)
    say(f"model {title}")
    found_items = find(options.inputs, column=options.column, split=options.split, root=_root(options, last_run))
    items = [item for item in found_items.items if not _has_text_beside(item, options.skip_with)]
    with_text = len(found_items.items) - len(items)
    _say_passed_over(found_items, with_text, options.skip_with)
    items = items[: options.limit]
    records = [record for record in journal.records() if record.run == run]
    plan = make_plan(
        items, options.prompts, records, retry_errors=options.retry_errors, refuse_above=options.refuse_above
    )
    if plan.tasks:
        captioned = {record.prompt for record in records if record.caption is not None}
        _check_prompts([prompt for prompt in options.prompts if prompt not in captioned], items)
    _say_plan(plan, len(items), run, is_other_copy=not plan.matching and not with_text)
    if last_run and not records and not options.overwrite:
        say("a new run: " + ("; ".join(differences(last_settings, settings)) or "the last run left no records"))
    if share_lock is not None:
        share_lock()
    return Prepared(
        run=run,
        settings=settings,
        prompts=options.prompts,
        plan=plan,
        title=title,
        root=found_items.root,
        clashed=bool(found_items.clashes),
        overwrite=options.command if options.overwrite or goes_on else None,
    )


def _is_unfinished_overwrite(options: Options, run: str, journal: Journal) -> bool:
    """Tell whether this command began a run with `--overwrite` that lacks records."""
    starts = [entry for entry in journal.manifest()["runs"] if entry["run"] == run]
    starts = [entry for entry in starts if entry.get("prompts") == options.prompts]  # one prompt may be tried meanwhile
    if not starts or starts[-1].get("overwrite") != options.command:
        return False
    records = [record for record in journal.records() if record.run == run and record.prompt in options.prompts]
    written = {(record.key, record.prompt) for record in records}
    expected = starts[-1]["records"]
    is_unfinished = len(written) < expected
    if is_unfinished and options.overwrite:
        say(f"goes on with the --overwrite run that was not finished: {len(written)} of {expected} records are there")
    return is_unfinished


def _check_prompts(prompts: Sequence[str], items: Sequence[Item]) -> None:
    """Raise ValueError for a prompt that no item can fill: every record of it would be an error."""
    unknown, available = unknown_fields(prompts, items)
    if unknown:
        names = ", ".join(f"{{{name}}}" for name in sorted(unknown))
        there = ", ".join(f"{{{name}}}" for name in sorted(available))
        raise ValueError(f"a prompt names {names}, which no picture has as a text or number; there are {there}")


def _root(options: Options, last_run: Entry) -> str | None:
    if options.root is not None:
        if not options.root.is_dir():
            raise ValueError(f"--root {options.root} is no folder")
        return str(options.root.resolve())
    return kept_root(last_run.get("root"))


def _has_text_beside(item: Item, extension: str | None) -> bool:
    is_file = item.row is None and item.length is None
    # `Path.exists` raises for a name that is too long.
    return extension is not None and is_file and os.path.exists(Path(item.file).with_suffix(extension))


def _say_plan(plan: Plan, items: int, run: str, *, is_other_copy: bool) -> None:
    say(f"{items} items, {len(plan.tasks)} of them to caption (run {run})")
    if items and not plan.tasks:
        say("Nothing is left. --no-patch and another --attention begin no new run; --overwrite captions anew.")
    if plan.changed:
        say(
            f"{plan.changed} captions are outdated, since their pictures or filled prompts changed. They go to "
            "superseded.jsonl"
        )
    if plan.records and is_other_copy:
        say(f"None of the {plan.records} records here is of these inputs; are they another copy? Then see --root.")
    if plan.errors:
        say(f"{plan.errors} earlier errors are left alone; --retry-errors tries them again")


def _say_passed_over(found_items: Found, with_text: int, extension: str | None) -> None:
    for why, paths in found_items.passed_over.items():
        say(f"passed over: {len(paths)} {why}: {some(paths)}")
    if with_text:
        say(f"passed over: {with_text} pictures that have a {extension} beside them")
    if found_items.clashes:
        say(f"error: {len(found_items.clashes)} items share a name with another: {some(found_items.clashes)}")
