"""Check the table of kernels: every kernel of the operations stands in a row."""

from __future__ import annotations

import pytest
from support.kernel_table import DEFINED, KERNELS, SEPARATE_KERNELS, Kernel

ROWS = KERNELS | SEPARATE_KERNELS


def test_every_kernel_stands_in_a_row() -> None:
    """A kernel without a row would run on no CPU, and no test would break its launch."""
    declared = {name for row in ROWS.values() for _, name in row.launched}
    assert not DEFINED.keys() - declared, "declare these kernels in tests/support/kernel_table.py"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_a_function_and_a_reference_of_the_package(name: str) -> None:
    row: Kernel = ROWS[name]
    assert row.launched and row.function is not row.reference
    assert row.function.__module__.startswith("hf_vit_accel.")
    assert row.reference.__module__.startswith("hf_vit_accel.")
