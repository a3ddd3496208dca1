"""Draw images and videos for tests of layouts, and cut them into frames."""

import random
from collections.abc import Iterable

Entry = tuple[int, int, int]


def drawn(generator: random.Random) -> list[Entry]:
    """Draw one to five images and videos of a few sizes, at most 1,100 rows."""
    sizes = [2 * generator.randint(1, 5) for _ in range(4)]
    count = generator.randint(1, 5)
    return [(generator.choice((1, 1, 2, 5)), generator.choice(sizes), generator.choice(sizes)) for _ in range(count)]


def frames_of(grid: Iterable[Entry]) -> list[Entry]:
    """Return the frames of a grid, which stay in one piece, in order."""
    return [(1, h, w) for t, h, w in grid for _ in range(t)]
