"""Spaces out captures after one ran out of memory, which other programs may give back soon, later or never.

Calls are numbered from 1. A wait ends at a call: the first one that may capture again.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable

_SHORTEST = 16
_LONGEST = 1 << 14
"""Calls from a capture that ran out of memory to the next one of its signature."""
_LONGEST_OF_ALL = 64
"""Calls from a capture that ran out of memory to the next one of any signature, at most twice as many."""
_REMEMBERED = 4096


class CaptureWaits:
    """The waits of one store after captures that ran out of memory.

    - A signature that ran out waits 16 calls, then 32, and so on: one that never fits costs ever less.
    - Between two such signatures there are some 16 calls, too.
    - All others wait some 16 calls after a signature that ran out for the first time, and longer after each further
      one: where nothing fits, few captures are tried.
    """

    def __init__(self) -> None:
        self.end_of_all = 0
        self._calls_of_all = _SHORTEST
        self._end_of_retries = 0
        self._of_signatures: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # calls to wait, end of the wait
        self._random = random.Random(0)  # waits that vary do not end at the same place of calls that repeat

    def end_of(self, signature: Hashable) -> int:
        """Return the first call that may capture a signature."""
        if signature not in self._of_signatures:
            return self.end_of_all
        _, end = self._of_signatures[signature]
        return max(end, self._end_of_retries, self.end_of_all)

    def begin(self, signature: Hashable, call: int, *, for_all: bool) -> int:
        """Note that memory ran out in a capture.

        Returns:
            The first call that may capture the signature again.
        """
        is_first = signature not in self._of_signatures
        calls, _ = self._of_signatures.pop(signature, (_SHORTEST // 2, 0))
        calls = min(2 * calls, _LONGEST)
        self._of_signatures[signature] = (calls, call + calls)
        if len(self._of_signatures) > _REMEMBERED:
            self._of_signatures.popitem(last=False)
        if for_all and is_first:
            self.end_of_all = call + self._varied(self._calls_of_all)
            self._calls_of_all = min(2 * self._calls_of_all, _LONGEST_OF_ALL)
        elif for_all:
            self._end_of_retries = call + self._varied(_SHORTEST)
        return self.end_of(signature)

    def note_success(self, signature: Hashable) -> None:
        """Note that a capture succeeded: there is memory for others like it."""
        self._of_signatures.pop(signature, None)
        self._calls_of_all = _SHORTEST

    def _varied(self, calls: int) -> int:
        """Return so many calls, or up to twice as many."""
        return calls + self._random.randrange(calls)
