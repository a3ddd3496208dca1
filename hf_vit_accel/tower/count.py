"""Counts a call that is over, for `status`."""

from __future__ import annotations

from hf_vit_accel.tower.plan import NO_GRAPHS, Outcome, StockPlan, Way
from hf_vit_accel.tower.state import TowerState


def count(state: TowerState, outcome: Outcome) -> object:
    """Count a call that is over, and return its output. A call that failed is not counted."""
    plan = outcome.plan
    state.fallbacks.update((*plan.reasons, *outcome.reasons))
    if state.sharing is not None and plan.shared.result is not None:
        state.sharing.counts[plan.shared.result] += 1
    if plan.way is Way.FAST or (plan.way is Way.ATTENTION and not outcome.reasons):
        state.fast_calls += 1
    else:
        state.count_stock_call()
    if isinstance(plan, StockPlan):
        state.last_route = plan.route or state.last_route  # an untouched call has no route
        return outcome.output
    state.last_route = plan.routes_run[-1] if plan.routes_run else state.last_route
    runner = state.training_runner if plan.spec.request.grad else state.inference_runner
    if runner is not None and (plan.graphs is not NO_GRAPHS or runner.was_called):
        runner.last_way = plan.graph_way
    if len(plan.passes) > 1:
        state.pass_limit.calls += 1
        state.pass_limit.passes += len(plan.passes)
    return outcome.output
