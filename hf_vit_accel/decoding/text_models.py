"""The text models whose steps are ours: declared classes of transformers, with nothing of the user's in them.

Functions are compared, not results: a model is known only if all that a step replaces is transformers' own code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, cached_property, lru_cache
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, NoneType
from typing import Any, TypeAlias, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.hooks import RemovableHandle
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit_accel import machine
from hf_vit_accel.ops.base import is_class_forward
from hf_vit_accel.versions import FORWARD_WRAPPERS, is_adapter, is_inert
from hf_vit_accel.watch import Watch, place_of

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Model: TypeAlias = Any
"""A model of transformers, or a module inside one. Its attributes have no types."""


class UnservedError(RuntimeError):
    """A call that has no static step. The text is the reason; another call may have one."""


@dataclass(frozen=True)
class TextModel:
    """A declared class of text models. Every layer is a norm and attention, then a norm and an MLP."""

    name: str
    models: str
    """The classes around it that generate, each as "file.Class" of transformers."""
    has_mrope: bool = True
    is_gated: bool = False
    """Whether queries bring a gate for the output of attention."""
    norms_outputs: bool = False
    """Whether attention and MLP end in a norm of their own."""


_QWEN3_5 = """qwen3_5.Qwen3_5ForConditionalGeneration minicpmv4_6.MiniCPMV4_6ForConditionalGeneration
    minicpmv4_7.MiniCPMV4_7ForConditionalGeneration minicpm_ocr.MiniCPMOcrForConditionalGeneration"""
_GLM4V = "glm4v.Glm4vForConditionalGeneration glm46v.Glm46VForConditionalGeneration"
_QWEN2 = "qwen2.Qwen2ForCausalLM video_llama_3.VideoLlama3ForConditionalGeneration"
TEXT_MODELS = (
    TextModel("Qwen2VLTextModel", "qwen2_vl.Qwen2VLForConditionalGeneration"),
    TextModel("Qwen2_5_VLTextModel", "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration"),
    TextModel("Qwen2_5OmniThinkerTextModel", "qwen2_5_omni.Qwen2_5OmniThinkerForConditionalGeneration"),
    TextModel("Qwen3VLTextModel", "qwen3_vl.Qwen3VLForConditionalGeneration"),
    TextModel("Qwen3VLMoeTextModel", "qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration"),
    TextModel("Qwen3OmniMoeThinkerTextModel", "qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration"),
    TextModel("Qwen3_5TextModel", _QWEN3_5, is_gated=True),
    TextModel("Qwen3_5MoeTextModel", "qwen3_5_moe.Qwen3_5MoeForConditionalGeneration", is_gated=True),
    TextModel("Glm4vTextModel", _GLM4V, norms_outputs=True),
    TextModel("GlmOcrTextModel", "glm_ocr.GlmOcrForConditionalGeneration", norms_outputs=True),
    TextModel("Glm4vMoeTextModel", "glm4v_moe.Glm4vMoeForConditionalGeneration"),
    TextModel("PaddleOCRTextModel", "paddleocr_vl.PaddleOCRVLForConditionalGeneration"),
    TextModel("Cosmos3EdgeTextModel", "cosmos3_edge.Cosmos3EdgeForConditionalGeneration"),
    TextModel("Qwen2Model", _QWEN2, has_mrope=False),
    TextModel("Qwen3Model", "qwen3.Qwen3ForCausalLM", has_mrope=False),
)
"""Every text model that is served. A model of another class is decoded by stock."""
_DECLARED = {
    f"transformers.models.{home}.modeling_{home}.{name}": text
    for text in TEXT_MODELS
    for home, name in (model.split(".") for model in text.models.split())
}
_TEXTS = {text.name: text for text in TEXT_MODELS}
_METHODS = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""The methods of a model whose results a step takes as given."""
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""The attention implementations of a text model that the step's own replaces."""
_DECORATORS = ("transformers.", "torch.utils._contextlib.")
"""Where transformers' decorators are written, and `torch.no_grad`."""
_UNRELATED = ("transformers.utils.", "copy.", "warnings.", "contextlib.")
"""Where functions are written that compute no tensors."""
_UPSTREAM = ("transformers.", "torch.")
"""Where the classes are written that a step calls, or replaces."""
_BASES = {*transformers.PreTrainedModel.__mro__, *transformers.GenerationMixin.__mro__}
"""Classes whose code no step replaces."""
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""The attributes of an adapter that may change within a call, as where a logits processor picks an expert."""
_MOST_KEYS = 32
"""Keys of readings that something is remembered for: each names every weight."""


@dataclass(eq=False)
class TextReading:
    """A model as it is now."""

    declared: TextModel
    text: Model
    head: Model
    autocast: tuple[str, torch.dtype, bool]
    """The device, dtype and state of autocast in the model's forward."""
    weights: list[Any] = field(default_factory=list)  # where they are; with others, no step is of use any more
    state: dict[str, Any] = field(default_factory=dict)  # all else that a captured step holds fixed, by name
    devices: set[torch.device] = field(default_factory=set)  # of the text's parameters
    switches: Watch = field(default_factory=Watch)  # what may change between two steps: hooks anywhere, adapters

    @cached_property
    def key(self) -> Hashable:
        """All of this, for a dictionary."""
        return tuple(self.weights), tuple(self.state.items())


