"""`graphed_decoding`: transformers' own decoding loop, whose forwards of one token run on a static cache."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Hashable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_vit_accel.model.step import ATTENTION, CACHE, Arguments, Step, StepInputs, UnservedError, release, window_of
from hf_vit_accel.model.steps import Steps, steps_of

FEWEST = 8
"""Tokens still to come from which on a new step, whose capture takes some 0.1 s, pays."""
_RESERVE = 128
"""Slots for tokens to come that a new cache has at least. Where it is full, a larger one takes over."""
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", ATTENTION)
"""Attention of the text model that the step's computes as well. A step of another thread may be under way."""


def slots_for(tokens: int) -> int:
    """Return the slots of a cache for some tokens: a multiple of 128, four sizes to an octave.

    Attention reads all slots of a cache, so they are few. Each size is captured for itself, so sizes are few, too.
    """
    unit = 1 << max(7, (tokens - 1).bit_length() - 3)
    return -(-tokens // unit) * unit


def graphed_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    inputs_tensor: Tensor | None = None,
    max_graphs: int = 8,
    max_bytes: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as `generate` does, with every step replayed from a CUDA graph.

    Only the forwards of one token are ours, on a static cache; all else is transformers' own code. A call without a
    static cache decodes by stock's method, and `status(model)` counts the reason.

    `generate` drops `streamer`, `synced_gpus` and `assistant_model` where `custom_generate` is a function, and it
    raises for `stop_strings`. Give the first two as the example does, and `StopStringCriteria` for the last.

    Args:
        model: Comes from `generate`, as all arguments do that are not listed here.
        streamer: Receives the prompt and every token.
        synced_gpus: Decode by stock's method, as ranks do that must all run equally many steps.
        max_graphs: Steps to keep: one for each batch size and number of slots.
        max_bytes: Bytes of steps to keep; None for an eighth of the device's memory.

    Raises:
        ValueError: If transformers decodes such a call by code from the Hub, or a streamer meets beams.

    Example:
        ```python
        model.generate(**inputs, custom_generate=hf_vit_accel.graphed_decoding)
        model.generate(**inputs, custom_generate=functools.partial(hf_vit_accel.graphed_decoding, streamer=streamer))
        ```
    """
    _warn_of_dropped(streamer)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    arguments: Arguments = dict(
        logits_processor=logits_processor, stopping_criteria=stopping_criteria, generation_config=generation_config
    )
    arguments |= model_kwargs
    synced_gpus = synced_gpus or _is_synced(model)
    steps = steps_of(model)
    try:
        _check(model, input_ids, generation_config, model_kwargs, synced_gpus)
        with steps.of_call(model, max_graphs, _most_bytes(input_ids) if max_bytes is None else max_bytes):
            return _decode_by_steps(model, input_ids, steps, arguments | {"streamer": streamer})
    except UnservedError as error:
        steps.stock[str(error)] += 1
    arguments |= {"synced_gpus": synced_gpus}
    return _decode_by_stock(model, input_ids, inputs_tensor, streamer, arguments)


@torch.no_grad()
def _decode_by_steps(model: PreTrainedModel, input_ids: Tensor, steps: Steps, arguments: Arguments) -> Any:
    """Run transformers' loop, with the model's forwards of one token in static steps."""
    loop: Any = _Loop(model, steps, arguments["generation_config"])
    try:
        output = GenerationMixin._sample(loop, input_ids, **arguments)  # type: ignore[arg-type]
    finally:
        loop.store()
    loop.count()
    return output


def _most_bytes(input_ids: Tensor) -> int:
    """Return the bytes of steps to keep on a device by default."""
    device = input_ids.device
    return torch.cuda.get_device_properties(device).total_memory // 8 if device.type == "cuda" else 1 << 30


def _is_synced(model: PreTrainedModel) -> bool:
    """Return whether ranks must run equally many steps, as `generate` decides it."""
    is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return is_sharded and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _warn_of_dropped(streamer: BaseStreamer | None) -> None:
    """Warn of the arguments that `generate`, which calls `graphed_decoding`, does not pass on to a function."""
    caller = sys._getframe(2)
    if caller.f_code.co_name != "generate":
        return
    for name in ("streamer", "assistant_model", "synced_gpus"):
        if caller.f_locals.get(name) and not (name == "streamer" and streamer is not None):
            warnings.warn(
                f"transformers' generate drops {name} where custom_generate is a function. Pass functools.partial("
                "hf_vit_accel.graphed_decoding, streamer=..., synced_gpus=...), or leave custom_generate out.",
                stacklevel=5,
            )


def _decode_by_stock(
    model: PreTrainedModel,
    input_ids: Tensor,
    inputs_tensor: Tensor | None,
    streamer: BaseStreamer | None,
    arguments: Arguments,
) -> Any:
    """Decode by the method that `generate` itself would have called."""
    mode = arguments["generation_config"].get_generation_mode(None)
    method = getattr(type(model), GENERATION_MODES_MAPPING[mode], None)
    if method is None:
        raise ValueError(f"transformers runs {mode.value} by code from the Hub; leave custom_generate out.")
    if streamer is not None and "beam" in mode.value:
        raise ValueError("transformers cannot stream beams; leave the streamer out, or pass num_beams=1.")
    if streamer is not None:
        arguments["streamer"] = streamer
    if "assisted" in mode.value:
        arguments["inputs_tensor"] = inputs_tensor
    return method(model, input_ids, **arguments)


def _check(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: Arguments, synced_gpus: bool
) -> None:
    """Raise `UnservedError` if a call decodes by stock's method for a reason that is known before its first token."""
    mode = config.get_generation_mode(None).value
    cache = model_kwargs.get(CACHE)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if not hasattr(GenerationMixin, "_prefill"):
        raise UnservedError(f"the loop of transformers {transformers.__version__}")
    methods = ("_sample", "_prefill", "_update_model_kwargs_for_generation")
    own_methods = [name for name in methods if getattr(type(model), name) is not getattr(GenerationMixin, name)]
    reasons = {
        f"num_beams={config.num_beams}": config.num_beams > 1,
        mode.replace("_", " "): mode not in ("greedy_search", "sample"),
        "synced_gpus": synced_gpus,
        "an encoder and a decoder": model.config.is_encoder_decoder,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "use_cache=False": not model_kwargs.get("use_cache"),
        f"a cache of class {type(cache).__name__}": type(cache) is not DynamicCache,
        f"a {type(model).__name__} with other methods than GenerationMixin": own_methods,
        "the model is in training mode": model.training,
        f"ids on {input_ids.device}": input_ids.device != model.device or input_ids.device.type not in ("cpu", "cuda"),
        f"the text model's attention is {attention}": attention not in _ATTENTION,
        "an empty batch": not len(input_ids),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UnservedError(reason)


class _Loop:
    """The model as transformers' `_sample` sees it. Its forwards of one token run as static steps.

    All other attributes are the model's, so the forward of the prompt is stock's.
    """

    def __init__(self, model: Any, steps: Steps, config: GenerationConfig) -> None:
        self._model = model
        self._steps = steps
        self._generation_config = config
        self._step: Step | None = None
        self._form: Hashable = None
        self._room = 0.0
        self._cache: Any = None
        self._updates_due = 0
        self._reason: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **arguments: Any) -> Arguments:
        """Pass on the arguments. `__call__` computes stock's inputs where it needs them."""
        return {"input_ids": input_ids, "arguments": arguments}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Arguments, **kwargs: Any) -> Arguments:
        """Leave masks and positions alone while steps advance their own."""
        self._updates_due += 1
        if self._step is None:
            model_kwargs = self._updated(outputs, model_kwargs)
            self._updates_due = 0
        return model_kwargs

    def _updated(self, outputs: Any, model_kwargs: Arguments) -> Arguments:
        for _ in range(self._updates_due):
            model_kwargs = self._model._update_model_kwargs_for_generation(outputs, model_kwargs)
        return model_kwargs

    def __call__(self, input_ids: Tensor, arguments: Arguments, return_dict: bool) -> Any:
        """Return the output of a forward of one token."""
        self._cache = arguments[CACHE]
        if self._reason is None and (self._step is None or self._step.length >= self._room):
            try:
                self._open_step(input_ids, arguments)
            except Exception as error:  # whatever a model's code raises, stock goes on
                self._give_up(error)
        if self._step is None:
            return self._model(**self._stock_inputs(input_ids, arguments), return_dict=True)
        logits = self._step(self._model, input_ids[:, -1:])
        return CausalLMOutputWithPast(logits=logits, **{CACHE: self._cache})

    def _stock_inputs(self, input_ids: Tensor, arguments: Arguments) -> Arguments:
        """Return the inputs of stock's forward, from masks and positions that may be some steps behind."""
        arguments = self._updated(CausalLMOutputWithPast(**{CACHE: self._cache}), dict(arguments))
        inputs: Arguments = self._model.prepare_inputs_for_generation(input_ids, **arguments)
        return inputs

    def _open_step(self, input_ids: Tensor, arguments: Arguments) -> None:
        """Go on with a step that has room: from the prompt's cache, or from the cache of a step that is full.

        Raises:
            UnservedError: If this call gets none.
            Exception: If no call of this form gets one.
        """
        window = window_of(self._cache)
        source = self._cache if self._step is None else self._step.cache
        length = int(self._cache.get_seq_length()) if self._step is None else self._step.length
        stock_inputs = self._stock_inputs(input_ids, arguments)
        inputs = StepInputs(stock_inputs, length)
        due = self._generation_config.max_length - input_ids.shape[1]
        slots = slots_for(length + max(1, min(due, max(_RESERVE, length // 4))))
        self._room = min(slots, window - 1)
        if length >= self._room:
            raise UnservedError(f"a sliding window of {window} tokens")
        if self._steps.refused.get(inputs.form) is not None:
            raise UnservedError(str(self._steps.refused[inputs.form]))
        key = (inputs.form, len(input_ids), slots)
        step = self._steps.find(key)
        if step is None and due < FEWEST:
            raise UnservedError(f"fewer than {FEWEST} tokens to come, and no step captured")
        self._form = inputs.form
        with torch.inference_mode(False), torch.no_grad():  # buffers of inference mode could not be written later
            if step is None:
                step = Step(inputs, source, slots, self._model.config.get_text_config(decoder=True))
                self._steps.add(key, step, self._model)
            if inputs.form not in self._steps.refused:
                trial = stock_inputs | {CACHE: copy.deepcopy(source)}
                expected = self._model(**trial, return_dict=True).logits[:, -1:]
                step.load(inputs, source, length)
                self._steps.prove(inputs.form, step(self._model, input_ids[:, -1:]), expected)
            step.load(inputs, source, length)
        release(self._cache)
        self._step = step

    def _give_up(self, error: Exception) -> None:
        """Let stock go on from here, and remember an error that every call of this form would meet."""
        self._reason = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            self._reason = "memory ran out"
        elif not isinstance(error, UnservedError):
            self._reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self._steps.refuse(self._form, self._reason)
        if self._step is not None:
            self._step.store(self._cache)
        self._step = None

    def count(self) -> None:
        """Count a call that ended."""
        if self._reason is None:
            self._steps.served += 1
        else:
            self._steps.stock[self._reason] += 1

    def store(self) -> None:
        """Leave in a cache that the user sees what stock would have left."""
        is_visible = self._generation_config.return_dict_in_generate or getattr(self._cache, "_is_user_defined", True)
        if self._step is not None and is_visible:
            self._step.store(self._cache)
