"""Tests that this version of transformers cannot run, since it lacks what they speak of. Each group has a reason.

`conftest.py` skips them. Versions are told apart by what they have, not by their numbers.
"""

import importlib.util
import inspect
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType

import transformers
from packaging.version import Version
from transformers.distributed import DistributedConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.utils.import_utils import DummyObject

from support.versions import ENCODES_AGAIN


@dataclass(frozen=True)
class Lack:
    """Tests that need something of transformers."""

    reason: str
    is_lacking: bool
    tests: tuple[str, ...]  # parts of their names, with their files


def _asks_for_another_peft() -> bool:
    """Return whether transformers refuses to load adapters with the installed PEFT."""
    if importlib.util.find_spec("peft") is None:
        return False
    oldest = getattr(importlib.import_module("transformers.integrations.peft"), "MIN_PEFT_VERSION", "0")
    return Version(version("peft")) < Version(oldest)


def _vision_utils() -> ModuleType | None:
    """Return the module that computes metadata; None before there was one."""
    name = "transformers.vision_utils"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def _wraps_linear_attention() -> bool:
    """Return whether a decorator hides the forward of Qwen3.5's linear attention behind one of its own name."""
    if importlib.util.find_spec("transformers.models.qwen3_5") is None:
        return False
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    return bool(modeling.Qwen3_5GatedDeltaNet.forward.__name__ != "forward")


_POSITIONS = inspect.signature(modeling_qwen2_vl.Qwen2VLModel.get_rope_index).parameters
_COMPOSITES = ("qwen3_omni_moe", "glm4v", "glm4v_moe", "glm46v", "paddleocr_vl", "qwen2_5_omni", "video_llama_3")
_COMPOSITES_TESTS = ("test_loading_by_name_leaves_text_alone", "test_features_of_images_and_videos_equal_stock")