def remember(verdicts: dict[K, V], key: K, verdict: V) -> None:
    """Remember what was found for the key of a reading. Forget all others where they are many."""
    if len(verdicts) >= _MOST_KEYS:
        verdicts.clear()
    verdicts[key] = verdict


def declared_class_of(model: Model) -> type:
    """Return the declared class of a model; `UnservedError` if it has none, or methods of its own in its loop."""
    kind = next((kind for kind in type(model).__mro__ if _path(kind) in _DECLARED), None)
    if kind is None:
        raise UnservedError(f"{type(model).__name__} is no declared model")
    for name in _METHODS:
        owner = next(owner for owner in type(model).__mro__ if name in vars(owner))
        if name in vars(model) or not is_own(getattr(owner, name), owner):
            raise UnservedError(f"{name} of {type(model).__name__} is not transformers' own")
    return kind


def read_model(model: Model) -> TextReading:
    """Read a model; `UnservedError` if it, or anything in its text, is not declared and transformers' own."""
    kind = declared_class_of(model)
    declared = _DECLARED[_path(kind)]
    holder = model.model
    text = getattr(holder, "language_model", holder)
    if type(text).__name__ != declared.name:
        raise UnservedError(f"a text model of class {type(text).__name__}")
    reading = TextReading(declared, text, model.lm_head, _autocast_of(model, kind))
    _check_functions(kind.__module__, _names_in(kind))
    _read_modules(reading, {"the model": model, "model": holder})
    _check_structure(model, text)
    return reading


def declared_texts(model: nn.Module) -> dict[str, Model]:
    """Return the declared text models inside a model by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__ in _TEXTS and _is_upstream(type(module))
    }


def read_text(text: Model) -> TextReading:
    """Read a declared text model alone; `UnservedError` if anything in it is not transformers' own."""
    reading = TextReading(_TEXTS[type(text).__name__], text, None, _autocast_around(text))
    _read_modules(reading, {})
    _check_structure(text, text)
    return reading


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _autocast_around(model: Model) -> tuple[str, torch.dtype, bool]:
    device = model.device.type
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


def _autocast_of(model: Model, kind: type) -> tuple[str, torch.dtype, bool]:
    """Return the autocast in transformers' own forward: that around the call, or of a wrapper of the forward."""
    autocast = _autocast_around(model)
    forward = model.forward
    while not is_own(forward, kind) or getattr(forward, "__self__", model) is not model:
        holder = getattr(forward, "__func__", forward)
        function = holder if hasattr(holder, "__code__") else type(holder).__call__
        inside = FORWARD_WRAPPERS.get(_home_of(function))
        if inside is None or getattr(forward, "__self__", model) is not model:
            raise UnservedError(f"forward of {type(model).__name__} is not transformers' own")
        variables = vars(holder) | inspect.getclosurevars(function).nonlocals
        context = variables.get("autocast_instance")
        if context is not None and context.device == autocast[0]:
            autocast = context.device, context.fast_dtype, context._enabled
        forward = variables[inside]
    return autocast


def is_own(function: Any, owner: type | None = None) -> bool:
    """Return whether a function is one of transformers or torch, or a method of this class there.

    `machine.is_upstream` alone would look through all that torch can wrap around a function, as autocast or a compiler.
    """
    if isinstance(function, nn.Module) and "forward" not in vars(function):
        function = type(function).forward
        cells = getattr(function, "__closure__", None)
        function = cells[0].cell_contents if cells else function  # the library `kernels` wraps functions so
    while hasattr(function, "__wrapped__") and _home_of(function).startswith(_DECORATORS):
        function = function.__wrapped__
    if hasattr(function, "__wrapped__") or not machine.is_upstream(function):
        return False
    return owner is None or _home_of(function) == f"{_path(owner)}.{function.__name__}"


def _is_replaced(value: Any) -> bool:
    """Return whether a value among the functions of a file is a function of the user's."""
    return (
        not isinstance(value, type | BuiltinFunctionType | _lru_cache_wrapper) and callable(value) and not is_own(value)
    )


