"""Check the table of kernels: every kernel of the operations stands in a row."""

from __future__ import annotations

from support.kernel_table import DEFINED, KERNELS


def test_every_kernel_stands_in_a_row() -> None:
    """A kernel without a row would run on no CPU, and no test would break its launch."""
    declared = {name for row in KERNELS.values() for _, name in row.launched}
    assert not DEFINED.keys() - declared, "declare these kernels in tests/support/kernel_table.py"
