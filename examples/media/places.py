"""Where pictures lie, and what they are called: one name for a file, however the input that led to it was spelt."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO

__all__ = ["PassedOver", "key_of", "matches", "open_file", "read_list", "root_of", "walk"]

PassedOver = defaultdict[str, list[str]]
"""Why files and folders were left out, and which."""


def _real_folder(folder: str) -> str:
    return _real(os.path.join(os.getcwd(), folder))


_real = cache(os.path.realpath)  # asked for every picture in a folder


def key_of(path: str | Path, root: str) -> str:
    """The path of a file relative to the root: another path for every file, the same for all spellings of one.

    A link to a folder within the root keeps its name; on the way to the root, and back to it, links are followed.
    """
    whole = os.path.abspath(path)
    if ".." in Path(path).parts or not whole.startswith(os.path.join(root, "")):
        whole = os.path.join(_real_folder(os.path.dirname(os.fspath(path)) or "."), os.path.basename(path))
    whole = os.path.join(_straight(os.path.dirname(whole), root), os.path.basename(whole))
    try:
        return Path(os.path.relpath(whole, root)).as_posix()
    except ValueError:  # another drive of Windows
        return Path(whole).as_posix()


@cache
def _straight(folder: str, root: str) -> str:
    """The folder without the circles of links in the root that lead to it or to a folder above it."""
    for link in (*reversed(Path(folder).parents), Path(folder)):
        real = _real(str(link))
        if link.is_relative_to(root) and real != str(link) and Path(root).is_relative_to(real):
            return _straight(os.path.normpath(os.path.join(real, Path(folder).relative_to(link))), root)
    return folder


def root_of(inputs: list[str]) -> str | None:
    """The folder that all inputs lie in; None without inputs that lie anywhere, as datasets of the Hub."""
    folders = []
    for name in inputs:
        dataset = name.removeprefix("dataset:")
        if dataset == name:
            folders.append(_folder_of(name))
        elif os.path.isdir(dataset):  # it is one item's name, as a shard is
            folders.append(_real_folder(os.path.dirname(os.path.normpath(dataset)) or "."))
    try:
        return os.path.commonpath(folders) if folders else None
    except ValueError:
        return _real_folder(".")


def _folder_of(name: str) -> str:
    """A folder itself, a file's folder, of a glob the part without wildcards, of a list the folder of what it lists."""
    path = Path(name)
    if path.is_dir():
        return _real_folder(name)
    if path.suffix.lower() == ".txt" and path.is_file():
        own = _real_folder(str(path.parent))
        listed = os.path.commonpath(
            {_real_folder(os.path.dirname(path.parent / line)) for line in read_list(path)} or {own}
        )
        return own if os.path.commonpath([own, listed]) == own else listed
    fixed = name if path.exists() else re.split(r"[*?\[]", name)[0]
    return _real_folder(os.path.dirname(fixed) or ".")


def matches(pattern: str, passed_over: PassedOver) -> Iterator[Path]:
    """The files that a glob matches, in folders that links lead to more than once only by one of their names."""
    before, stars, after = pattern.partition("**")
    if stars and (not before or before.endswith("/")):  # `glob` goes in circles where links do
        top = before or "."
        for folder in sorted(glob(top)) if has_magic(top) else [top]:
            for path in walk(folder, passed_over):
                if _fits(path.relative_to(folder).parts, ("**" + after).split("/")):
                    yield path
        return
    found = [Path(match) for match in sorted(glob(pattern))]
    homes: dict[str, Path] = {}
    for parent in dict.fromkeys(path.parent for path in found):
        real = _real_folder(str(parent))
        if os.path.abspath(parent) == real:
            homes[real] = parent
        elif homes.setdefault(real, parent) != parent:
            passed_over["linked folders that are searched already"].append(str(parent))
    for path in found:
        if homes[_real_folder(str(path.parent))] != path.parent:
            continue
        if path.is_dir():
            passed_over["folders that a glob matches (/** searches them)"].append(str(path))
        elif path.is_symlink() and not path.exists():
            passed_over["links to nowhere"].append(str(path))
        else:
            yield path


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path fits a glob, as `glob` has it: names that begin with a dot only if the pattern does."""
    if not pattern or not parts:
        return not parts and all(each == "**" for each in pattern)
    first, rest = pattern[0], pattern[1:]
    seen = not parts[0].startswith(".") or first.startswith(".")
    if first == "**":
        return _fits(parts, rest) or (seen and _fits(parts[1:], pattern))
    return seen and fnmatchcase(parts[0], first) and _fits(parts[1:], rest)


def read_list(path: Path) -> Iterator[str]:
    """The lines of a list of paths. Names may hold bytes that are no UTF-8, and all line ends but one."""
    for line in path.read_bytes().decode("utf-8-sig", errors="surrogateescape").split("\n"):
        if name := line.strip():
            yield name


def open_file(path: str | Path) -> BinaryIO:
    """A file, to be read. Raises OSError for what cannot be, and for pipes and devices: their end may never come."""
    path = Path(path)
    if not path.is_file() and not path.is_dir() and path.exists():
        raise OSError(f"{path.name} is a pipe, socket or device")
    return path.open("rb")


def walk(folder: str, passed_over: PassedOver) -> Iterator[Path]:
    """All files below a folder. Linked folders are searched once, after the others.

    Unreadable folders and links to nowhere are added to `passed_over`.
    """
    seen: set[str] = set()
    waiting, links = [folder], []
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(here)
        if real in seen:  # only a link leads somewhere twice
            passed_over["linked folders that are searched already"].append(here)
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            passed_over[f"unreadable folders ({error.strerror})"].append(here)
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_symlink() or os.path.isfile(entry.path):
                yield Path(entry.path)
            elif os.path.isdir(entry.path):
                links.append(entry.path)
            elif not os.path.exists(entry.path):
                passed_over["links to nowhere"].append(entry.path)
