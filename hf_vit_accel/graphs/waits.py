"""Spaces out captures after one ran out of memory, which other programs may give back soon, later or never.

Calls are numbered from 1. A wait ends at a call: the first one that may capture again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_SHORTEST = 16
_LONGEST = 512
"""Calls from a capture that ran out of memory to the next one of its signature."""
_LONGEST_OF_ALL = 128
"""Calls from a capture that ran out of memory to the next one of any signature, at most."""
_REMEMBERED = 4096


class CaptureWaits:
    """The waits of one store: one for each signature that ran out of memory, and one for all captures.

    A signature waits 16 calls, then 32, and so on: one that never fits costs ever less. All captures wait 16 calls.
    This wait doubles each time that memory runs out for another signature than before: where nothing fits, few
    captures are tried.
    """

    def __init__(self) -> None:
        self.end_of_all = 0
        self._calls_of_all = _SHORTEST
        self._last: Hashable = None  # the signature that ran out last
        self._of_signatures: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # calls to wait, end of the wait

    def end_of(self, signature: Hashable) -> int:
        """Return the first call that may capture a signature."""
        _, end = self._of_signatures.get(signature, (0, 0))
        return max(end, self.end_of_all)

    def begin(self, signature: Hashable, call: int, *, for_all: bool) -> int:
        """Note that memory ran out in a capture.

        Args:
            signature: What was captured.
            call: The number of the call.
            for_all: Whether captures of other signatures wait, too.

        Returns:
            The first call that may capture the signature again.
        """
        calls, _ = self._of_signatures.pop(signature, (_SHORTEST // 2, 0))
        calls = min(2 * calls, _LONGEST)
        self._of_signatures[signature] = (calls, call + calls)
        if len(self._of_signatures) > _REMEMBERED:
            self._of_signatures.popitem(last=False)
        if for_all:
            if self._last not in (None, signature):
                self._calls_of_all = min(2 * self._calls_of_all, _LONGEST_OF_ALL)
            self._last = signature
            self.end_of_all = call + self._calls_of_all
        return self.end_of(signature)

    def note_success(self, signature: Hashable) -> None:
        """Note that a capture succeeded: there is memory for others like it."""
        self._of_signatures.pop(signature, None)
        self._calls_of_all = _SHORTEST
        self._last = None
