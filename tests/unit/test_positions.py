"""Test the model around the tower: positions and masks are transformers' own, and every change of a model counts."""

import copy
import gc
import inspect
import random
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, ClassVar, TypeAlias

import pytest
import tiny
import torch
from support.changes import through_pickle
from support.composites import COMPOSITES
from support.cpu_graphs import SMALL, Recorder
from support.towers import alike
from tiny import TINY, left_padded, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel.model import around, host

Model: TypeAlias = Any
"""A model of transformers or an argument of its methods, which have no types."""
Inputs = dict[str, Any]
"""The arguments of a model's forward by name."""


SERVED = [*TINY, "qwen3_5", "qwen4_exp", "cohere_compass", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "ernie4_5_vl_moe"]
"""Models whose positions are tested with random batches."""
SIMILAR = {"qwen3_vl_moe", "glm4v_moe", "glm46v", "glm_ocr"}
"""Models whose code is that of others."""
in_models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (name in SIMILAR)) for name in SERVED]
)
MERGED_FRAMES = {"ernie4_5_vl_moe"}
"""Models that merge the frames of a video."""
SPLIT_FRAMES = {*SERVED} - {"qwen2_vl", "qwen2_5_vl", *MERGED_FRAMES}
"""Models in which every frame of a video is a run of tokens of its own."""


def build(name: str) -> Model:
    return TINY[name].build() if name in TINY else COMPOSITES[name].make()


def holder_of(model: nn.Module) -> Model:
    [(_, holder)] = around.holders_of(model)
    return holder


def status_of(model: nn.Module) -> hf_vit_accel.ModelStatus:
    [status] = hf_vit_accel.status(model).models
    return status


class OnDevice(torch.Tensor):
    """A tensor that counts as one of a GPU, with everything that is computed from it. Counts the waits of the host."""

    WAITS = ("tolist", "item", "__bool__", "__int__", "__index__", "__format__", "cpu", "nonzero", "numpy")
    waits: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Model, types: object, args: Model = (), kwargs: Model = None) -> Model:
        name = getattr(func, "__name__", "")
        if name in cls.WAITS:
            cls.waits[name] += 1
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor).clone() if name == "cpu" else result


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> type[OnDevice]:
    """Treat such tensors like those of a GPU, which a transfer brings to the host."""
    monkeypatch.setattr(host, "is_on_host", lambda tensor: not isinstance(tensor, OnDevice))
    monkeypatch.setattr(OnDevice, "waits", Counter())
    return OnDevice


def moved(inputs: Inputs) -> Inputs:
    """Return inputs with the small tensors on a device."""
    small = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and "pixel" not in name}
    return inputs | {name: value.as_subclass(OnDevice) for name, value in small.items()}


def random_batch(config: Model, name: str, seed: int, kinds_of_pictures: Sequence[int]) -> Inputs:
    """Draw samples of text, images and videos, padded on either side, with or without a mask and intervals."""
    draw = random.Random(seed)
    merge = config.vision_config.spatial_merge_size
    merged_frames = config.vision_config.temporal_merge_size if name in MERGED_FRAMES else 1
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    rows = []
    for _ in range(draw.randint(1, 5)):
        kinds = [0] * draw.randint(0, 4)
        for _ in range(draw.randint(0, 4)):
            kind = draw.choice(kinds_of_pictures)
            t = draw.randint(1, 3) if kind == 2 else 1
            h = draw.randint(1, 5)
            w = draw.randint(1, 5)
            grids[kind].append([t * (merged_frames if kind == 2 else 1), h * merge, w * merge])
            for _ in range(t if name in SPLIT_FRAMES else 1):
                kinds += [kind] * (h * w * (1 if name in SPLIT_FRAMES else t)) + [0] * draw.randint(1, 3)
        rows.append(kinds or [0])
    longest = max(len(row) for row in rows) + draw.randint(0, 2)
    is_left = draw.random() < 0.5
    masks = []
    for index, row in enumerate(rows):
        fill = [0] * (longest - len(row))
        rows[index] = fill + row if is_left else row + fill
        masks.append(fill + [1] * len(row) if is_left else [1] * len(row) + fill)
    mask = torch.tensor(masks)
    seconds = [draw.uniform(0.1, 3.0) for _ in grids[2]]
    return {
        "input_ids": torch.tensor(rows) + 5,
        "mm_token_type_ids": torch.tensor(rows, dtype=draw.choice([torch.int32, torch.int64])),
        "attention_mask": draw.choice([mask, mask.bool(), None, torch.ones_like(mask)]),
        "image_grid_thw": torch.tensor(grids[1]) if grids[1] else None,
        "video_grid_thw": torch.tensor(grids[2]) if grids[2] else None,
        "second_per_grid_ts": draw.choice([None, seconds, torch.tensor(seconds), torch.tensor(seconds).double()]),
    }


