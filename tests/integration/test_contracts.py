"""Contracts that every way of patching keeps: what copies and pickles keep, and what `strict` refuses.

Each row of WAYS is a way of patching. Each test is a contract, and runs for every row:

1. A copy (by `deepcopy`, `pickle`, `torch.save`) computes what the original does and is patched alike. It starts with
   nothing cached or counted, shares no weights, and is unpatched by itself. A copied method has its copied owner.
2. Under `strict`, a call that the way cannot serve raises, and all others run; in pickled copies, too.
3. The random states of torch, Python and NumPy stay, so a seeded program draws the same numbers with us.
"""

import copy
import gc
import inspect
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import attention_only, copies
from support.changes import through_pickle, through_torch_save
from support.fp8 import run_fp8_on_cpu
from support.libraries import Handler
from support.ranks import run_on_ranks, share_small_calls
from support.tensors import flat
from support.towers import alike
from tiny import GRIDS, TINY, assert_close, chat_inputs, left_padded, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, FlexConfig, Fp8Config, GraphConfig, ReuseConfig
from hf_vit_accel.tower.state import state_of

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
}


def qwen3_tower() -> nn.Module:
    return tower_of(TINY["qwen3_vl"].build())


def tower_with_windows() -> nn.Module:
    return tower_of(TINY["qwen2_5_vl"].build())


def wrapped_tower() -> nn.Module:
    tower = qwen3_tower()
    tower.forward = Handler(tower.forward)
    return tower


def run_fast_tower(tower: nn.Module) -> list[torch.Tensor]:
    return run_tower(tower, GRIDS["mixed"])


def run_with_copies_of_pictures(tower: nn.Module) -> list[torch.Tensor]:
    """Call a tower with each picture twice."""
    grid = GRIDS["mixed"]
    pixels = pixels_for(tower, grid)
    with torch.no_grad():
        return flat(tower(torch.cat([pixels, pixels]), grid_thw=torch.tensor(grid * 2)))


