"""The ways in which people wrap a model, declared: how each is made, what is used, and what is expected of it.

`test_matrix` makes the tests of this table and `support` its page. A row says in which order a model may be patched and
wrapped, what comes out (the fast path, or the stock way with its reasons in `status`), and what it needs beside the
package's own dependencies.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tiny import FAMILIES, GRIDS, chat_inputs, checkpoint_layers, pixels_for, tower_of
from torch import nn

__all__ = ["ELSEWHERE", "FAMILIES", "ORDERS", "ROWS", "Row", "answers_and_features", "flat", "missing"]

Wrap = Callable[[Any, ExitStack], Any]
Use = Callable[[Any], list[torch.Tensor]]
ORDERS = ("wrapped, then patched", "patched, then wrapped")
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to wrap a model.

    wrap: makes it, and returns what the user holds from then on; what must be undone after the test goes to the stack.
    use: calls it and returns what is compared with stock. outcome: "fast" or "stock" for every call of the tower, or
    "unpatched" where what was wrapped is a stock model again. reasons: parts of what status says of the calls that went
    the stock way, each of which must be there, and no other. unfused: part of what status says of the patch embedding,
    which then does not run fused. orders: wrapped before or after patching. needs: packages. bound: the largest
    relative error against stock. exact: whether `unpatch` brings the very bits back (a run of training does not repeat
    them). slow: left to `make matrix`. build: makes a family's stock model, instead of a tiny random one.
    """

    name: str
    outcome: str
    wrap: Wrap = lambda model, _: model
    use: Use | None = None
    reasons: tuple[str, ...] = ()
    unfused: str | None = None
    orders: tuple[str, ...] = ORDERS
    needs: tuple[str, ...] = ()
    bound: float = 1e-5
    exact: bool = True
    slow: bool = False
    build: Callable[[str], Any] | None = None


def missing(row: Row) -> str | None:
    """Why a row cannot run here; None if it can."""
    for package in row.needs:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return str(error)
    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    if row.wrap is fused_patch_embed and old and importlib.util.find_spec("torchvision") is None:
        return "this transformers imports torchvision for its fusions"
    if row.needs == LIGER and not torch.cuda.is_available():
        return "Liger's kernels run on a GPU"
    return None


# --- what is used ---------------------------------------------------------------------------------------------------


def base_of(model: Any) -> Any:
    """The composite model inside whatever was wrapped around it."""
    return next(m for m in model.modules() if type(m).__name__.endswith("ForConditionalGeneration"))


def flat(output: Any) -> list[torch.Tensor]:
    """Every tensor of nested outputs, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in values if value is not None for tensor in flat(value)]


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def dtype_of(model: Any) -> torch.dtype:
    """The dtype of activations: that of a norm, whatever the Linears hold."""
    dtype: torch.dtype = tower_of(model).blocks[0].norm1.weight.dtype
    return dtype


def prompt(model: Any) -> dict[str, torch.Tensor]:
    """A prompt with two images and a video, pixels in the model's dtype."""
    inputs = chat_inputs(base_of(model), [(1, 4, 6), (2, 6, 4), (1, 8, 8)])
    pixels = ("pixel_values", "pixel_values_videos")
    return {name: value.to(dtype_of(model)) if name in pixels else value for name, value in inputs.items()}


def answers(model: Any) -> list[torch.Tensor]:
    """Logits of the whole model, called through all its wrappers, without gradients."""
    with torch.no_grad():
        return [model(**prompt(model)).logits]


def features(model: Any) -> list[torch.Tensor]:
    """Every output of the tower, called directly, without gradients."""
    tower, grid = tower_of(model), GRIDS["mixed"]
    norm = tower.blocks[0].norm1.weight
    pixels = pixels_for(tower, grid, dtype=norm.dtype, device="cpu" if norm.is_meta else norm.device)
    with torch.no_grad():
        return flat(tower(pixels, grid_thw=torch.tensor(grid, device=pixels.device)))