@pytest.mark.parametrize("seeds", alike(range(10), range(10, 40)), ids=str)
@pytest.mark.parametrize("kinds", [(1, 2), (1,)], ids=["images and videos", "images"])
@in_models
def test_positions_of_random_batches(name: str, kinds: Sequence[int], seeds: range, on_device: type[OnDevice]) -> None:
    """Images alone are numbered at once: fewer than half of those batches need stock's loop over samples."""
    model = holder_of(hf_vit_accel.patch(build(name)))
    code = inspect.unwrap(type(model).get_rope_index).__code__
    loops = []

    def count(frame: Model, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            loops.append(frame)

    for seed in seeds:
        batch = random_batch(model.config, name, seed, kinds)
        expected = type(model).get_rope_index(model, **batch)
        sys.setprofile(count)
        ours = model.get_rope_index(**moved(batch), use_cache=True)
        sys.setprofile(None)
        for actual, stock in zip(ours, expected, strict=True):
            assert actual.dtype == stock.dtype and torch.equal(actual, stock), seed
    assert (status_of(model).calls, status_of(model).stock_calls) == (len(seeds), 0)
    assert 2 in kinds or len(loops) < len(seeds) / 2


def text_inputs(model: Model, inputs: Inputs) -> Inputs:
    """Return what the text model gets in a forward."""
    seen: Inputs = {}
    hook = holder_of(model).language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen


def waits_around_the_tower(model: Model, inputs: Inputs) -> Counter[str]:
    """Count the waits of a forward, without those of the text model."""
    counts: Counter[str] = Counter()
    OnDevice.waits.clear()
    start = holder_of(model).language_model.register_forward_pre_hook(lambda *_: counts.update(OnDevice.waits))
    with torch.no_grad():
        model(**moved(inputs))
    start.remove()
    return counts


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_forward_waits_once(name: str, on_device: type[OnDevice]) -> None:
    model = TINY[name].build()
    inputs = left_padded(model)
    inputs = {key: value.repeat(*[4] + [1] * (value.dim() - 1)) for key, value in inputs.items()}
    stock = waits_around_the_tower(model, inputs)
    ours = waits_around_the_tower(hf_vit_accel.patch(model), inputs)
    ours.pop("__format__", None)  # some versions format a count for a message that they do not print
    assert ours == {"cpu": 1} and stock["__index__"] + stock["__int__"] + stock["item"] > 10, stock


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_leaves_no_copies(mode: Model, on_device: type[OnDevice]) -> None:
    """The user may write to an inference tensor after a forward, and torch does not count that."""
    model = hf_vit_accel.patch(TINY["qwen3_vl"].build())
    for placeholder in (tiny.IMAGE, 5):
        inputs = left_padded(model)
        inputs["input_ids"][inputs["input_ids"] == tiny.IMAGE] = placeholder
        with mode(), nullcontext() if placeholder == tiny.IMAGE else pytest.raises(ValueError, match="do not match"):
            model(**moved(inputs))
        assert around.state_of(model.model).copies._copies == []


@pytest.mark.parametrize("surplus", [-1, 1])
def test_another_number_of_placeholders_raises_the_error_of_stock(surplus: int, on_device: type[OnDevice]) -> None:
    stock = TINY["qwen3_vl"].build()
    inputs = left_padded(stock)
    ids = inputs["input_ids"]
    places = (ids == stock.config.image_token_id) if surplus < 0 else (ids == 2)
    ids[tuple(places.nonzero()[0])] = 5 if surplus < 0 else stock.config.image_token_id
    errors = []
    for model in (stock, hf_vit_accel.patch(TINY["qwen3_vl"].build())):
        with pytest.raises(ValueError) as raised, torch.no_grad():
            model(**moved(inputs))
        errors.append(str(raised.value))
    assert errors[0] == errors[1] and "do not match" in errors[0]


def shifted(self: Model, *args: Model, **kwargs: Model) -> torch.Tensor:
    """Return vision positions that are another's."""
    return type(self)._former(self, *args, **kwargs) + 7


CHANGES = ["instance", "subclass", "class", "the method itself"]


@pytest.mark.parametrize("change", CHANGES)
def test_methods_that_change_after_patching_count(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_vit_accel.patch(TINY["qwen3_vl"].build())
    inputs = left_padded(model)
    before = text_inputs(model, inputs)["position_ids"]
    inner = model.model
    kind = type(inner)
    monkeypatch.setattr(kind, "_former", kind.get_vision_position_ids, raising=False)
    if change == "instance":
        inner.get_vision_position_ids = MethodType(shifted, inner)
    elif change == "subclass":
        inner.__class__ = type("Mine", (kind,), {"get_vision_position_ids": shifted})
    elif change == "class":
        monkeypatch.setattr(kind, "get_vision_position_ids", shifted)
    else:
        inner.get_rope_index = lambda *args, **kwargs: (before + 7, torch.zeros(len(inputs["input_ids"]), 1).long())
    after = text_inputs(model, inputs)["position_ids"]
    assert int((after - before).max()) == 7
    hf_vit_accel.unpatch(model)
    assert torch.equal(text_inputs(model, inputs)["position_ids"], after)


def test_a_method_of_the_instance_before_patching_stays() -> None:
    model = TINY["qwen3_vl"].build()
    mine = MethodType(lambda self, *args, **kwargs: type(self).get_rope_index(self, *args, **kwargs), model.model)
    model.model.get_rope_index = mine
    with torch.no_grad():
        hf_vit_accel.patch(model)(**left_padded(model))
    assert model.model.get_rope_index is mine and status_of(model).calls == 0
    assert hf_vit_accel.unpatch(model).model.get_rope_index is mine


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, copy.copy], ids=["deepcopy", "pickle", "copy"])
def test_copies_of_a_model_have_their_own_positions(duplicate: Model) -> None:
    model = hf_vit_accel.patch(TINY["qwen2_5_vl"].build())
    inputs = left_padded(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        twin = duplicate(model)
        inner = twin.model if duplicate is not copy.copy else copy.copy(model.model)
        inner(**inputs)
        assert status_of(inner).calls == 1 and status_of(model).calls == 1
        assert inner.get_rope_index.__self__ is inner
        around.uninstall(inner)
        assert "get_rope_index" not in vars(inner) and torch.equal(model(**inputs).logits, expected)
    assert status_of(model).calls == 2


@pytest.mark.parametrize(
    "duplicate", [lambda model: model, copy.deepcopy, through_pickle], ids=["itself", "deepcopy", "pickle"]
)
def test_a_deleted_model_is_freed_at_once(on_cpu: type[Recorder], duplicate: Model) -> None:
    """With its graphs, and without a collection. A method that is kept says so."""
    on_cpu._replay_of = lambda self, run, after_each: lambda: None  # a real graph holds nothing of Python
    model = duplicate(hf_vit_accel.patch(TINY["qwen2_vl"].build(fresh=True), cuda_graphs=SMALL))
    run_tower(tower_of(model), [(1, 6, 8)])
    assert hf_vit_accel.status(model).towers[0].graphs.captures
    method = model.model.get_rope_index
    references = [weakref.ref(model.model), weakref.ref(tower_of(model))]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="the model of this get_rope_index was deleted; keep the model"):
        method(torch.tensor([[5, 6]]))


