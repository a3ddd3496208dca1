"""The header that each rank sends when it is done with its share of a call: 64 packed words, then a checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import torch

PACKED_WORDS = 64
"""Words of 64 bits that `pack` returns. The checksum of pixels and weights follows: the host does not know it."""

MOST_OUTPUTS = 8
_TEXT_AT = 28  # 4 words, then 3 words for each output
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        text: Why it failed or encodes alone, cut to 288 letters.
        checksum: Of the pixels of the whole call and of the weight that embeds them.
    """

    result: ShareResult
    call: int
    options: int
    outputs: tuple[OutputShape, ...] = ()
    text: str = ""
    checksum: int = 0

    def pack(self) -> list[int]:
        """Return the words of this header, without its checksum."""
        words = [int(self.result), self.call, self.options, len(self.outputs)]
        for output in self.outputs:
            words += [output.rows, output.width, _DTYPES.index(output.dtype)]
        words += [0] * (_TEXT_AT - len(words))
        most_letters = 8 * (PACKED_WORDS - _TEXT_AT)
        letters = self.text.encode("ascii", "replace")[:most_letters].ljust(most_letters, b"\0")
        for start in range(0, len(letters), 8):
            words.append(int.from_bytes(letters[start : start + 8], "little", signed=True))
        return words

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Header:
        """Read a header from the words of `pack`, then one word with the checksum."""
        outputs = []
        for index in range(words[3]):
            rows, width, dtype_index = words[4 + 3 * index : 7 + 3 * index]
            outputs.append(OutputShape(rows, width, _DTYPES[dtype_index]))
        letters = b"".join(word.to_bytes(8, "little", signed=True) for word in words[_TEXT_AT:PACKED_WORDS])
        return cls(
            result=ShareResult(words[0]),
            call=words[1],
            options=words[2],
            outputs=tuple(outputs),
            text=letters.rstrip(b"\0").decode(),
            checksum=words[PACKED_WORDS],
        )


def digest(value: object) -> int:
    """Return a signed 64-bit digest of a value's `repr`."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
