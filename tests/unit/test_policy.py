"""The policy of captures alone: captures are paid for."""

from __future__ import annotations

import pytest

from hf_vit_accel.graphs.policy import AUTOMATIC, CREDIT_OF_REPLAY, Policy


def test_graphs_that_were_dropped_unpaid_are_captured_again_later() -> None:
    """Without replays nothing earns a capture, so calls must, or a tower would stay eager for ever."""
    policy = Policy(AUTOMATIC)
    for _ in range(10):
        policy.note_capture(is_free=False)
    reasons = []
    for _ in range(2560):
        policy.count([])
        reasons.append(policy.why_unpaid(1))
    assert "paid" in str(reasons[5]) and reasons[-1] is None


@pytest.mark.parametrize("captures", [1, 3])
def test_captures_wait_until_replays_have_paid_for_them(captures: int) -> None:
    policy = Policy(AUTOMATIC)
    for _ in range(5):
        assert policy.why_unpaid(1) is None
        policy.note_capture(is_free=False)
    replays = 0
    while policy.why_unpaid(captures) is not None:
        policy.credit += CREDIT_OF_REPLAY
        replays += 1
    assert replays == 8 * captures