class Strided(nn.Module):
    """A model whose positions of all tokens are apart by an attribute; it calls transformers' own method."""

    stride = 1

    def get_rope_index(self, *args: Model, **kwargs: Model) -> Model:
        positions, deltas = super().get_rope_index(*args, **kwargs)  # type: ignore[misc]
        return positions * self.stride, deltas


def test_an_override_runs_as_it_is() -> None:
    """It agrees with transformers' method, until its attribute changes."""
    model = TINY["qwen3_vl"].build()
    inner = model.model
    inner.__class__ = type("Mine", (Strided, type(inner)), {})
    hf_vit_accel.patch(model)
    inputs = left_padded(model)
    before = text_inputs(model, inputs)["position_ids"]
    inner.stride = 3
    assert torch.equal(text_inputs(model, inputs)["position_ids"], before * 3)
    status = status_of(model)
    assert status.calls == 0 and "get_rope_index" in status.unknown
    assert "get_rope_index is not transformers' own" in str(status)


@pytest.mark.parametrize("family", alike("qwen2_5_vl", "qwen2_vl", "qwen3_vl"))
def test_a_property_that_transformers_methods_cannot_mean(family: str) -> None:
    """colpali's ColQwen and BiQwen have a `spatial_merge_size`; methods read that of the config and the tower."""
    model = TINY[family].build()
    inner = model.model
    inputs = left_padded(model)
    with torch.no_grad():
        expected = model(**inputs).logits
    merge = property(lambda model: model.visual.config.spatial_merge_size)
    inner.__class__ = type("ColQwen", (type(inner),), {"spatial_merge_size": merge})
    hf_vit_accel.patch(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    status = status_of(model)
    assert status.calls == 1 and not status.unknown and not status.stock_calls


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("visual", property(lambda model: model._modules["visual"])),
        ("spatial_merge_size", property(lambda model: 2, lambda model, value: None)),
        ("dtype", property(lambda model: torch.float32)),
    ],
    ids=["of a module", "with a setter", "of transformers' class"],
)
def test_a_property_that_transformers_methods_may_mean(name: str, new: property) -> None:
    """A model of transformers has an attribute of that name, or its `__init__` may set one."""
    model = TINY["qwen2_5_vl"].build()
    inner = model.model
    inner.__class__ = type("Mine", (type(inner),), {name: new})
    hf_vit_accel.patch(model)
    assert status_of(model).unknown


