"""Find files, and give every file one name, however the input that led to it is spelt."""

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

from captioner.files import say

PassedOver = defaultdict[str, list[str]]
"""The files and folders that were left out, by reason."""


def _real_folder(folder: str) -> str:
    return _real(os.path.join(os.getcwd(), folder))


_real = cache(os.path.realpath)  # the folder of every picture is looked up


def key_of(path: str | Path, root: str) -> str:
    """Return the path of a file relative to the root: different for every file, equal for all spellings of one.

    A linked folder within the root keeps its name. Links that lead to the root, or back to it, are followed.
    """
    absolute = os.path.abspath(path)
    if ".." in Path(path).parts or not absolute.startswith(os.path.join(root, "")):
        absolute = os.path.join(_real_folder(os.path.dirname(os.fspath(path)) or "."), os.path.basename(path))
    absolute = os.path.join(_without_circles(os.path.dirname(absolute), root), os.path.basename(absolute))
    try:
        return Path(os.path.relpath(absolute, root)).as_posix()
    except ValueError:  # another drive on Windows
        return Path(absolute).as_posix()


@cache
def _without_circles(folder: str, root: str) -> str:
    """Remove links within the root that lead to the root or to a folder above it."""
    for link in (*reversed(Path(folder).parents), Path(folder)):
        real = _real(str(link))
        if link.is_relative_to(root) and real != str(link) and Path(root).is_relative_to(real):
            return _without_circles(os.path.normpath(os.path.join(real, Path(folder).relative_to(link))), root)
    return folder


def root_of(inputs: list[str]) -> str | None:
    """Return the folder that holds all inputs; None if no input lies on this disk, as data sets of the Hub."""
    folders = []
    for name in inputs:
        dataset = name.removeprefix("dataset:")
        if dataset == name:
            folders.append(_folder_of(name))
        elif os.path.isdir(dataset):  # a data set is one named item, as a shard is
            folders.append(_real_folder(os.path.dirname(os.path.normpath(dataset)) or "."))
    try:
        return os.path.commonpath(folders) if folders else None
    except ValueError:
        return _real_folder(".")


def kept_root(root: str | None) -> str | None:
    """Return the root of an earlier run, so that files keep their keys; None, with a message, if it is gone."""
    if root and not Path(root).is_dir():
        say(f"the last run's pictures were in {root}, which is gone: these are taken for the same ones")
        return None
    return root


def _folder_of(name: str) -> str:
    """Return a folder itself, the folder of a file or of a list's files, or the fixed part of a glob."""
    path = Path(name)
    if path.is_dir():
        return _real_folder(name)
    if path.suffix.lower() == ".txt" and path.is_file():
        list_folder = _real_folder(str(path.parent))
        file_folders = {_real_folder(os.path.dirname(path.parent / line)) for line in read_list(path)}
        common_folder = os.path.commonpath(file_folders or {list_folder})
        return list_folder if os.path.commonpath([list_folder, common_folder]) == list_folder else common_folder
    fixed_part = name if path.exists() else re.split(r"[*?\[]", name)[0]
    return _real_folder(os.path.dirname(fixed_part) or ".")


def matches(pattern: str, passed_over: PassedOver) -> Iterator[Path]:
    """Yield the files that a glob matches. A folder with several names, by links, is searched under one of them."""
    before, stars, after = pattern.partition("**")
    if stars and (not before or before.endswith("/")):  # `glob` follows circles of links
        top = before or "."
        for folder in sorted(glob(top)) if has_magic(top) else [top]:
            for path in walk(folder, passed_over):
                if _fits(path.relative_to(folder).parts, ("**" + after).split("/")):
                    yield path
        return
    paths = [Path(match) for match in sorted(glob(pattern))]
    name_by_real_folder = _one_name_per_folder(paths, passed_over)
    for path in paths:
        if name_by_real_folder[_real_folder(str(path.parent))] != path.parent:
            continue
        if path.is_dir():
            passed_over["folders that a glob matches (/** searches them)"].append(str(path))
        elif path.is_symlink() and not path.exists():
            passed_over["links to nowhere"].append(str(path))
        else:
            yield path


def _one_name_per_folder(paths: Sequence[Path], passed_over: PassedOver) -> dict[str, Path]:
    """Choose one name for every folder of the paths: its real one, else the first link to it."""
    names: dict[str, Path] = {}
    for folder in dict.fromkeys(path.parent for path in paths):
        real = _real_folder(str(folder))
        if os.path.abspath(folder) == real:
            names[real] = folder
        elif names.setdefault(real, folder) != folder:
            passed_over["linked folders that are searched already"].append(str(folder))
    return names


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether a path fits a glob. As in `glob`, hidden names need a pattern that begins with a dot."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    first = pattern[0]
    is_visible = not parts[0].startswith(".") or first.startswith(".")
    if first == "**":
        return _fits(parts, pattern[1:]) or (is_visible and _fits(parts[1:], pattern))
    return is_visible and fnmatchcase(parts[0], first) and _fits(parts[1:], pattern[1:])


def read_list(path: Path) -> Iterator[str]:
    """Yield the lines of a list of paths. Names may hold bytes that are no UTF-8, and other line ends."""
    for line in path.read_bytes().decode("utf-8-sig", errors="surrogateescape").split("\n"):
        if line.strip():
            yield line.strip()


def open_file(path: str | Path) -> BinaryIO:
    """Open a file to read it."""
    path = Path(path)
    if not path.is_file() and not path.is_dir() and path.exists():
        raise OSError(f"{path.name} is a pipe, socket or device")
    return path.open("rb")


def walk(folder: str, passed_over: PassedOver) -> Iterator[Path]:
    """Yield all files below a folder. Linked folders are searched once, after the others.

    Unreadable folders and links to nowhere are added to `passed_over`.
    """
    searched: set[str] = set()
    waiting = [folder]
    links: list[str] = []
    while waiting or links:
        current = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(current)
        if real in searched:  # only a link leads to a folder twice
            passed_over["linked folders that are searched already"].append(current)
            continue
        searched.add(real)
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError as error:
            passed_over[f"unreadable folders ({error.strerror})"].append(current)
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
