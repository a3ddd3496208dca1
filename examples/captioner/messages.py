"""Say how a run begins and ends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NoReturn

import typer

from captioner.files import say, some
from captioner.journal import Record, Selection
from captioner.options import Options

_SHOWN_ERRORS = 5


def cannot_load(options: Options, error: Exception) -> str:
    reason = _first_line(str(error)) or type(error).__name__
    if not isinstance(error, OSError | ValueError):
        reason = f"{type(error).__name__}: {reason}"
    return f"cannot load {options.model}: {reason}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def stop(reason: str, code: int) -> NoReturn:
    first_step = "remove the cause, and " if code == 1 else ""
    print(f"\n{reason}; the captions so far are kept: {first_step}start the same command to go on", flush=True)
    raise typer.Exit(code)


def exit_by(records: Sequence[Record], missing: int, max_failures: float, has_failed: bool = False) -> None:
    """Count the records, name some that are errors, and exit with 1 if records are missing or too many are errors."""
    keys_of: dict[str, list[str]] = {}
    for record in records:
        if record.status == "error":
            keys_of.setdefault(_first_line(record.error or ""), []).append(record.key)
    errors = sum(map(len, keys_of.values()))
    for error, keys in sorted(keys_of.items(), key=lambda item: -len(item[1]))[:_SHOWN_ERRORS]:
        say(f"  error, {len(keys)} x {error} ({some(keys)})")
    if errors:
        print("  the records of status error in the output folder name all files")
    empty = sum(record.status == "ok" and not record.has_text for record in records)
    if empty:
        print(f"  {empty} captions are empty: the model ended at once; another prompt may help")
    print(f"{len(records) - errors - empty} of {len(records)} records have captions")
    if missing:
        print(f"{missing} records are missing: wait for the run, or start it once more")
    too_many = errors > max_failures * len(records)
    if too_many:
        print(f"{errors} of {len(records)} records are errors: more than --max-failures {max_failures:g} allows")
    if has_failed or missing or too_many:
        raise typer.Exit(1)


def incomplete(selection: Selection) -> str:
    """Return why the newest captions are not merged unless they are named."""
    run = selection.entry["run"]
    names = [f"--run {run}" + "".join(f" --prompt {shlex.quote(prompt)}" for prompt in selection.entry["prompts"])]
    for (other_run, prompt), count in selection.others.most_common():
        names.append(f"--run {other_run} --prompt {shlex.quote(prompt)} ({count} more)")
    reason = f"the newest captions (run {run}) are {len(selection.records)} records, and others are of more pictures"
    if selection.missing:
        names.append(f"start its command again, which writes the {selection.missing} records that it lacks")
    return f"{reason}; name what to merge: {', or '.join(names)}"
