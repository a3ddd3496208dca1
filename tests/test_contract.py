"""What we rely on in transformers and accelerate, one named test each, so that a change upstream fails that one.

And what happens at run time where it does not hold: the tower stays stock, with one warning that says what changed.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn
from transformers import modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hf_vit_accel
from hf_vit_accel import FallbackError, contract, fusion, registration
from hf_vit_accel.families import family_of
from hf_vit_accel.planning import PLANS, POPPED
from hf_vit_accel.tower import state_of

# What each tower takes from its keyword arguments instead of computing it.
POPPED_BY = {
    "qwen2_vl": {"position_ids", "cu_seqlens", "max_seqlen"},
    "qwen2_5_vl": {
        "position_ids",
        "cu_seqlens",
        "max_seqlen",
        "window_index",
        "cu_window_seqlens",
        "max_window_seqlen",
    },
    "qwen3_vl": {"position_ids", "cu_seqlens", "max_seqlen", "interp_indices", "interp_weights"},
}
POPPED_BY["qwen3_vl_moe"] = POPPED_BY["qwen3_vl"]


@pytest.fixture(params=list(TINY))
def tower(request: Any) -> Any:
    found = tower_of(TINY[request.param].build())
    found.tiny_name = request.param
    return found


def home_of(tower: Any) -> Any:
    return sys.modules[type(tower).forward.__module__]


# --- the code that the fast path stands in for ----------------------------------------------------------------------


def forwards_of(tower: Any) -> dict[str, Any]:
    """The forward, or function, of every role."""
    block = tower.blocks[0]
    modules = {
        "tower": tower,
        "block": block,
        "attention": block.attn,
        "norm": block.norm1,
        "mlp": block.mlp,
        "merger": tower.merger,
        "patch_embed": tower.patch_embed,
    }
    found = {role: type(module).forward for role, module in modules.items()}
    return found | contract.helpers_of(tower)


@pytest.mark.parametrize("role", [*contract.KNOWN, *contract.HELPERS])
def test_the_code_of_a_role_is_known(tower: Any, role: str) -> None:
    forward = forwards_of(tower).get(role)
    if forward in (None, nn.LayerNorm.forward):
        return
    assert contract.is_upstream(forward) and contract.changes(forward, role) == ()


def test_no_change_is_reported(tower: Any) -> None:
    assert list(contract.tower_changes(tower)) == []
    hf_vit_accel.patch(tower, strict=True)


def test_frequencies_are_a_module_of_positions(tower: Any) -> None:
    assert list(inspect.signature(tower.rotary_pos_emb.forward).parameters) in (["x", "position_ids"], ["position_ids"])
    cos, sin = fusion._tables(tower)(torch.zeros(6, 4), torch.arange(12).view(6, 2))
    assert cos.shape == sin.shape == (6, tower.blocks[0].attn.head_dim)
    assert_close([cos.square() + sin.square()], [torch.ones_like(cos)])


def test_half_of_a_head_is_rotated_into_the_other(tower: Any) -> None:
    x = torch.arange(8.0)
    assert torch.equal(home_of(tower).rotate_half(x), torch.cat((-x[4:], x[:4])))


# --- what fusion, structure and families read -----------------------------------------------------------------------


def test_parts_are_built_as_fusion_reads_them(tower: Any) -> None:
    """On a CPU no kernel runs and this would not be seen."""
    for block in tower.blocks:
        assert fusion._against_mlp(block.mlp) is None
        assert fusion._against_norm(block.norm1) is None and fusion._against_norm(block.norm2) is None
    for merger in (tower.merger, *getattr(tower, "deepstack_merger_list", ())):
        assert fusion._against_merger(merger) is None and isinstance(merger.hidden_size, int)
    assert fusion._against_embed(tower.patch_embed, tower.patch_embed.proj) is None
    assert fusion.is_plain(tower.rotary_pos_emb) is None


def test_attributes_of_tower_and_attention(tower: Any) -> None:
    attention = tower.blocks[0].attn
    assert attention.num_heads * attention.head_dim == attention.qkv.in_features == attention.proj.out_features
    assert attention.scaling == pytest.approx(attention.head_dim**-0.5) and not attention.is_causal
    assert attention.config is tower.config and attention.attention_dropout == 0.0
    family = family_of(tower)
    assert family is not None and family.geometry(tower).merge == tower.spatial_merge_size == 2
    assert (family.geometry(tower).window is not None) == hasattr(tower, "window_size")
    assert (family.geometry(tower).table is not None) == hasattr(tower, "pos_embed")
    assert family.deepstack == hasattr(tower, "deepstack_visual_indexes")
    if family.full_layers is not None:
        assert set(family.full_layers(tower)) < set(range(len(tower.blocks)))
    if family.deepstack:
        assert len(tower.deepstack_merger_list) == len(tower.deepstack_visual_indexes)


def test_the_output_class_has_the_fields(tower: Any) -> None:
    family = family_of(tower)
    assert family is not None
    fields = set(inspect.signature(getattr(home_of(tower), family.output)).parameters)
    assert {"last_hidden_state", "pooler_output"} | ({"deepstack_features"} if family.deepstack else set()) <= fields


# --- what goes through stock forwards -------------------------------------------------------------------------------


def test_towers_pop_the_metadata_and_hand_on_the_rest(tower: Any) -> None:
    """The popped names are honoured, none of them reaches a block under its own name, and ours does."""
    seen: list[dict[str, Any]] = []
    expected = run_tower(tower, GRIDS["mixed"])
    hf_vit_accel.patch(tower)
    handle = tower.blocks[0].register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert state_of(tower).stock_calls == 1
    handle.remove()
    [kwargs] = seen
    prepared = kwargs[PLANS]
    assert set(prepared.injected()) - {PLANS} == POPPED_BY[tower.tiny_name] and POPPED_BY[tower.tiny_name] <= set(
        POPPED
    )
    assert set(kwargs) & set(POPPED) <= {"cu_seqlens", "max_seqlen"}
    names = {name: kwargs["cu_seqlens"] is prepared.tensors.get(name) for name in ("cu_seqlens", "cu_window_seqlens")}
    assert any(names.values()), "the very offsets that were handed in"


def test_requested_outputs_are_captured_by_decorators_of_the_class(tower: Any) -> None:
    assert hasattr(type(tower).forward, "__wrapped__")
    pixels, grid = pixels_for(tower, GRIDS["images"]), torch.tensor(GRIDS["images"])
    with torch.no_grad():
        output = tower(pixels, grid_thw=grid, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) >= len(tower.blocks) and output.attentions is not None
    hooks = [hook for module in tower.modules() for hook in module._forward_hooks.values()]
    assert {hook.__module__ for hook in hooks} == {"transformers.utils.output_capturing"}


def test_the_hook_that_makes_inputs_require_gradients_is_known() -> None:
    model = TINY["qwen2_5_vl"].build()
    model.enable_input_require_grads()
    [hook] = tower_of(model).patch_embed._forward_hooks.values()
    assert (hook.__module__, hook.__name__) == ("transformers.modeling_utils", "make_inputs_require_grads")


def test_names_that_contain_flash_get_the_varlen_call(tower: Any, monkeypatch: Any) -> None:
    calls: list[dict[str, Any]] = []

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        calls.append(kwargs | {"mask": attention_mask, "shape": q.shape})
        return torch.zeros_like(q).transpose(1, 2), None

    modeling_utils.AttentionInterface.register("my_flash_like", attend)
    monkeypatch.setattr(tower.config, "_attn_implementation_internal", "my_flash_like")
    run_tower(tower, GRIDS["mixed"])
    modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping.pop("my_flash_like")
    rows, attention = sum(t * h * w for t, h, w in GRIDS["mixed"]), tower.blocks[0].attn
    assert len(calls) == len(tower.blocks)
    for call in calls:
        assert call["shape"] == (1, attention.num_heads, rows, attention.head_dim) and call["mask"] is None
        assert call["cu_seq_lens_q"] is call["cu_seq_lens_k"] and call["cu_seq_lens_q"].dtype == torch.int32
        assert isinstance(call["max_length_q"], int) and call["is_causal"] is False
        assert call["scaling"] == attention.scaling and call["dropout"] == 0.0


# --- names, routing, configs ----------------------------------------------------------------------------------------


def original(function: Any) -> Any:
    return getattr(function, registration._ORIGINAL)


def test_the_routing_functions_take_what_is_handed_on() -> None:
    guard = inspect.signature(original(modeling_utils.lazy_import_flash_attention))
    assert next(iter(guard.parameters)) == "implementation"
    route = inspect.signature(original(modeling_utils.PreTrainedModel.get_correct_attn_implementation))
    assert list(route.parameters)[:2] == ["self", "requested_attention"]
    source = inspect.getsource(modeling_utils.PreTrainedModel)
    assert "self.get_correct_attn_implementation(" in source and "lazy_import_flash_attention(" in source


def test_the_interfaces_know_our_names() -> None:
    for name in registration.NAMES:
        assert modeling_utils.ALL_ATTENTION_FUNCTIONS[name] is registration.vision_attention
        assert AttentionMaskInterface()[name] is sdpa_mask


def test_transformers_own_sdpa_takes_what_is_handed_on() -> None:
    names = ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"]
    assert list(inspect.signature(sdpa_attention_forward).parameters)[: len(names)] == names


def test_configs_keep_the_attention_name_where_it_is_set(tower: Any) -> None:
    tower.config._attn_implementation_internal = "flash_vit_auto"
    assert tower.config._attn_implementation == "flash_vit_auto"
    assert "flash_vit_auto" not in tower.config.to_json_string()
    assert hasattr(tower.config, "sub_configs") and callable(tower.config.get_text_config)


def test_accelerate_hooks_stand_where_they_are_looked_for() -> None:
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    hook = vars(module)["_hf_hook"]
    assert (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")
    assert hook.execution_device == "cpu" and hook.offload is False
    assert {"forward", "_old_forward"} <= set(vars(module))


# --- where it does not hold -----------------------------------------------------------------------------------------


def from_upstream(source: str, home: Any, like: Any) -> Any:
    """A function as if a newer transformers had written it in the module `home`."""
    path = Path(transformers.__file__).parent / "models" / "newer.py"
    scope: dict[str, Any] = {}
    exec(compile(textwrap.dedent(source), str(path), "exec"), vars(home), scope)
    [function] = scope.values()
    function.__module__, function.__qualname__ = home.__name__, like.__qualname__
    return function


BLOCK = """
    def forward(self, hidden_states, cu_seqlens, position_embeddings{more}, **kwargs):
        hidden_states = hidden_states + self.attn(
            self.norm1(hidden_states), cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs
        )
        return hidden_states + {mlp}
