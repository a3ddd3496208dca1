"""The header that each rank sends when it is done with its share of a call."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import torch

WORDS = 512
"""Words of 64 bits that `pack` returns, enough for 60 outputs. A checksum follows, which the host does not know."""
_LETTERS = 288
"""Letters of the text that are sent."""


class ShareResult(IntEnum):
    """The result of a rank's share."""

    DONE = 0
    ALONE = 1  # the rank cannot take its share, so each rank encodes the whole call
    FAILED = 2
    OUT_OF_MEMORY = 3


@dataclass(frozen=True)
class OutputShape:
    """Rows, columns and dtype of one output of a tower."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return self.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Header:
    """The report of a rank on its share of a call.

    Attributes:
        result: The result of its share.
        call: Digest of the grid and of the number of calls so far, equal on all ranks.
        options: Digest of gradients, dtype and trained weights, equal on all ranks that are done.
        outputs: Shapes of its outputs; empty for a rank without a share.
        text: Why it failed or encodes alone.
        checksum: Of the pixels of the whole call and of the weight that embeds them.
    """

    result: ShareResult
    call: int
    options: int
    outputs: tuple[OutputShape, ...] = ()
    text: str = ""
    checksum: int = 0

    def pack(self) -> list[int]:
        """Return the words of this header, without its checksum. Ranks trust each other, so it is a pickle."""
        packed = pickle.dumps(replace(self, text=self.text[:_LETTERS])).ljust(8 * WORDS, b"\0")
        words: list[int] = np.frombuffer(packed, np.int64).tolist()
        assert len(words) == WORDS, "a header of more outputs than any tower has"
        return words

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Header:
        """Read a header from the words of `pack`, then one word with the checksum."""
        header: Header = pickle.loads(np.array(words[:WORDS], np.int64).tobytes())
        return replace(header, checksum=words[WORDS])


def digest(value: object) -> int:
    """Return a signed 64-bit digest of a value's `repr`."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