def _home_of(function: Any) -> str:
    """Return where a function is written. `functools.wraps` borrows other names, not these."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{function.__globals__['__name__']}.{code.co_qualname}"


def refuse(reasons: dict[str, Any]) -> None:
    """Raise `UnservedError` with the first reason that holds."""
    for reason, is_so in reasons.items():
        if is_so:
            raise UnservedError(reason)


def _check_functions(file: str, names: frozenset[str]) -> None:
    """Raise `UnservedError` if a function was replaced that code of a file calls by name, or one beneath it."""
    for functions, name in _functions_beneath(file, names):
        if _is_replaced(functions.get(name)):
            raise UnservedError(f"{name} was replaced")


@lru_cache(maxsize=256)
def _functions_beneath(file: str, names: frozenset[str]) -> list[tuple[dict[str, Any], str]]:
    """Return the functions that code of a file calls, and those that transformers' own call, as place and name."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    due = [(vars(sys.modules[file]), name) for name in names]
    due.append((vars(nn.functional), "scaled_dot_product_attention"))
    while due:
        in_file, name = due.pop()
        for functions in (in_file, vars(torch), vars(nn.functional)):
            function = functions.get(name)
            if not callable(function) or (id(functions), name) in found:
                continue
            inner = inspect.unwrap(function)
            home = _home_of(inner)
            if home.startswith(_UNRELATED):
                continue
            found[id(functions), name] = functions, name
            if _is_replaced(function):
                raise UnservedError(f"{name} was replaced")  # no list of other functions beneath it is cached
            if home.startswith("transformers."):
                due += [(inner.__globals__, called) for called in inner.__code__.co_names]
    return list(found.values())


def _check_structure(model: Model, text: Model) -> None:
    """Raise `UnservedError` if a text model is built otherwise than a step computes, or torch acts otherwise."""
    config = text.config
    layers = text.layers
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    attentions = [getattr(layer, "self_attn", None) or layer.linear_attn for layer in layers]
    rope = str(getattr(text.rotary_emb, "rope_type", "default"))
    name = config._attn_implementation
    registered = [all_of.get(name) for all_of in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    modes = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    reasons = {
        f"the text model's attention is {name}": name not in _ATTENTION,
        f"{name} was registered again": not all(function is None or is_own(function) for function in registered),
        "a global hook on all modules": torch.nn.modules.module._has_any_global_hook(),
        "a mode of torch": modes or is_in_torch_dispatch_mode(),
        "sliding or chunked attention": not kinds <= {"full_attention", "linear_attention"}
        or any(getattr(attention, "sliding_window", None) is not None for attention in attentions),
        f"positions of type {rope}": "dynamic" in rope or rope == "longrope",
        "layers in another order": len(layers) != config.num_hidden_layers
        or [attention.layer_idx for attention in attentions] != list(range(len(layers))),
        "an embedding of its own": model.get_input_embeddings() is not text.embed_tokens,
        "gradient checkpoints in training mode": any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in (text, *layers)
        ),
        "dropout": any(attention.training and getattr(attention, "attention_dropout", 0) for attention in attentions),
    }
    refuse(reasons)
    for function in filter(None, registered):
        _check_functions(function.__module__, frozenset(inspect.unwrap(function).__code__.co_names))


def _read_modules(reading: TextReading, around: dict[str, Model]) -> None:
    """Check every module that a step calls or replaces, and note what it reads.

    Args:
        around: The models around the text model, the outermost first. It may have a forward of its own.
    """
    state = reading.state
    state["numerics"] = machine.numerics()
    state["autocast"] = reading.autocast
    state["experts"] = getattr(reading.text.config, "_experts_implementation", None)
    model = next(iter(around.values()), None)
    path = "model" if reading.text in around.values() else "model.language_model"
    inner = [*reading.text.named_modules(prefix=path)]
    if reading.head is not None:
        inner += reading.head.named_modules(prefix="lm_head")
    known: dict[type, bool] = {}
    for name, module in [*around.items(), *inner]:
        kind: Any = type(module)
        if kind not in known:
            owner = next(owner for owner in kind.__mro__ if "forward" in vars(owner))
            calls = kind.forward, kind.__call__, kind._call_impl
            is_own_call = is_own(kind.forward, owner) and all(map(is_own, calls))
            # A list of modules is never called, and has no forward.
            known[kind] = (is_own_call or owner is nn.Module) and (module is model or _is_upstream(kind))
            if _is_upstream(kind):
                _check_functions(kind.__module__, _names_in(kind))
        reason = _reason_against(module, known[kind], may_have_forward=module is model)
        if reason is not None:
            raise UnservedError(f"{reason} on {name}")
        if module is reading.text or module in around.values():
            continue
        attributes = vars(module)
        keys = _names_in(kind) & attributes.keys()
        state[name] = kind, *[(key, _fingerprint(attributes[key])) for key in keys]
        parameters = module._parameters.values()
        reading.weights += [_fingerprint(tensor) for tensor in (*parameters, *module._buffers.values())]
        if module is not reading.head:
            reading.devices.update([tensor.device for tensor in parameters if tensor is not None])
        if is_adapter(module):
            reading.switches.add("an adapter", attributes.get, _SWITCHES)
    reading.switches.add("a hook", attrgetter("next_id"), [RemovableHandle])
    reading.switches.remember()


