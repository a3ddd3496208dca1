"""The table of ways to wrap a model: what is done to it, how it is used, and what `status` must say.

`test_matrix` makes a test of each row in each order and family; `support_table.py` writes SUPPORT.md from it.
To add a way, write a change (`support.changes`, `support.libraries`) and a row here.
"""

import copy
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

from support import changes, libraries, quantised, uses
from support.changes import Change
from support.libraries import TEXT_LINEARS, TOWER_LINEARS
from support.uses import Use

BEFORE = "wrapped, then patched"
AFTER = "patched, then wrapped"
ORDERS = (BEFORE, AFTER)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to wrap a model."""

    name: str  # what SUPPORT.md calls it
    outcome: str  # "fast" or "stock" for every call of the tower, or "unpatched" if the result is a stock model again
    wrap: Change = changes.unchanged
    use: Use = uses.answers_and_features  # what is compared with stock
    reasons: tuple[str, ...] = ()  # parts of what `status` says of stock calls: each must appear, and no other reason
    unfused: str | None = None  # part of what `status` says of a patch embedding that stays its module
    orders: tuple[str, ...] = ORDERS
    needs: tuple[str, ...] = ()  # packages beside the package's own dependencies
    obstacle: Callable[[], str | None] = lambda: None  # returns why this machine cannot run the row
    bound: float = 1e-5
    exact: bool = True  # `unpatch` brings the same bits back (a run of training does not repeat them)
    slow: bool = False  # only `make matrix` runs it


def fast(name: str, wrap: Change = changes.unchanged, **options: object) -> Row:
    """Make a row all of whose calls are fast."""
    return Row(name=name, outcome="fast", wrap=wrap, **options)


def stock(name: str, wrap: Change, *reasons: str, **options: object) -> Row:
    """Make a row all of whose calls go the stock way, for these reasons."""
    return Row(name=name, outcome="stock", wrap=wrap, reasons=reasons, **options)


def unpatched(name: str, wrap: Change) -> Row:
    """Make a row whose change takes the patch away."""
    return Row(name=name, outcome="unpatched", wrap=wrap, orders=(AFTER,))


def why_not_here(row: Row) -> str | None:
    """Return why a row cannot run on this machine; None if it can."""
    for package in row.needs:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return str(error)
    return row.obstacle()


def no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "Liger's kernels run on a GPU"


def no_fusions() -> str | None:
    version = [int(part) for part in transformers.__version__.split(".")[:2]]
    if version < [5, 23] and importlib.util.find_spec("torchvision") is None:
        return "this transformers imports torchvision for its fusions"
    return None


# --- the rows ---------------------------------------------------------------------------------------------------------

PEFT = dict(needs=("peft",))
BNB = dict(needs=("bitsandbytes",))
LIGER = dict(needs=("liger_kernel",), obstacle=no_gpu, use=uses.features, bound=1e-4)
RUN_IN_BF16 = dict(exact=False, bound=2e-2)

ROWS: tuple[Row, ...] = (
    # plain
    fast("nothing"),
    fast("nothing, `generate`", use=uses.generated),
    # adapted
    fast("PEFT LoRA on the tower", libraries.lora(TOWER_LINEARS), **PEFT),
    fast("PEFT LoRA on the tower, merged", libraries.lora(TOWER_LINEARS, "merge"), **PEFT),
    fast("PEFT LoRA on the tower, unmerged", libraries.lora(TOWER_LINEARS, "merge", "unmerge"), **PEFT),
    fast("PEFT LoRA on the tower, merged and unloaded", libraries.lora_unloaded, **PEFT),
    fast("PEFT LoRA on the tower, trained", libraries.lora(TOWER_LINEARS), use=uses.gradients, **PEFT),
    fast("PEFT LoRA on `patch_embed.proj`", libraries.lora(r".*patch_embed.proj"), unfused="Conv3d", **PEFT),
    fast("PEFT LoRA on the language model", libraries.lora(TEXT_LINEARS), **PEFT),
    fast("PEFT LoRA on the language model, trained", libraries.lora(TEXT_LINEARS), use=uses.gradients, **PEFT),
    # quantised
    fast("Linears replaced by int8 ones", quantised.int8_linears),
    fast("weights replaced by a tensor subclass", quantised.int8_weights),
    fast("bitsandbytes, 4 bit", quantised.bitsandbytes_4bit, **BNB),
    fast("bitsandbytes, 8 bit", quantised.bitsandbytes_8bit, **BNB, bound=2e-2),
    fast("torchao, int8 weights", quantised.torchao_int8, needs=("torchao",)),
    fast("quanto, int8 weights", quantised.quanto_int8, needs=("optimum.quanto",)),
    # placed on devices and ranks
    fast("`device_map`, the tower on one device", libraries.dispatched),
    stock("CPU offload", libraries.offloaded, "accelerate hooks on patch_embed"),
    fast("DDP", libraries.ddp),
    fast("DDP, trained", libraries.ddp, use=uses.gradients),
    fast("FSDP2 over the model", libraries.fsdp(blocks=False), use=uses.answers),
    fast("FSDP2 over every block", libraries.fsdp(blocks=True), use=uses.answers),
    fast("FSDP2 over every block, trained", libraries.fsdp(blocks=True), use=uses.gradients),
    # compiled
    fast("`torch.compile(model)`", libraries.compiled_model, use=uses.answer_to_one_image, slow=True),
    fast("`torch.compile(model.visual)`", libraries.compiled_tower, use=uses.features_of_two_sizes, slow=True),
    fast("`model.visual.compile()`", libraries.compiled_in_place, use=uses.features_of_two_sizes, slow=True),
    # trained
    fast("trained", use=uses.gradients),
    fast("trained with the tower frozen", changes.frozen, use=uses.gradients),
    fast("gradient checkpointing", changes.checkpointed(reentrant=False), use=uses.gradients),
    fast("gradient checkpointing, reentrant", changes.checkpointed(reentrant=True), use=uses.gradients),
    fast(
        "gradient checkpointing, the tower frozen",
        changes.checkpointed(reentrant=False, freeze=True),
        use=uses.gradients,
    ),
    fast(
        "gradient checkpointing, reentrant, the tower frozen",
        changes.checkpointed(reentrant=True, freeze=True),
        use=uses.gradients,
    ),
    fast("gradient checkpointing, evaluated", changes.checkpointed(reentrant=False)),
    fast(
        "a loop of accelerate's in bf16, the tower frozen",
        changes.frozen,
        use=uses.run_of_accelerate,
        slow=True,
        **RUN_IN_BF16,
    ),
    fast(
        "a loop of TRL's kind in bf16, PEFT LoRA on the language model",
        libraries.lora(TEXT_LINEARS),
        use=uses.run_of_accelerate,
        **PEFT,
        **RUN_IN_BF16,
    ),
    # cast
    fast("autocast", use=uses.under_autocast(uses.answers), bound=2e-2),
    fast("`.to(torch.bfloat16)`", changes.by(lambda model: model.to(torch.bfloat16)), bound=2e-2),
    fast("`.half()`", changes.by(lambda model: model.half()), bound=2e-2),
    fast("`.half().float()`", changes.by(lambda model: model.half().float())),
    fast("`.double()`", changes.by(lambda model: model.double())),
    # copied
    fast("`deepcopy`", changes.by(copy.deepcopy)),
    fast("`pickle`", changes.by(changes.through_pickle)),
    fast("`torch.save` and `torch.load`", changes.by(changes.through_torch_save)),
    fast("`save_pretrained` and loaded", changes.through_save_pretrained, orders=(BEFORE,)),
    unpatched("`save_pretrained` and loaded", changes.through_save_pretrained),
    fast("`load_state_dict`", changes.other_weights(assign=False)),
    fast("`load_state_dict(assign=True)`", changes.other_weights(assign=True)),
    # switched
    fast('`set_attn_implementation("eager")`', changes.attending_by("eager"), orders=(BEFORE,)),
    unpatched('`set_attn_implementation("eager")`', changes.attending_by("eager")),
    fast("`set_attn_implementation` for the text", changes.attending_by({"text_config": "eager"})),
    fast("`config.output_hidden_states`", changes.config_flag("output_hidden_states"), use=uses.features),
    stock(
        "`config.output_attentions`",
        changes.config_flag("output_attentions"),
        "output_attentions is requested",
        use=uses.features,
    ),
    fast("a hook on the tower", changes.hooked("")),
    fast("a hook on a block", changes.hooked("blocks.1")),
    fast("a hook on a Linear", changes.hooked("blocks.1.attn.proj")),
    # operations replaced
    fast("norms' forwards bound by another library (as Liger and `kernels` do)", libraries.norms_bound),
    stock(
        "the rotation replaced in transformers' module (as Liger does for Qwen3-VL)",
        libraries.rotation_replaced,
        "computes something else than our operations",
    ),
    fast("Liger on the model", libraries.liger(classes=False), **LIGER),
    fast("Liger on the classes", libraries.liger(classes=True), **LIGER),
    stock(
        "transformers' fusion of patch embeddings",
        libraries.fused_patch_embed,
        "the tower is not built as",
        obstacle=no_fusions,
        slow=True,
        orders=(BEFORE,),
    ),
)

# Ways whose tests need more than a row says: the outcome, and the test that shows it.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "two models, one patched": ("fast, and stock", "integration/test_wrapping.py::test_two_models_one_patched"),
    "two towers of one config": ("fast", "integration/test_wrapping.py::test_two_towers_of_one_config"),
    "two threads": ("fast", "unit/test_tower.py::test_two_threads_get_their_own_answers"),
    "loaded by `attn_implementation`": ("fast", "unit/test_loading.py::test_loading_by_name_equals_patch"),
    "from the meta device": ("fast", "integration/test_parameters.py::test_from_the_meta_device"),
    "inside a wrapper that calls the tower": (
        "fast",
        "integration/test_wrapping.py::test_any_module_that_holds_a_tower_can_be_patched",
    ),
    "beams, padding, videos in `generate`": (
        "fast",
        "integration/test_wrapping.py::test_generate_is_token_identical_twice_in_a_row",
    ),
    "`generate(mm_encoder_outputs=...)`": (
        "the tower does not run",
        "integration/test_wrapping.py::test_encoded_once_the_tower_does_not_run_in_generate",
    ),
    "`torch.func.functional_call`": (
        "fast; stock with tensors for parameters",
        "integration/test_wrapping.py::test_functional_call_uses_the_given_parameters",
    ),
    "an attention function of your own, registered with transformers": (
        "stock; fast with another backend where one is named",
        "integration/test_replaced.py::test_an_attention_function_of_your_own",
    ),
    "pixel values in other dtypes, padding rows in `grid_thw`": (
        "fast, where stock takes them",
        "unit/test_tower.py::test_odd_input_that_stock_takes_is_taken",
    ),
    "metadata supplied by the caller": (
        "stock",
        "integration/test_wrapping.py::test_metadata_of_the_caller_goes_the_stock_way",
    ),
    "a tower class of your own": (
        "stock",
        "integration/test_replaced.py::test_a_forward_of_your_own_keeps_its_arguments",
    ),
    "functions replaced in transformers' module": (
        "stock",
        "integration/test_changes.py::test_no_call_of_a_tower_is_stale",
    ),
    "a patched forward that you wrapped, patched again": (
        "fast, inside your wrapper",
        "integration/test_wrapped_forward.py::test_the_order_of_patching_and_wrapping",
    ),
    "`torch.jit.trace`": ("stock", "integration/test_replaced.py::test_jit_trace_goes_the_stock_way"),
    "weights that are no parameters": ("stock", "integration/test_replaced.py::test_weights_that_are_no_parameters"),
    "modules of your own in a frozen tower": (
        "fast",
        "integration/test_replaced.py::test_a_module_trained_inside_a_frozen_tower_gets_its_gradients",
    ),
    "`vmap`, `jvp`, forward-mode differentiation": (
        "stock",
        "integration/test_replaced.py::test_transforms_of_torch_func_go_the_stock_way",
    ),
}