def test_signatures_are_those_of_stock() -> None:
    """`generate` reads the signature of the methods for features, and calls them before its first forward."""
    stock = TINY["qwen3_vl"].build().model
    model = hf_vit_accel.patch(TINY["qwen3_vl"].build()).model
    for name in ("get_rope_index", "get_placeholder_mask", "get_image_features", "get_video_features"):
        assert name in vars(model)
        assert inspect.signature(getattr(model, name)) == inspect.signature(getattr(stock, name))


def test_a_tower_alone_changes_no_model() -> None:
    model = TINY["qwen2_vl"].build()
    hf_vit_accel.patch(tower_of(model))
    assert hf_vit_accel.status(model).models == () and "get_rope_index" not in vars(model.model)
    hf_vit_accel.patch(model)
    hf_vit_accel.unpatch(tower_of(model))
    with torch.no_grad():
        model(**left_padded(model))
    assert status_of(model).calls == 1


def test_loading_by_name() -> None:
    stock = TINY["qwen3_vl"].build()
    model = TINY["qwen3_vl"].build(attn_implementation="flash_vit_auto")
    inputs = left_padded(stock)
    assert torch.equal(text_inputs(model, inputs)["position_ids"], text_inputs(stock, inputs)["position_ids"])
    assert status_of(model).calls == 1
    hf_vit_accel.unpatch(model)
    assert hf_vit_accel.status(model).models == () and vars(model.model).keys() == vars(stock.model).keys()
    model.set_attn_implementation("flash_vit_auto")
    assert status_of(model).calls == 0
    model.set_attn_implementation("sdpa")
    assert hf_vit_accel.status(model).models == ()
