"""Test patched towers against stock ones: every family, kind of input, way to patch and undo, and reason for stock."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from support.towers import ONE_TOWER, alike
from tiny import FAMILIES, GRIDS, TINY, assert_close, outputs_of, pixels_for, run_tower, tower_of
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import ModelOutput

import hf_vit_accel
from hf_vit_accel import FlexConfig, GraphConfig, ReuseConfig
from hf_vit_accel.families.interface import form_of
from hf_vit_accel.tower.state import state_of


@pytest.fixture(scope="module", params=[*FAMILIES[1:], *alike(FAMILIES[0], "qwen3_vl_moe")])
def shared(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return one model per family, for tests that do not change it."""
    return TINY[request.param].build()


both_fusions = pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])


@both_fusions
def test_patched_equals_stock(shared: PreTrainedModel, fuse: bool) -> None:
    tower = tower_of(shared)
    expected = {name: run_tower(tower, grid) for name, grid in GRIDS.items()}
    with hf_vit_accel.patched(shared, fuse=fuse, strict=True):
        for name, outputs in expected.items():
            assert_close(run_tower(tower, GRIDS[name]), outputs)
        assert state_of(tower).fast_calls == len(GRIDS)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected["mixed"], 0.0)


def test_an_output_is_what_its_constructor_makes(shared: PreTrainedModel) -> None:
    """It has stock's items and attributes, and can be pickled and copied: callers get it in place of stock's."""
    tower = tower_of(shared)
    pixels = pixels_for(tower, GRIDS["mixed"])
    grid = torch.tensor(GRIDS["mixed"])
    stock = tower(pixels, grid_thw=grid)
    with hf_vit_accel.patched(shared):
        ours = tower(pixels, grid_thw=grid)
    assert type(ours) is type(stock)
    if isinstance(stock, ModelOutput):
        for output in (ours, copy.copy(ours), pickle.loads(pickle.dumps(ours))):
            assert list(output) == list(stock) and list(vars(output)) == list(vars(stock))
            assert all(output[name] is getattr(output, name) for name in output)
            assert len(output.to_tuple()) == len(stock.to_tuple())


@dataclass
class MergedFirst(ModelOutput):
    """An output as the code of a copy may declare it."""

    pooler_output: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


def test_an_output_has_the_fields_of_its_class_in_their_order() -> None:
    rows = torch.zeros(4, 8)
    merged = torch.ones(1, 8)
    for stock in (
        MergedFirst(last_hidden_state=rows, pooler_output=merged),
        BaseModelOutputWithPooling(pooler_output=merged),
        BaseModelOutputWithPooling(last_hidden_state=rows),
    ):
        ours = form_of(stock, len(rows)).build([rows, merged])
        assert list(ours) == list(stock) and all(ours[index] is stock[index] for index in range(len(stock)))


def test_layouts_of_equal_size_are_distinguished(shared: PreTrainedModel) -> None:
    """Layouts share their rows and their longest segment, which must not be the key of graphs and caches."""
    tower = tower_of(shared)
    layouts = [[(1, 8, 4), (1, 4, 8)], [(1, 4, 8), (1, 8, 4)], [(2, 4, 8)], [(1, 4, 8)] * 2, [(1, 2, 16), (1, 8, 4)]]
    expected = [run_tower(tower, grid) for grid in layouts]
    with hf_vit_accel.patched(shared):
        for _ in range(2):
            for grid, outputs in zip(layouts, expected, strict=True):
                assert_close(run_tower(tower, grid), outputs)
        assert state_of(tower).routes.cache.misses == len(layouts)


def traces_of(model: PreTrainedModel) -> list[object]:
    """Return everything that patching may change on a model."""
    tower = tower_of(model)
    return [
        sorted(vars(tower)),
        vars(tower).get("forward"),
        [(name, list(m._forward_hooks), list(m._forward_pre_hooks)) for name, m in model.named_modules()],
        [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        [(name, p.data_ptr(), p.shape, p.stride()) for name, p in model.named_parameters()],
        list(model.state_dict()),
    ]


def test_unpatch_leaves_everything_as_before(model: PreTrainedModel) -> None:
    tower = tower_of(model)
    before = traces_of(model)
    expected = run_tower(tower, GRIDS["mixed"])
    assert hf_vit_accel.patch(model) is model
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert hf_vit_accel.unpatch(model) is model
    assert traces_of(model) == before
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)
    assert hf_vit_accel.unpatch(model) is model and traces_of(model) == before


def test_patched_restores_the_former_settings(model: PreTrainedModel) -> None:
    tower = tower_of(model)
    before = traces_of(model)
    with hf_vit_accel.patched(model, attention="sdpa") as same:
        assert same is model
        attributes = sorted(vars(tower))
        with hf_vit_accel.patched(model, fuse=False):
            assert not state_of(tower).settings.fuse and sorted(vars(tower)) == attributes
        assert state_of(tower).settings.attention == "sdpa" and state_of(tower).settings.fuse
    assert traces_of(model) == before
    with pytest.raises(RuntimeError, match="mine"), hf_vit_accel.patched(model):
        raise RuntimeError("mine")
    assert traces_of(model) == before