LACKS = (
    Lack(
        "transformers before 5.3 knows no types of tokens: only towers are fast",
        "mm_token_type_ids" not in _POSITIONS,
        (
            "unit/test_positions.py",
            "unit/test_every_rank.py",
            "test_a_copied_method_has_its_copied_owner[positions",
            "test_a_copied_method_has_its_copied_owner[features",
            "test_python_of_the_docs_runs[docs/training.md]",
            "test_the_readme_s_diff_runs_as_it_stands",
        ),
    ),
    Lack(
        "transformers before 5.3 has other fields in the configs of these models",
        "mm_token_type_ids" not in _POSITIONS,
        (
            *(f"{test}[{name}" for test in _COMPOSITES_TESTS for name in (*_COMPOSITES, "glm_image")),
            "test_a_tower_two_levels_down_by_name",
            "test_every_family_has_a_composite",
        ),
    ),
    Lack(
        "transformers before 5.4 passes places in the cache at every step: stock decodes, and examples/ does not run",
        "cache_position" in inspect.signature(modeling_qwen2_vl.Qwen2VLForConditionalGeneration.forward).parameters,
        (
            "tests/examples/",
            "unit/test_decode_steps.py",
            "unit/test_decoding",
            "unit/test_leaving_rows.py",
            "unit/test_prefill.py",
            "unit/test_text_layers.py",
            "unit/test_waiting_rows.py",
            "test_a_copied_method_has_its_copied_owner[text",
            "test_hidden_states_are_as_exact_as_stocks",
            "test_no_decoded_token_is_stale",
        ),
    ),
    Lack(
        "transformers 5.0 names the norms of Qwen2.5-VL otherwise, and PaddleOCR-VL's tower asks for metadata",
        not hasattr(modeling_qwen2_5_vl, "Qwen2_5_VLRMSNorm"),
        (
            "test_a_tower_of_exchanged_classes",
            "test_a_tower_of_former_classes_after_liger_exchanged_them",
            "test_a_tower_that_ends_otherwise_is_stock",
        ),
    ),
    Lack(
        "transformers before 5.9 gives its towers no metadata, and waits for the device in every layer",
        _vision_utils() is None,
        (
            "test_a_stock_tower_under_our_name_is_right_without_plans",
            "test_a_call_that_is_too_long_for_a_backend_goes_to_the_next",
        ),
    ),
    Lack(
        "transformers before 5.15: other metadata, caches and placeholders; PaddleOCR-VL is stock under autocast",
        not hasattr(_vision_utils(), "get_vision_attention_seqlens"),
        (
            "test_text_models_of_every_family[replayed-qwen3_5",
            "test_text_models_of_every_family[replayed-minicpmv4_6",
            "test_features_of_models_with_other_grids_equal_stock",
            "test_states_of_linear_attention_in_inference_mode[replayed",
            "test_half_precision_is_as_exact_as_stock[replayed",
            "test_under_autocast_a_tower_is_as_stock[torch.bfloat16-PaddleOCRVisionTransformer",
            "test_whatever_module_is_replaced_runs_itself[PaddleOCRVisionTransformer",
            "a declared model whose rotation follows the length",  # stock's own second call has other tokens
            "test_other_processors_are_refused[no bytes]",
        ),
    ),
    Lack(
        "transformers 5.15 wraps the linear attention of Qwen3.5 in a function without its name: stock decodes",
        _wraps_linear_attention(),
        (
            "test_text_models_of_every_family[replayed-qwen3_5",
            "test_text_models_of_every_family[qwen3_5",
            "test_states_of_linear_attention_in_inference_mode",
        ),
    ),
    Lack(
        "this transformers has no processors of pictures without torchvision",
        isinstance(transformers.Qwen2VLImageProcessor, DummyObject),
        ("tests/examples/", "test_python_of_the_docs_runs", "test_the_readme_s_diff_runs_as_it_stands"),
    ),
    Lack(
        "before transformers 5.18 the demo needs torchvision, and decoding encodes again where memory ran out once",
        bool(ENCODES_AGAIN),
        (
            "test_the_demo_captions_scenes_that_it_never_saw",
            "test_a_video_is_encoded_in_passes_with_as_many_frames_as_fit",
        ),
    ),
    Lack(
        "this transformers splits no tensors by a plan in DistributedConfig",
        "tp_plan" not in inspect.signature(DistributedConfig).parameters,
        ("test_tensor_parallelism_keeps_the_tokens",),
    ),
    Lack(
        "transformers 4.57: bare tensors, no hidden states, attention by segment, no `every_rank`, other tokenizers",
        not hasattr(transformers, "PreTrainedConfig"),
        (
            "stacks/test_transformers.py",
            "test_forwards_bound_by_liger_are_plain_or_called",
            "test_a_tower_of_exchanged_classes",
            "test_a_tower_of_former_classes_after_liger_exchanged_them",
            "test_an_activation_of_the_hub_has_no_gradients",
            "test_python_of_the_docs_runs",
            "test_examples_in_docstrings_run",
            "hooked]",
            "test_a_hook_goes_with_its_handle_whenever_a_model_was_patched",
            "test_a_score_mod_is_never_left_out",
            "test_compiled_blocks_of_a_call_by_the_stock_forward",
            "test_a_backend_that_fails_after_a_capture",
            "test_compiled_towers_are_one_call_for_every_layout",
            "test_a_tower_with_a_score_mod",
            "test_the_least_recently_used_go[",
            "test_the_loss_may_use_other_outputs",
            "test_jit_trace_goes_the_stock_way",
            "test_bytes_beyond_the_outputs_are_a_pass_whatever_the_length[qwen2_5_vl",
            "test_attentions_of_an_eager_model_are_returned",
            "test_gradients_add_up_once",
            "test_a_model_draws_no_numbers_of_the_users",
        ),
    ),
    Lack(
        "this transformers asks for a newer PEFT than the installed one",
        _asks_for_another_peft(),
        ("test_random_batches_give_stocks", "test_a_step_of_an_adapter_that_a_processor_picks"),
    ),
    Lack(
        "this Qwen3-VL makes indices where its positions are stored: stock fails where accelerate offloads them",
        "pos_embed.weight.device" in inspect.getsource(modeling_qwen3_vl.Qwen3VLVisionModel),
        (
            "test_cell[CPU offload, patched, then wrapped, qwen3_vl",
            "test_cell[CPU offload, wrapped, then patched, qwen3_vl",
        ),
    ),
)
"""Every group."""


def reason_to_skip(name: str) -> str | None:
    """Return what this transformers lacks for a test; None for a test that it can run."""
    for lack in LACKS:
        if lack.is_lacking and any(part in name for part in lack.tests):
            return lack.reason
    return None
