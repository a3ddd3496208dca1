"""Write whole files, lock folders, and name files to people."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["CANNOT_WRITE", "FULL", "fingerprint", "lock", "part_of", "replace_file", "say", "some"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CANNOT_WRITE = (*FULL, errno.EROFS, errno.EIO, errno.EACCES)


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file or, if it is interrupted, none of it."""
    with part_of(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """A file to write into, that becomes `path` if all goes well. Its name is short, for `path` may be a long one."""
    part = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short name for model and settings: equal settings have equal names, in any order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def lock(folder: Path, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Keeps other runs out of a folder for the length of a with block, however it ends.

    alone: nobody else is in it (then ValueError); else others of the same run may be. Yields what ends being alone.
    Where the file system or the operating system has no locks, nobody is kept out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        try:
            import fcntl
        except ImportError:  # pragma: no cover, on Windows there is none
            yield lambda: None
            return
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {folder}; wait for it, or name another output") from None
        except OSError:
            yield lambda: None
        else:
            yield lambda: fcntl.flock(file, fcntl.LOCK_SH)


def some(names: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def say(line: str) -> None:
    """Print a line that may hold names of files."""
    # A file name that is no valid UTF-8 is not to stop a run.
    print(line.encode("utf-8", errors="backslashreplace").decode(), flush=True)
