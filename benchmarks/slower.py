"""List what takes longer than when an earlier file was written: by 3% at least, and by more than the spread of a run.

hf-vit-accel bench --json build/now.json && python benchmarks/slower.py benchmarks/towers.json build/now.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from measuring import Row


def key(row: Row) -> tuple[str, ...]:
    """Identify a row of a document."""
    return row["model"], row["size"], row["contender"]


def slower(before: Row, now: Row) -> Iterator[str]:
    """Yield a line for every row that is slower, and how many were compared."""
    for name in ("device", "dtype", "train"):
        if now.get(name) != before.get(name):
            yield f"{name}: {before.get(name)} before, {now.get(name)} now"
    earlier = {key(row): row for row in before["rows"] if row["ms"] is not None}
    pairs = [(row, earlier[key(row)]) for row in now["rows"] if row["ms"] is not None and key(row) in earlier]
    count = 0
    for row, old in sorted(pairs, key=lambda pair: pair[1]["ms"] / pair[0]["ms"]):
        if row["ms"] > 1.03 * old["ms"] and row["ms_low"] > old["ms_high"]:
            count += 1
            yield f"slower: {', '.join(key(row))}: {row['ms']:.2f} ms, before {old['ms']:.2f}"
    yield f"{len(pairs)} compared, {count} slower by more than 3% and the spread of their runs"


if __name__ == "__main__":
    if len(sys.argv) != 3 or {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        raise SystemExit
    print(*slower(*(json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:])), sep="\n")