def one_image(model: Any) -> list[torch.Tensor]:
    """Every output of what stands in the tower's place, for one image and then another: compiled for the first."""
    tower, found = model.model.visual, []
    with torch.no_grad():
        for grid in ([(1, 4, 6)], [(1, 8, 10)]):
            found += flat(tower(pixels_for(tower_of(model), grid), grid_thw=torch.tensor(grid)))
    return found


def one_answer(model: Any) -> list[torch.Tensor]:
    """Logits for a prompt with one image."""
    with torch.no_grad():
        return [model(**chat_inputs(base_of(model), [(1, 4, 6)])).logits]


def answers_and_features(model: Any) -> list[torch.Tensor]:
    """Both."""
    return answers(model) + features(model)


def generated(model: Any) -> list[torch.Tensor]:
    """Greedy tokens."""
    return [base_of(model).generate(**prompt(model), max_new_tokens=4, do_sample=False)]


def labelled(model: Any) -> dict[str, torch.Tensor]:
    """The prompt with labels."""
    inputs = prompt(model)
    return inputs | {"labels": inputs["input_ids"]}


def gradients(model: Any) -> list[torch.Tensor]:
    """The loss of the whole model, called through its wrappers, and the gradient of all that is trained."""
    model.zero_grad(set_to_none=True)
    loss = model(**labelled(model)).loss
    loss.backward()
    found = [loss, *(_whole(p.grad) for p in parameters_of(model) if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def under_autocast(use: Use) -> Use:
    """The same in bf16 autocast."""

    def inside(model: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return use(model)

    return inside


def curve(model: Any, **options: Any) -> list[torch.Tensor]:
    """The losses of a short run of Trainer, and what was trained by its end."""
    with tempfile.TemporaryDirectory() as path:
        arguments = transformers.TrainingArguments(
            output_dir=path,
            max_steps=3,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
            **options,
        )
        base, trained = base_of(model), [base_of(model), *parameters_of(model)]
        data = [labelled(base)] * 3
        before = [parameter.detach().clone() for parameter in trained[1:]]
        trainer = transformers.Trainer(base, arguments, train_dataset=data, data_collator=lambda rows: rows[0])
        _silence(trainer)
        trainer.train()
        losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        after = [parameter.detach().clone() for parameter in trained[1:]]
        with torch.no_grad():
            for parameter, value in zip(trained[1:], before, strict=True):
                parameter.copy_(value)
        base.eval().zero_grad(set_to_none=True)
    assert len(losses) == 3
    return [losses, *after]


def loop(model: Any) -> list[torch.Tensor]:
    """A loop of accelerate's in bf16, with a reference without gradients as TRL's trainers have; what was trained."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    trained = parameters_of(model)
    before = [parameter.detach().clone() for parameter in trained]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
    losses = []
    for _ in range(3):
        with torch.no_grad(), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
            reference = prepared(**labelled(model)).loss
        loss = prepared(**labelled(model)).loss
        accelerator.backward(loss + (loss - reference).square())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    AcceleratorState._reset_state(True)
    after = [parameter.detach().clone() for parameter in trained]
    with torch.no_grad():
        for parameter, value in zip(trained, before, strict=True):
            parameter.copy_(value)
    return [torch.stack(losses), *after]


def _silence(trainer: Any) -> None:
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def captions(model: Any) -> list[torch.Tensor]:
    """Tokens from `pipeline("image-text-to-text")` for a drawn picture."""
    from PIL import Image

    sys.path.insert(0, str(EXAMPLES))
    from media.processors import load_processor

    processor = load_processor(base_of(model).config._name_or_path)
    pipe = transformers.pipeline("image-text-to-text", model=base_of(model), processor=processor)
    content = [{"type": "image"}, {"type": "text", "text": "what is this ?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    picture = Image.effect_mandelbrot((48, 36), (-2, -1, 1, 1), 20).convert("RGB")
    out = pipe(
        images=[picture], text=text, return_tensors=True, generate_kwargs=dict(max_new_tokens=4, do_sample=False)
    )
    return [out[0]["generated_token_ids"]]


def trained(family: str) -> Any:
    """The trained checkpoint of the examples, which has a processor."""
    return transformers.AutoModelForImageTextToText.from_pretrained(EXAMPLES / "tiny_captioner" / family).eval()


# --- how it is wrapped ----------------------------------------------------------------------------------------------


def lora(pattern: str, *then: str) -> Wrap:
    """PEFT's LoRA on all modules that a pattern matches, its matrices drawn at random; then merged or unmerged."""

    def wrap(model: Any, _: ExitStack) -> Any:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=pattern, init_lora_weights=False)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).eval()
        for step in then:
            getattr(adapted, f"{step}_adapter")()
        return adapted

    return wrap


def unloaded(model: Any, stack: ExitStack) -> Any:
    """LoRA on the tower, merged for good."""
    return lora(ON_TOWER)(model, stack).merge_and_unload().eval()


ON_TOWER, OFF_TOWER = (
    r".*visual\.blocks\..*(qkv|proj|fc1|fc2|linear_fc1|linear_fc2)",
    r".*language_model.*(q_proj|v_proj)",
)


class Quantised(nn.Module):
    """A Linear in int8 with a scale per row, as bitsandbytes puts one in the place of a Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Int8Weight(torch.Tensor):
    """A tensor whose class computes a Linear's product from int8 and a scale, as torchao's do."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.values = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = *args, *([None] * (3 - len(args)))
            return F.linear(x, weight.values.to(x.dtype) * weight.scale, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            twin = Int8Weight.__new__(cls, args[0])
            twin.scale, twin.values = args[0].scale, args[0].values
            return twin
        raise NotImplementedError(f"{func} of an int8 weight")


def linears_of(model: Any) -> Iterable[tuple[nn.Module, str, nn.Linear]]:
    """Every Linear in the blocks, with its parent and its name there."""
    for block in tower_of(model).blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    yield parent, name, child


def replaced_linears(model: Any, _: ExitStack) -> Any:
    for parent, name, linear in linears_of(model):
        setattr(parent, name, Quantised(linear))
    return model


def replaced_weights(model: Any, _: ExitStack) -> Any:
    for _, _, linear in linears_of(model):
        linear.weight = nn.Parameter(Int8Weight(linear.weight.detach()), requires_grad=False)
    return model


def bitsandbytes(kind: str) -> Wrap:
    """bitsandbytes' own Linears in the blocks."""

    def wrap(model: Any, _: ExitStack) -> Any:
        import bitsandbytes as bnb

        for parent, name, linear in linears_of(model):
            sizes = linear.in_features, linear.out_features, linear.bias is not None
            if kind == "4 bit":
                new = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
                new.weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
            else:
                new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                new.weight = bnb.nn.Int8Params(linear.weight.detach(), requires_grad=False, has_fp16_weights=False)
            new.bias = linear.bias
            setattr(parent, name, new.to("cpu"))
        return model

    return wrap


def torchao(model: Any, _: ExitStack) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(tower_of(model).blocks, Int8WeightOnlyConfig())
    return model


def dispatched(model: Any, stack: ExitStack) -> Any:
    """As `device_map` does: hooks on the tower and the language model, the latter's weights on disk."""
    from accelerate import dispatch_model

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    places = {"model.visual": "cpu", "model.language_model": "disk", "lm_head": "cpu"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def offloaded(model: Any, _: ExitStack) -> Any:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device="cpu")
    return model


def process_group(stack: ExitStack) -> None:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    store = torch.distributed.FileStore(f"{folder}/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    stack.callback(torch.distributed.destroy_process_group)


def ddp(model: Any, stack: ExitStack) -> Any:
    process_group(stack)
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(*, blocks: bool) -> Wrap:
    """FSDP2 over the whole model, and over each block of the tower by itself."""

    def wrap(model: Any, stack: ExitStack) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        process_group(stack)
        mesh = init_device_mesh("cpu", (1,))
        if blocks:
            for block in tower_of(model).blocks:
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


def compiled(what: str) -> Wrap:
    """torch.compile of the model or of the tower; the backend decides nothing about what is traced."""

    def wrap(model: Any, stack: ExitStack) -> Any:
        stack.callback(torch._dynamo.reset)
        if what == "model":
            return torch.compile(model, backend="eager")
        if what == "in place":
            tower_of(model).compile(backend="eager")
        else:
            model.model.visual = torch.compile(model.model.visual, backend="eager")
        return model

    return wrap


def checkpointed(*, reentrant: bool, frozen: bool = False) -> Wrap:
    def wrap(model: Any, _: ExitStack) -> Any:
        checkpoint_layers(model, reentrant=reentrant)
        if frozen:
            tower_of(model).requires_grad_(False)
        return model.train()

    return wrap


def frozen(model: Any, _: ExitStack) -> Any:
    tower_of(model).requires_grad_(False)
    return model


def cast(how: Callable[[Any], Any]) -> Wrap:
    return lambda model, _: how(model)


def through_torch_save(model: Any, _: ExitStack) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def reloaded(**kwargs: Any) -> Wrap:
    """Saved and loaded again from its folder."""

    def wrap(model: Any, stack: ExitStack) -> Any:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, **kwargs).eval()

    return wrap


def other_weights(*, assign: bool) -> Wrap:
    def wrap(model: Any, _: ExitStack) -> Any:
        state = {name: value * 1.25 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        return model

    return wrap


def told(implementation: Any) -> Wrap:
    def wrap(model: Any, _: ExitStack) -> Any:
        model.set_attn_implementation(implementation)
        return model

    return wrap


def hooked(where: str) -> Wrap:
    """A hook that doubles what a module returns, if that is one tensor."""

    def wrap(model: Any, _: ExitStack) -> Any:
        def double(module: nn.Module, args: Any, output: Any) -> Any:
            return output * 2 if isinstance(output, torch.Tensor) else None

        tower_of(model).get_submodule(where).register_forward_hook(double)
        return model

    return wrap


def asked(name: str) -> Wrap:
    def wrap(model: Any, _: ExitStack) -> Any:
        config = tower_of(model).config
        setattr(config, f"_{name}" if name == "output_attentions" else name, True)  # that one's setter wants eager
        return model

    return wrap


def liger_like(model: Any, _: ExitStack) -> Any:
    """As Liger and `kernels` change a model: another class's forward bound to each norm of the blocks."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return type(self).forward(self, x) * 1.5

    for block in tower_of(model).blocks:
        for norm in (block.norm1, block.norm2):
            norm.forward = MethodType(forward, norm)
    return model


def other_rotation(model: Any, stack: ExitStack) -> Any:
    """The rotation of queries and keys replaced in transformers' module, as Liger does for Qwen3-VL."""
    home = sys.modules[type(model).__module__]
    stock = home.apply_rotary_pos_emb_vision
    stack.callback(setattr, home, "apply_rotary_pos_emb_vision", stock)
    home.apply_rotary_pos_emb_vision = lambda q, k, cos, sin: stock(q, k, cos, -sin)
    return model


def liger(*, classes: bool) -> Wrap:
    """Liger itself, on this instance or (before it is built) on transformers' classes; on the GPU."""

    def wrap(model: Any, stack: ExitStack) -> Any:
        from liger_kernel.transformers import monkey_patch

        family = model.config.model_type
        apply = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")
        options = dict(fused_linear_cross_entropy=False, rope=False, swiglu=False)
        model, home = model.cuda(), sys.modules[type(model).__module__]
        stack.callback(vars(home).update, dict(vars(home)))
        # Stock's convolution would round fp32 to TF32, which the product in its place does not.
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        torch.backends.cudnn.allow_tf32 = False
        if not classes:
            apply(**options, model=model)
            return model
        apply(**options)
        twin = type(model)._from_config(model.config).eval().cuda()
        twin.load_state_dict(model.state_dict())
        return twin

    return wrap


def fused_patch_embed(model: Any, stack: ExitStack) -> Any:
    """transformers' own fusion of patch embeddings, which stays on for the process: what it registers is put back."""
    from transformers import conversion_mapping, monkey_patching

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    model.save_pretrained(folder)
    kinds = {module.config.model_type for module in model.modules() if hasattr(module, "config")}
    for kind in kinds:
        known = conversion_mapping.get_checkpoint_conversion_mapping(kind) or []
        stack.callback(conversion_mapping.register_checkpoint_conversion_mapping, kind, known, overwrite=True)
    stack.callback(monkey_patching.clear_patch_mapping)
    fused = type(model).from_pretrained(folder, fusion_config={"patch_embeddings": True}).eval()
    linear, convolution = tower_of(fused).patch_embed.linear_proj, tower_of(model).patch_embed.proj
    with torch.no_grad():  # transformers 5.23 leaves them as they were drawn for two of the families
        linear.weight.copy_(convolution.weight.flatten(1))
        if convolution.bias is not None:
            linear.bias.copy_(convolution.bias)
    return fused


FAST: dict[str, Any] = dict(outcome="fast")
PEFT, LIGER = ("peft",), ("liger_kernel",)
SEVERAL, OWN_CLASS = "parameters of several dtypes", "parameters of a class of their own"

ROWS: tuple[Row, ...] = (
    Row(name="nothing", **FAST),
    Row(name="nothing, `generate`", use=generated, **FAST),
    # PEFT
    Row(name="PEFT LoRA on the tower", wrap=lora(ON_TOWER), needs=PEFT, **FAST),
    Row(name="PEFT LoRA on the tower, merged", wrap=lora(ON_TOWER, "merge"), needs=PEFT, **FAST),
    Row(name="PEFT LoRA on the tower, unmerged", wrap=lora(ON_TOWER, "merge", "unmerge"), needs=PEFT, **FAST),
    Row(name="PEFT LoRA on the tower, merged and unloaded", wrap=unloaded, needs=PEFT, **FAST),
    Row(name="PEFT LoRA on the tower, trained", wrap=lora(ON_TOWER), use=gradients, needs=PEFT, **FAST),
    Row(name="PEFT LoRA on `patch_embed.proj`", wrap=lora(r".*patch_embed.proj"), needs=PEFT, unfused="Conv3d", **FAST),
    Row(name="PEFT LoRA on the language model", wrap=lora(OFF_TOWER), needs=PEFT, **FAST),
    Row(name="PEFT LoRA on the language model, trained", wrap=lora(OFF_TOWER), use=gradients, needs=PEFT, **FAST),
    # Quantisation
    Row(name="Linears replaced by int8 ones", wrap=replaced_linears, outcome="stock", reasons=(SEVERAL,)),
    Row(name="weights replaced by a tensor subclass", wrap=replaced_weights, outcome="stock", reasons=(OWN_CLASS,)),
    Row(
        name="bitsandbytes, 4 bit",
        wrap=bitsandbytes("4 bit"),
        needs=("bitsandbytes",),
        outcome="stock",
        reasons=(SEVERAL, OWN_CLASS),
    ),
    Row(
        name="bitsandbytes, 8 bit",
        wrap=bitsandbytes("8 bit"),
        needs=("bitsandbytes",),
        outcome="stock",
        reasons=(SEVERAL, OWN_CLASS),
    ),
    Row(name="torchao, int8 weights", wrap=torchao, needs=("torchao",), outcome="stock", reasons=(OWN_CLASS,)),
    # accelerate and torch.distributed
    Row(name="`device_map`, the tower on one device", wrap=dispatched, **FAST),
    Row(name="CPU offload", wrap=offloaded, outcome="stock", reasons=("accelerate hooks on patch_embed",)),
    Row(name="DDP", wrap=ddp, **FAST),
    Row(name="DDP, trained", wrap=ddp, use=gradients, **FAST),
    Row(name="FSDP2 over the model", wrap=fsdp(blocks=False), use=answers, **FAST),
    Row(
        name="FSDP2 over every block",
        wrap=fsdp(blocks=True),
        use=answers,
        **FAST,
    ),
    Row(
        name="FSDP2 over every block, trained",
        wrap=fsdp(blocks=True),
        use=gradients,
        **FAST,
    ),
    # torch.compile
    Row(name="`torch.compile(model)`", wrap=compiled("model"), use=one_answer, slow=True, **FAST),
    Row(name="`torch.compile(model.visual)`", wrap=compiled("tower"), use=one_image, slow=True, **FAST),
    Row(name="`model.visual.compile()`", wrap=compiled("in place"), use=one_image, slow=True, **FAST),
    # Training
    Row(name="trained", use=gradients, **FAST),
    Row(name="trained with the tower frozen", wrap=frozen, use=gradients, **FAST),
    Row(name="gradient checkpointing", wrap=checkpointed(reentrant=False), use=gradients, **FAST),
    Row(name="gradient checkpointing, reentrant", wrap=checkpointed(reentrant=True), use=gradients, **FAST),
    Row(
        name="gradient checkpointing, the tower frozen",
        wrap=checkpointed(reentrant=False, frozen=True),
        use=gradients,
        **FAST,
    ),
    Row(
        name="gradient checkpointing, reentrant, the tower frozen",
        wrap=checkpointed(reentrant=True, frozen=True),
        use=gradients,
        **FAST,
    ),
    Row(name="gradient checkpointing, evaluated", wrap=checkpointed(reentrant=False), **FAST),
    Row(name="`Trainer`", use=curve, bound=1e-4, exact=False, **FAST),
    Row(name="`Trainer`, the tower frozen", wrap=frozen, use=curve, bound=1e-4, slow=True, exact=False, **FAST),
    Row(
        name="`Trainer` with checkpointing, the tower frozen",
        wrap=checkpointed(reentrant=False, frozen=True),
        use=curve,
        bound=1e-4,
        slow=True,
        exact=False,
        **FAST,
    ),
    Row(
        name="`Trainer` with `bf16=True`, the tower frozen",
        wrap=frozen,
        use=partial(curve, bf16=True),
        bound=2e-2,
        exact=False,
        **FAST,
    ),
    Row(
        name="a loop of accelerate's in bf16, the tower frozen", wrap=frozen, use=loop, bound=2e-2, exact=False, **FAST
    ),
    Row(
        name="a loop of TRL's kind in bf16, PEFT LoRA on the language model",
        wrap=lora(OFF_TOWER),
        use=loop,
        needs=PEFT,
        bound=2e-2,
        exact=False,
        **FAST,
    ),
    # Dtypes
    Row(name="autocast", use=under_autocast(answers), bound=2e-2, **FAST),
    Row(name="`.to(torch.bfloat16)`", wrap=cast(lambda model: model.to(torch.bfloat16)), bound=2e-2, **FAST),
    Row(name="`.half()`", wrap=cast(lambda model: model.half()), bound=2e-2, **FAST),
    Row(name="`.half().float()`", wrap=cast(lambda model: model.half().float()), **FAST),
    Row(name="`.double()`", wrap=cast(lambda model: model.double()), **FAST),
    # Copies and weights
    Row(name="`deepcopy`", wrap=cast(copy.deepcopy), **FAST),
    Row(name="`pickle`", wrap=cast(lambda model: pickle.loads(pickle.dumps(model))), **FAST),
    Row(name="`torch.save` and `torch.load`", wrap=through_torch_save, **FAST),
    Row(name="`save_pretrained` and loaded", wrap=reloaded(), orders=ORDERS[:1], **FAST),
    Row(name="`save_pretrained` and loaded", wrap=reloaded(), orders=ORDERS[1:], outcome="unpatched"),
    Row(name="`load_state_dict`", wrap=other_weights(assign=False), **FAST),
    Row(name="`load_state_dict(assign=True)`", wrap=other_weights(assign=True), **FAST),
    # Attention by name
    Row(name='`set_attn_implementation("eager")`', wrap=told("eager"), orders=ORDERS[:1], **FAST),
    Row(name='`set_attn_implementation("eager")`', wrap=told("eager"), orders=ORDERS[1:], outcome="unpatched"),
    Row(name="`set_attn_implementation` for the text", wrap=told({"text_config": "eager"}), **FAST),
    # Outputs and hooks
    Row(
        name="`config.output_hidden_states`",
        wrap=asked("output_hidden_states"),
        use=features,
        outcome="stock",
        reasons=("output_hidden_states is requested",),
    ),
    Row(
        name="`config.output_attentions`",
        wrap=asked("output_attentions"),
        use=features,
        outcome="stock",
        reasons=("output_attentions is requested",),
    ),
    Row(name="a hook on the tower", wrap=hooked(""), **FAST),
    Row(name="a hook on a block", wrap=hooked("blocks.1"), outcome="stock", reasons=("hooks on blocks.1",)),
    Row(name="a hook on a Linear", wrap=hooked("blocks.1.attn.proj"), outcome="stock", reasons=("hooks on blocks.1",)),
    # Other libraries that change operations
    Row(name="norms' forwards bound by another library (as Liger and `kernels` do)", wrap=liger_like, **FAST),
    Row(
        name="the rotation replaced in transformers' module (as Liger does for Qwen3-VL)",
        wrap=other_rotation,
        outcome="stock",
        reasons=("computes something else than our operations",),
    ),
    Row(name="Liger on the model", wrap=liger(classes=False), needs=LIGER, use=features, bound=1e-4, **FAST),
    Row(name="Liger on the classes", wrap=liger(classes=True), needs=LIGER, use=features, bound=1e-4, **FAST),
    Row(
        name="transformers' fusion of patch embeddings",
        wrap=fused_patch_embed,
        slow=True,
        orders=ORDERS[:1],
        outcome="stock",
        reasons=("the tower is not built as",),
    ),
    Row(name='`pipeline("image-text-to-text")`', build=trained, use=captions, **FAST),
)

ELSEWHERE: dict[str, tuple[str, str]] = {
    "two models, one patched": ("fast, and stock", "integration/test_wrapping.py::test_two_models_one_patched"),
    "two towers of one config": ("fast", "integration/test_wrapping.py::test_two_towers_of_one_config"),
    "two threads": ("fast", "unit/test_tower.py::test_two_threads_get_their_own_answers"),
    "loaded by `attn_implementation`": ("fast", "unit/test_registration.py::test_loading_by_name_equals_patch"),
    "from the meta device": ("fast", "integration/test_wrapping.py::test_from_the_meta_device"),
    "inside a wrapper that calls the tower": (
        "fast",
        "integration/test_wrapping.py::test_whatever_holds_a_tower_can_be_handed_over",
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
        "unit/test_tower.py::test_a_subclass_with_a_forward_of_its_own_goes_the_stock_way",
    ),
    "functions replaced in transformers' module": (
        "stock",
        "integration/test_replaced.py::test_functions_replaced_in_transformers_module_are_used",
    ),
    "a patched forward that you wrapped, patched again": (
        "stock, inside your wrapper",
        "integration/test_replaced.py::test_a_wrapper_of_the_forward_outlives_patching_again",
    ),
    "`torch.jit.trace`": ("stock", "integration/test_replaced.py::test_jit_trace_goes_the_stock_way"),
    "weights that are no parameters": ("stock", "integration/test_replaced.py::test_weights_that_are_no_parameters"),
    "modules of your own in a frozen tower": (
        "fast",
        "integration/test_replaced.py::test_what_is_trained_outside_a_frozen_tower_gets_its_gradients",
    ),
    "`vmap`, `jvp`, forward-mode differentiation": (
        "stock",
        "integration/test_replaced.py::test_transforms_of_torch_func_go_the_stock_way",
    ),
}
"""Ways whose tests need more than a row says: what comes out, and the test that shows it."""
