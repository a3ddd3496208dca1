"""Calls of a tower whose attention alone is ours: its own forward runs, with segments whose lengths are known."""

from __future__ import annotations

from typing import Any

import transformers

from hf_vit_accel import versions
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.route import ROUTE, Route
from hf_vit_accel.families import Tower
from hf_vit_accel.tower import checks
from hf_vit_accel.tower.checks import Reasons
from hf_vit_accel.tower.code import names_of_forwards
from hf_vit_accel.tower.plan import Call, StockPlan, Way
from hf_vit_accel.tower.state import TowerState


def read(tower: Tower, state: TowerState, args: tuple[object, ...], kwargs: dict[str, object]) -> Call:
    """Return a call, with its grid on the host unless the stock forward must run as it is."""
    state.follow_attention(tower)
    names = state.family.arguments
    arguments: dict[str, Any] = dict(zip(names, args)) | kwargs  # noqa: B905
    reasons = checks.reasons_without_segments(tower, arguments, names)
    if state.popped is None:
        state.popped = versions.popped_by(names_of_forwards({type(module) for module in tower.modules()}))
        state.routes.allow(sum(parameter.nbytes for parameter in tower.parameters()))
    if "cu_seqlens" not in state.popped:
        reasons = [f"transformers {transformers.__version__} computes the segments of this tower by itself"]
    if state.settings.score_mod is not None and len({parameter.device for parameter in tower.parameters()}) > 1:
        # Between devices layers get copies of our offsets, which do not know the score_mod.
        reasons = ["the tower lies on several devices"]
    if reasons:
        return Call(reasons=Reasons(reasons))
    grid = state.family.grid(tower, arguments[names[1]].tolist())
    if not grid or min(min(sizes) for sizes in grid) < 1:  # the stock forward reports what else is wrong with a call
        return Call(reasons=Reasons([f"a row of {names[1]} has no frames, or no size"]))
    if state.family.geometry(tower).quarters and any(h % 2 or w % 2 for _, h, w in grid):
        return Call(reasons=Reasons([f"{names[1]} has an odd height or width, and a merger takes two by two rows"]))
    return Call(reasons=Reasons(), inputs=Inputs(pixels=arguments[names[0]], grid=grid, options=kwargs))


def decide(tower: Tower, state: TowerState, inputs: Inputs) -> StockPlan:
    """Return the plan of a call with our attention alone: by a route without operations."""
    assert state.popped is not None
    geometry = state.family.geometry(tower)
    spec = state.attention_spec(geometry, inputs.pixels.device)
    route = state.routes.get(inputs.grid, spec).ready()
    taken = state.popped
    if geometry.quarters:  # the tower would pass our offsets to the layers behind its merger, too
        taken = (taken - {"cu_seqlens"}) | {ROUTE}
    return StockPlan(way=Way.ATTENTION, reasons=(), injected=route.injected(taken), route=route)


def reasons_unserved(state: TowerState, route: Route) -> tuple[str, ...]:
    """Return why no layer attended through a backend, in any call of a layout so far; empty if one did.

    Raises:
        FallbackError: None did, under `strict` or beside a score_mod.
    """
    if route.attended:
        return ()
    # MiniMax-M3 in older versions: its layers know no segments.
    reason = f"no layer attended by segments, through a backend (transformers {transformers.__version__})"
    state.raise_if_strict([reason])
    return (reason,)
