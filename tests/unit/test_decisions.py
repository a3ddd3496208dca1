"""A store of graphs decides how a pass is replayed: asked twice it says the same, and changes nothing.

On a CPU a recorder stands in that replays by running again, on poisoned buffers.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.cpu_graphs import Recorder
from support.graphs import Grid, patch, patch_training
from support.patching import training_step
from support.plans import assert_frozen, assert_same
from support.towers import SHALLOW
from tiny import run_tower, tower_of
from torch import nn

from hf_vit_accel.graphs.policy import NO_ROOM, Decision
from hf_vit_accel.graphs.store import GraphStore
from hf_vit_accel.layout import Grid as TupleOfSizes

IMAGE: Grid = [(1, 6, 8)]
OTHER: Grid = [(1, 4, 4)]


def call(model: nn.Module, calls: int, grid: Grid = IMAGE) -> None:
    for _ in range(calls):
        run_tower(tower_of(model), grid)


def after_calls(count: int) -> Callable[[nn.Module, type[Recorder]], GraphStore[Any]]:
    """Return a function that makes so many calls of one shape."""

    def prepare(model: nn.Module, recorder: type[Recorder]) -> GraphStore[Any]:
        store: GraphStore[Any] = patch(model, "auto")
        call(model, count)
        return store

    return prepare


def after_a_failure(model: nn.Module, recorder: type[Recorder]) -> GraphStore[Any]:
    """Let the capture of a shape fail."""
    store: GraphStore[Any] = patch(model, "auto")
    recorder.fail = RuntimeError("no capture")
    call(model, 2)
    recorder.fail = None
    return store


def without_room(model: nn.Module, recorder: type[Recorder]) -> GraphStore[Any]:
    """Let the graph of another shape take all the memory that graphs may hold."""
    store: GraphStore[Any] = patch(model, "auto")
    recorder.free_bytes = 8 << 20
    recorder.nbytes = 2 << 20
    call(model, 2, OTHER)
    call(model, 3)
    return store


def with_room_to_make(model: nn.Module, recorder: type[Recorder]) -> GraphStore[Any]:
    """Let so many calls find no room that the graphs go for them."""
    store = without_room(model, recorder)
    store.policy.without_room = 1000
    return store


def after_steps(model: nn.Module, recorder: type[Recorder]) -> GraphStore[Any]:
    """Train on one shape."""
    store: GraphStore[Any] = patch_training(tower_of(model), "auto")
    for _ in range(3):
        training_step(tower_of(model), IMAGE)
    return store


STATES: dict[str, tuple[Callable[[nn.Module, type[Recorder]], GraphStore[Any]], str]] = {
    "a shape that came once": (after_calls(1), "a size is captured when it comes again"),
    "a shape that came twice": (after_calls(2), "padded"),
    "a shape that came often": (after_calls(3), "exactly"),
    "a capture that failed": (after_a_failure, "capture failed: RuntimeError: no capture"),
    "graphs that fill their memory": (without_room, NO_ROOM),
    "graphs that are dropped for others": (with_room_to_make, "making room"),
    "training": (after_steps, "exactly"),
}
"""By state of a store: what brings it about, and how it decides about the shape then, or why no graph replays it."""


def kept_by(store: GraphStore[Any]) -> tuple[object, ...]:
    """Return copies of all that a store counts and keeps, and how many routes its tower has made."""
    counts = store.replays, store.captures, store.nbytes, dict(store.status().eager)
    graphs = dict(store._graphs), dict(store._steady), list(store._identities), store._recorder
    return copy.deepcopy(store.policy), counts, graphs, store._routes.cache.misses


def in_words(decision: Decision) -> str:
    if decision.makes_room:
        return "making room"
    return decision.reason if decision.replay == "never" else decision.replay


@pytest.mark.parametrize("name", STATES)
def test_a_pass_that_is_decided_twice_is_decided_alike_and_changes_nothing(on_cpu: type[Recorder], name: str) -> None:
    prepare, expected = STATES[name]
    store = prepare(SHALLOW.build(), on_cpu)
    grid: TupleOfSizes = tuple(IMAGE)
    spec = store._identities[-1].spec
    bins = store._bins(grid, spec)
    first = store.decide(grid, spec, bins)  # which may make routes: the tower keeps them
    before = kept_by(store)
    again = store.decide(grid, spec, bins)
    assert first == again and kept_by(store) == before
    assert_same(first, again)
    assert_frozen(first)
    assert in_words(first) == expected
