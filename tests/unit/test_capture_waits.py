"""The waits after captures that ran out of memory: what fits gets its turn, and what never fits is hardly tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import pytest

from hf_vit_accel.graphs.waits import CaptureWaits


def captures_of(calls: Sequence[int], fitting: Collection[int]) -> tuple[list[int], dict[int, int]]:
    """Return the calls whose capture ran out of memory, and the call at which each signature was captured."""
    waits = CaptureWaits()
    failed = []
    captured: dict[int, int] = {}
    for call, signature in enumerate(calls, 1):
        if signature in captured or call < waits.end_of(signature):
            continue
        if signature in fitting:
            waits.note_success(signature)
            captured[signature] = call
        else:
            waits.begin(signature, call, for_all=True)
            failed.append(call)
    return failed, captured


def test_a_size_that_never_fits_is_tried_ever_more_seldom() -> None:
    failed, _ = captures_of([1] * 10_000, ())
    gaps = [later - earlier for earlier, later in pairwise(failed)]
    assert len(gaps) >= 7 and all(gap >= 16 << index for index, gap in enumerate(gaps))


@pytest.mark.parametrize("count", [5, 40])
def test_many_sizes_that_never_fit_are_hardly_tried(count: int) -> None:
    calls = (list(range(count)) * 10_000)[:10_000]
    failed, _ = captures_of(calls, ())
    assert len([call for call in failed if call <= 500]) <= 14
    assert len([call for call in failed if call > 9_000]) <= 40, "one in 25 calls"


def test_ever_new_sizes_that_never_fit_are_hardly_tried() -> None:
    failed, _ = captures_of(range(10_000), ())
    assert len(failed) <= 10_000 // 64


@pytest.mark.parametrize("place", [0, 3, 9, 17])
@pytest.mark.parametrize("period", [2, 4, 8, 10, 16, 18, 32, 64, 127])
def test_a_size_that_fits_gets_its_turn_in_every_cycle(period: int, place: int) -> None:
    cycle = list(range(period))
    fitting = cycle[place % period]
    _, captured = captures_of(cycle * (40_000 // period), {fitting})
    assert fitting in captured


@pytest.mark.parametrize("pairs", [2, 5, 9])
def test_all_sizes_that_fit_get_their_turns_between_as_many_that_do_not(pairs: int) -> None:
    cycle = list(range(2 * pairs))
    _, captured = captures_of(cycle * (4_000 // len(cycle)), cycle[::2])
    assert sorted(captured) == cycle[::2]


def test_a_capture_for_warmup_delays_no_other() -> None:
    waits = CaptureWaits()
    assert waits.begin(1, 10, for_all=False) == waits.end_of(1) == 26
    assert waits.end_of(2) == 0