def run_attention_only(tower: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return flat(tower(**attention_only.inputs(tower)))


@dataclass(frozen=True)
class Way:
    options: dict[str, Any]
    shown: str  # what `status` says of a tower that is patched so, after one call
    exact: bool = True  # whether outputs equal stock's
    fixtures: tuple[str, ...] = ()  # those that let the way run on a CPU
    build: Callable[[], nn.Module] = qwen3_tower
    run: Callable[[nn.Module], list[torch.Tensor]] = run_fast_tower
    only_attention: bool = False  # the tower's own forward runs, on our attention


def lower_far_scores(
    score: torch.Tensor,
    batch: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    slope: float,
) -> torch.Tensor:
    """Lower scores with the distance in the sequence. (A function of a module pickles.)"""
    return score - slope * (q_idx - kv_idx).abs()


WAYS: dict[str, Way] = {
    "plain": Way({}, "auto -> sdpa"),
    "plain, with windows": Way({}, "auto -> sdpa", build=tower_with_windows),
    "below a wrapper": Way({}, "auto -> sdpa", build=wrapped_tower),
    "a copy of remote code": Way(
        {"like": {"OlderCopyOfQwen3": "qwen3_vl"}},
        "OlderCopyOfQwen3",
        fixtures=("quick_proof",),
        build=partial(copies.build, copies.OlderCopyOfQwen3, depth=2),
    ),
    "a named backend": Way({"attention": "flex"}, "flex -> flex"),
    "a score_mod": Way(
        {"attention": FlexConfig(score_mod=partial(lower_far_scores, slope=0.5))}, "flex with a score_mod", exact=False
    ),
    "nothing fused": Way({"fuse": False}, "fused      nothing\n"),
    "graphs": Way(
        {"cuda_graphs": GraphConfig(max_tokens=128, exact_after=0)},
        "1 captured, 1 replays",
        fixtures=("on_cpu", "references"),
    ),
    "fp8": Way({"fp8": Fp8Config(min_seqlen=0)}, "cudnn_fp8", exact=False, fixtures=("fp8_on_cpu",)),
    "max_rows": Way({"max_rows": 40}, "1 calls in 5 passes"),
    "reuse within calls": Way({"reuse": True}, "8 items: 4 encoded, 4 copies", run=run_with_copies_of_pictures),
    "reuse across calls": Way(
        {"reuse": ReuseConfig(across_calls=True)},
        "8 items: 4 encoded, 4 copies, 0 from earlier calls; 4 held",
        run=run_with_copies_of_pictures,
    ),
}
WAYS |= {
    f"attention only, {name}": Way(
        {},
        "attention only",
        build=partial(attention_only.build, module, name),
        run=run_attention_only,
        only_attention=True,
    )
    for _, module, name in attention_only.CLASSES
}
ONLY_ATTENTION = next(name for name, way in WAYS.items() if way.only_attention)
"""A way that stands for the others whose attention alone is ours."""


@pytest.fixture
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_fp8_on_cpu(monkeypatch)


def is_alike(name: str) -> bool:
    """Return whether a way shows no more than another: towers whose attention alone is ours hold alike state."""
    return WAYS[name].only_attention and name != ONLY_ATTENTION


ALL_WAYS = [pytest.param(way, id=name, marks=[pytest.mark.matrix] * is_alike(name)) for name, way in WAYS.items()]


@pytest.fixture(params=ALL_WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    for name in request.param.fixtures:
        request.getfixturevalue(name)
    return request.param


# --- copies -----------------------------------------------------------------------------------------------------------


def status_without_times(tower: nn.Module) -> str:
    """Return what `status` says, without the seconds that a proof took."""
    return re.sub(r"[\d.]+ s\b", "", str(hf_vit_accel.status(tower)))


def check_copy(way: Way, copied: Callable[[nn.Module], nn.Module]) -> None:
    """Compare a copy of a used tower with what the tower itself did at first."""
    stock = way.build()
    tower = hf_vit_accel.patch(copy.deepcopy(stock), **way.options)
    outputs = way.run(tower)
    if way.exact:
        assert_close(outputs, way.run(stock))
    else:
        assert relative_error(outputs[-1], way.run(stock)[-1]) > 1e-4
    status_after_one_call = status_without_times(tower)
    assert way.shown in status_after_one_call
    way.run(tower)

    twin = copied(tower)
    assert state_of(twin) is not state_of(tower)
    assert hf_vit_accel.status(twin).towers[0].calls == 0
    assert_close(way.run(twin), outputs)
    assert status_without_times(twin) == status_after_one_call, "nothing was cached or counted before"

    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    changed = way.run(twin)
    assert relative_error(changed[0], outputs[0]) > 0.01
    assert_close(way.run(tower), outputs)

    hf_vit_accel.unpatch(twin)
    assert state_of(twin) is None and state_of(tower) is not None
    if way.exact:
        assert_close(way.run(twin), changed)


def pairs() -> Iterator[object]:
    """Yield every way with every copy. In every run each way has one, in turn; two have all."""
    for index, (name, way) in enumerate(WAYS.items()):
        for kind, copied in COPIES.items():
            is_in_turn = kind == ("deepcopy", "pickle")[index % 2] or name in ("plain", "graphs")
            is_left_out = is_alike(name) or not is_in_turn
            yield pytest.param(way, copied, id=f"{name}-{kind}", marks=[pytest.mark.matrix] * is_left_out)


@pytest.mark.parametrize(("way", "copied"), list(pairs()), indirect=["way"])
def test_a_copy_is_patched_on_its_own(way: Way, copied: Callable[[nn.Module], nn.Module]) -> None:
    check_copy(way, copied)


def check_copies_on_rank(rank: int) -> None:
    way = Way({"data_parallel": True}, f"rank {rank} of 2, 1 calls shared")
    for copied in COPIES.values():
        check_copy(way, copied)


def test_a_copy_of_a_tower_that_shares_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the row of `data_parallel`, whose calls need another rank, with all copies at once."""
    hf_vit_accel.patch(qwen3_tower())  # forked ranks inherit the proof
    share_small_calls(monkeypatch)
    run_on_ranks(check_copies_on_rank, 2, tmp_path)


@dataclass(frozen=True)
class Method:
    """A method that programs hold: collators keep `model.get_rope_index`, and data loaders pickle it for workers."""

    name: str
    owner: Callable[[Any], Any]
    fast_calls: Callable[[Any], int]  # of the owner
    copies: tuple[str, ...] = ("deepcopy", "pickle")


METHODS = {
    "tower": Method("forward", tower_of, lambda tower: state_of(tower).fast_calls, copies=("pickle",)),
    "text": Method("forward", lambda model: model.model.language_model, lambda text: text.forward.calls),
    "positions": Method(
        "get_rope_index", lambda model: model.model, lambda model: hf_vit_accel.status(model).models[0].calls
    ),
    "features": Method(
        "get_image_features", lambda model: model.model, lambda model: state_of(tower_of(model)).fast_calls
    ),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in METHODS for kind in METHODS[name].copies])
def test_a_copied_method_has_its_copied_owner(name: str, kind: str) -> None:
    """As stock's. Copied alone it keeps the owner; beside the owner it does not, so that the owner is freed at once."""
    method = METHODS[name]
    model = hf_vit_accel.patch(TINY["qwen2_5_vl"].build(), text=name == "text")
    owner = method.owner(model)
    bound = getattr(owner, method.name)
    inputs = left_padded(model)
    inputs |= {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"], "use_cache": False}
    arguments = {name: value for name, value in inputs.items() if name in inspect.signature(bound).parameters}

    def run(bound: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return flat(bound(**arguments))

    alone = COPIES[kind](bound)
    gc.collect()
    expected = run(bound)
    assert_close(run(alone), expected, 0.0)
    assert alone.__self__ is not owner and getattr(alone.__self__, method.name) is alone
    assert method.fast_calls(alone.__self__) == 1
    for held in ({"bound": bound, "owner": owner}, {"owner": owner, "bound": bound}):
        twin = COPIES[kind](held)
        assert twin["owner"] is not owner and twin["bound"].__self__ is twin["owner"]
        assert_close(run(twin["bound"]), expected, 0.0)
    del twin["owner"]
    with pytest.raises(ReferenceError, match="was deleted; keep the model"):
        run(twin["bound"])


# --- random states ----------------------------------------------------------------------------------------------------


def random_states() -> list[bytes]:
    """Return the states that programs seed."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    others = repr(random.getstate()), repr(np.random.get_state(legacy=False)["state"]["key"].tolist())
    return [state.numpy().tobytes() for state in states] + [state.encode() for state in others]


def test_a_tower_draws_no_numbers_of_the_users(way: Way) -> None:
    tower = way.build()
    before = random_states()
    hf_vit_accel.patch(tower, **way.options)
    way.run(tower)
    str(hf_vit_accel.status(tower))
    hf_vit_accel.unpatch(tower)
    assert random_states() == before


@pytest.mark.parametrize("family", alike("qwen3_vl", *(name for name in TINY if name != "qwen3_vl")))
def test_a_model_draws_no_numbers_of_the_users(family: str) -> None:
    """A whole model has more to try: how it encodes images and videos together."""
    model = TINY[family].build()
    inputs = chat_inputs(model, GRIDS["mixed"])
    before = random_states()
    hf_vit_accel.patch(model)
    with torch.no_grad():
        model(**inputs)
    with hf_vit_accel.patched(model, every_rank=True):
        pass
    hf_vit_accel.unpatch(model)
    assert random_states() == before


# --- strict -----------------------------------------------------------------------------------------------------------


def call_with_attentions(way: Way, tower: nn.Module) -> object:
    with mock.patch.object(tower.config, "_output_attentions", True):  # its setter refuses any attention but eager
        return way.run(tower)


def call_with_hook(way: Way, tower: nn.Module) -> object:
    """Call a tower with a hook on the rotation of positions."""
    with tower.rotary_pos_emb.register_forward_hook(lambda *_: None):
        return way.run(tower)


def call_with_empty_image(way: Way, tower: nn.Module) -> object:
    """Call a tower with an image of no frames and no size."""
    arguments = attention_only.inputs(tower)
    name = attention_only.grid_name(tower)
    arguments[name] = torch.cat([arguments[name], torch.zeros_like(arguments[name][:1])])
    with torch.no_grad():
        return flat(tower(**arguments))


REFUSED = {
    "output_attentions is requested": call_with_attentions,
    "hooks on rotary_pos_emb": call_with_hook,
}
REFUSED_WITH_ATTENTION_ONLY = {"no frames, or no size": call_with_empty_image}


@pytest.mark.parametrize("copied", alike(lambda tower: tower, through_pickle), ids=["itself", "pickle"])
def test_strict_serves_or_raises(way: Way, copied: Callable[[nn.Module], nn.Module]) -> None:
    tower = copied(hf_vit_accel.patch(way.build(), strict=True, **way.options))
    outputs = way.run(tower)
    for reason, call in (REFUSED_WITH_ATTENTION_ONLY if way.only_attention else REFUSED).items():
        with pytest.raises(FallbackError, match=reason):
            call(way, tower)
        assert_close(way.run(tower), outputs)
    [status] = hf_vit_accel.status(tower).towers
    assert (status.stock_calls, status.fallbacks) == (0, {})