"""
MLP = "self.mlp(self.norm2(hidden_states))"
NEWER = {
    "an operation more": ("block", BLOCK.format(more="", mlp=f"{MLP}.mul(1.5)"), "uses mul, which it did not"),
    "an operation less": ("block", BLOCK.format(more="", mlp="self.mlp(hidden_states)"), "no longer uses norm2"),
    "an argument more": ("block", BLOCK.format(more=", scale=None", mlp=MLP), "known is ['cu_seqlens'"),
    "another rotation": (
        "apply_rotary_pos_emb_vision",
        """
        def apply_rotary_pos_emb_vision(q, k, cos, sin):
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
            return q * cos.neg() + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        """,
        "apply_rotary_pos_emb_vision uses neg",
    ),
    "other positions": (
        "get_vision_position_ids",
        """
        def get_vision_position_ids(grid_thw, *args, **kwargs):
            return torch.stack([torch.arange(int(grid_thw.prod(1).sum()))] * 2, 1)
        """,
        "get_vision_position_ids uses prod",
    ),
}


@pytest.mark.parametrize("case", NEWER)
def test_a_tower_that_changed_upstream_stays_stock_with_one_warning(tower: Any, case: str, monkeypatch: Any) -> None:
    role, source, message = NEWER[case]
    before = run_tower(tower, GRIDS["mixed"])
    if role == "block":
        kind = type(tower.blocks[0])
        monkeypatch.setattr(kind, "forward", from_upstream(source, home_of(tower), kind.forward))
    else:
        function = getattr(home_of(tower), role)
        monkeypatch.setattr(home_of(tower), role, from_upstream(source, home_of(tower), function))
    expected = run_tower(tower, GRIDS["mixed"])
    if case != "an argument more":
        assert relative_error(expected[0], before[0]) > 1e-3, "the change matters"
    with pytest.warns(UserWarning, match="stays stock until") as caught:
        hf_vit_accel.patch(tower)
    assert len(caught) == 1 and message in str(caught[0].message) and transformers.__version__ in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_vit_accel.patch(tower)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.stock_calls) == (0, 1)
    assert any(message in why for why in status.against_fast) and any(message in why for why in status.fallbacks)
    with pytest.raises(FallbackError, match="cannot be served"):
        hf_vit_accel.patch(tower, strict=True)
    hf_vit_accel.unpatch(tower)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)


def test_a_newer_version_that_did_not_change_is_fast(tower: Any, monkeypatch: Any) -> None:
    """Nothing is decided by the number of a version, and code that only looks otherwise is the same."""
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    kind = type(tower.blocks[0])
    source = BLOCK.format(more="", mlp=MLP).replace("return", '"""Another docstring."""\n        return')
    monkeypatch.setattr(kind, "forward", from_upstream(source, home_of(tower), kind.forward))
    expected = run_tower(tower, GRIDS["mixed"])
    hf_vit_accel.patch(tower, strict=True)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert state_of(tower).calls == 1


def test_a_call_counts_only_where_the_new_code_ran(tower: Any, monkeypatch: Any) -> None:
    """A patch that did nothing would leave the counters of status at zero; what counts is the encoder itself."""
    from hf_vit_accel import tower as module

    ran: list[int] = []
    encode = module.encode
    monkeypatch.setattr(module, "encode", lambda *args: ran.append(1) or encode(*args))
    pixels, grid = pixels_for(tower, GRIDS["images"]), torch.tensor(GRIDS["images"])
    hf_vit_accel.patch(tower)
    for blocks_called in (False, True):
        called: list[int] = []
        handles = [block.register_forward_hook(lambda *_: called.append(1)) for block in tower.blocks[:blocks_called]]  # noqa: B023
        with torch.no_grad():
            outputs_of(tower(pixels, grid_thw=grid))
        [status] = hf_vit_accel.status(tower).towers
        assert (status.calls, status.stock_calls) == (len(ran), int(blocks_called)) == (1, len(called))
        for handle in handles:
            handle.remove()
