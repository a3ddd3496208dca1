"""The seeded faults still fit the source: each replaces text that stands there once."""

from pathlib import Path

import pytest
from seeded.faults import FAULTS, Fault

import hf_vit_accel

PACKAGE = Path(hf_vit_accel.__file__).parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_the_fault_can_be_seeded(fault: Fault) -> None:
    assert (PACKAGE / fault.path).read_text().count(fault.before) == 1
    assert fault.before != fault.after


def test_there_are_sixty_kinds() -> None:
    assert len({fault.kind for fault in FAULTS}) >= 60