@pytest.mark.parametrize("shared", ONE_TOWER, indirect=True)
def test_two_threads_get_their_own_answers(shared: PreTrainedModel) -> None:
    tower = tower_of(shared)
    names = ("smallest", "video", "mixed")
    expected = {(name, seed): run_tower(tower, GRIDS[name], seed) for name in names for seed in range(2)}

    def work(seed: int) -> None:
        for _ in range(5):
            for name in names:
                assert_close(run_tower(tower, GRIDS[name], seed), expected[name, seed])

    with hf_vit_accel.patched(shared), ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


def test_neither_inputs_nor_earlier_outputs_are_changed(shared: PreTrainedModel) -> None:
    tower = tower_of(shared)
    grid = torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    with hf_vit_accel.patched(shared), torch.no_grad():
        tensors = [pixels, grid, *outputs_of(tower(pixels, grid_thw=grid))]
        copies = [tensor.clone() for tensor in tensors]
        run_tower(tower, GRIDS["images"], 1)
    assert all(torch.equal(tensor, former) for tensor, former in zip(tensors, copies, strict=True))


def test_under_another_default_device(shared: PreTrainedModel) -> None:
    tower = tower_of(shared)
    expected = run_tower(tower, GRIDS["mixed"])
    pixels = pixels_for(tower, GRIDS["mixed"])
    grid = torch.tensor(GRIDS["mixed"])
    with hf_vit_accel.patched(shared), torch.device("meta"), torch.no_grad():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)


@both_fusions
@pytest.mark.parametrize("shared", ONE_TOWER, indirect=True)
@pytest.mark.parametrize("case", ["padding rows", "padding rows without patches", "integers", "a batch"])
def test_odd_input_that_stock_takes_is_taken(shared: PreTrainedModel, case: str, fuse: bool) -> None:
    """Pixels in another shape than the processor's go the stock way."""
    tower = tower_of(shared)
    grid = torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    if case == "padding rows":
        grid = torch.cat([grid.new_zeros(1, 3), grid, grid.new_tensor([[0, 6, 4]])])
    elif case == "padding rows without patches":
        grid = torch.cat([grid, grid.new_tensor([[0, 0, 5], [0, 3, 0]])])
    elif case == "integers":
        pixels = (pixels * 10).int()
    else:
        pixels = pixels[None]
    with torch.no_grad():
        try:
            expected = outputs_of(tower(pixels, grid))
        except RuntimeError:
            pytest.skip("this transformers does not take it")
        with hf_vit_accel.patched(shared, fuse=fuse):
            assert_close(outputs_of(tower(pixels, grid)), expected)
            assert state_of(tower).fast_calls == (case != "a batch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "varlen"}, r"to be one of 'auto', .*'sdpa', got 'varlen'; did you mean 'torch_varlen'\?$"),
        ({"attention": "SDPA"}, r"did you mean 'sdpa'\?$"),
        ({"attention": "fa3"}, r"did you mean 'flash_attention_3'\?$"),
        ({"attention": "nonsense"}, "got 'nonsense'$"),
        ({"attention": 3}, "got 3$"),
        ({"attention": "eager"}, r"is transformers' own name: attention='auto' takes(?!.*did you mean)"),
        ({"attention": "paged|sdpa"}, "is transformers' own name"),
        ({"attention": "kernels-community/flash-attn3"}, "is transformers' own name"),
        ({"strict": "no"}, "expected strict to be True or False"),
        ({"reuse": 1}, "expected reuse to be True, False or a ReuseConfig"),
        ({"cuda_graphs": 3}, "expected cuda_graphs to be"),
        ({"fp8": "e4m3"}, "expected fp8 to be"),
        ({"fp8": True, "attention": FlexConfig(score_mod=lambda score, b, h, q, k: score)}, "beside a score_mod"),
        ({"every_rank": "yes"}, "expected every_rank to be True or False, got 'yes'"),
        *(({"fuse": value}, "expected fuse to be True or False, got ") for value in ("everything", {"norms"}, None, 1)),
        *(({"max_rows": value}, "max_rows, unless 'auto' or None, to be an integer of at") for value in (0, 1.5, True)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),  # the address of a function differs
)
def test_senseless_options_are_refused(options: dict[str, object], message: str) -> None:
    model = TINY["qwen3_vl"].build()
    with pytest.raises(ValueError, match=message):
        hf_vit_accel.patch(model, **options)
    assert state_of(tower_of(model)) is None


SENSELESS: dict[type, dict[str, tuple[object, ...]]] = {
    GraphConfig: {
        "max_tokens": (0, 1.5),
        "exact_after": (-1,),
        "max_graphs": (0,),
        "max_bytes": (True,),
        "budgets": ((), (4, 4), (8, 4), (0, 4), (True, 4), 5),
    },
    ReuseConfig: {"across_calls": (1,), "gigabytes": (0, float("nan"), "2")},
    FlexConfig: {"score_mod": (3, "near", lambda score: score, lambda a, b, c, d, e, f: a)},
}


@pytest.mark.parametrize(("config", "name"), [(config, name) for config in SENSELESS for name in SENSELESS[config]])
def test_senseless_fields_of_options_are_refused(config: type, name: str) -> None:
    for value in SENSELESS[config][name]:
        with pytest.raises(ValueError, match=f"expected {name} (to be|as) "):
            config(**{name: value})
