"""The policy of captures alone: what fits gets its turn, what never fits is hardly tried, and what is paid for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import pytest

from hf_vit_accel.graphs.policy import AUTOMATIC, CREDIT_OF_REPLAY, NEVER, Policy


def captures_of(calls: Sequence[int], fitting: Collection[int]) -> tuple[list[int], dict[int, int]]:
    """Return the calls whose capture ran out of memory, and the call at which each signature was captured."""
    policy = Policy(AUTOMATIC, credit=NEVER)
    failed = []
    captured: dict[int, int] = {}
    for call, signature in enumerate(calls, 1):
        policy.count([signature])
        if signature in captured or policy.why_refused([(0, signature)]) is not None:
            continue
        if signature in fitting:
            policy.note_capture((0, signature), is_free=False)
            captured[signature] = call
        else:
            policy.note_out_of_memory((0, signature), for_all=True)
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


@pytest.mark.parametrize("place", [0, 9])
@pytest.mark.parametrize("period", [2, 8, 10, 18, 64, 127])
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
    policy = Policy(AUTOMATIC)
    policy.note_out_of_memory((0, 1), for_all=False)
    assert policy.why_refused([(0, 1)]) is not None and policy.why_refused([(0, 2)]) is None


def test_graphs_that_were_dropped_unpaid_are_captured_again_later() -> None:
    """Without replays nothing earns a capture, so calls must, or a tower would stay eager for ever."""
    policy = Policy(AUTOMATIC)
    for key in range(10):
        policy.note_capture((0, key), is_free=False)
    reasons = []
    for _ in range(2560):
        policy.count([])
        reasons.append(policy.why_unpaid(1))
    assert "paid" in str(reasons[5]) and reasons[-1] is None


@pytest.mark.parametrize("captures", [1, 3])
def test_captures_wait_until_replays_have_paid_for_them(captures: int) -> None:
    policy = Policy(AUTOMATIC)
    for key in range(5):
        assert policy.why_unpaid(1) is None
        policy.note_capture((0, key), is_free=False)
    replays = 0
    while policy.why_unpaid(captures) is not None:
        policy.credit += CREDIT_OF_REPLAY
        replays += 1
    assert replays == 8 * captures