def _is_upstream(kind: type) -> bool:
    """Return whether a class is the one of this name in transformers or torch."""
    return kind.__module__.startswith(_UPSTREAM) and vars(sys.modules[kind.__module__]).get(kind.__name__) is kind


def _reason_against(module: nn.Module, is_known: bool, may_have_forward: bool) -> str | None:
    """Return why a step would not do what a module does; None if it would, as where its class `is_known`."""
    if module._compiled_call_impl is not None:
        return "torch.compile"
    if not may_have_forward and has_other_forward(module):
        return "a forward of its own"
    if _has_other_hooks(module):
        return "a forward hook"
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout"
    if not (is_known or is_adapter(module) or _is_quantised(module)):
        return f"a module of class {type(module).__name__}"
    return None


def has_other_forward(module: nn.Module) -> bool:
    """Return whether an instance has another forward than its class and we gave it."""
    forward = vars(module).get("forward")
    return forward is not None and not (is_class_forward(forward, module) or _is_harmless(type(forward)))


def _has_other_hooks(module: nn.Module) -> bool:
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    return not all(map(_is_harmless, hooks))


def _is_harmless(hook: object) -> bool:
    """Return whether a hook does nothing in a step: ours act on pictures, transformers' where states are requested."""
    return is_inert(hook) or str(getattr(hook, "__module__", None)).startswith("hf_vit_accel.")


def has_hooks_around(model: Model) -> bool:
    """Return whether a module has a hook or a forward of others, which would see the rows of a batch in groups."""
    # One walk: of 800 modules each takes a millisecond.
    return any(
        _has_other_hooks(module) or (module is not model and has_other_forward(module)) for module in model.modules()
    )


def _is_quantised(module: nn.Module) -> bool:
    """Return whether a linear holds a matrix of whole numbers, of 8-bit floats, or of a tensor class of its own."""
    if not hasattr(module, "in_features"):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    matrices = [tensor for tensor in tensors if tensor is not None and tensor.dim() > 1]
    plain = (nn.Parameter, Tensor, nn.Buffer)
    return any(type(x) not in plain or not x.is_floating_point() or x.itemsize == 1 for x in matrices)


def _fingerprint(value: Any) -> Any:
    """Return a value that changes with what a captured step may have read of a weight or an attribute."""
    kind: Any = type(value)  # `isinstance` would ask configs for their `__class__`, which is slow
    return _fingerprint_for(kind)(value)


@lru_cache(maxsize=256)
def _fingerprint_for(kind: Any) -> Callable[[Any], Any]:
    """Return the function that computes fingerprints of values of a class: a model has 1,000 values of ten classes."""
    if issubclass(kind, int | float | str | NoneType | torch.dtype | FunctionType):
        return lambda value: value
    if hasattr(kind, "__tensor_flatten__"):  # quantised
        return lambda value: tuple([_fingerprint(getattr(value, name)) for name in value.__tensor_flatten__()[0]])
    if issubclass(kind, Tensor):
        return place_of
    if issubclass(kind, dict):
        return lambda value: tuple([_fingerprint(item) for item in value.items()])
    if issubclass(kind, list | tuple | set):
        return lambda value: tuple([_fingerprint(item) for item in value])
    return lambda value: kind


@lru_cache(maxsize=256)
def _names_in(kind: Any) -> frozenset[str]:
    """Return every name in the code of a class. Nothing in it reads attributes of other names."""
    owners = [owner for owner in kind.__mro__ if owner not in _BASES]
    names: set[str] = set()
    for value in [kind.forward, *(value for owner in owners for value in vars(owner).values())]:
        function: Any = value.fget if isinstance(value, property) else value
        code = getattr(inspect.unwrap(function), "__code__", None)
        names.update(code.co_names if isinstance(code, CodeType) else ())
    return frozenset(names - vars(nn.Module()).keys() - {"in_features", "out_features"})  # weights have these sizes
