"""`graphed_decoding`: transformers' own decoding loop, whose forwards of one token run on a static cache."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_vit_accel.decoding.ahead import can_run_ahead, running_ahead
from hf_vit_accel.decoding.leaving import RowsInStep, WatchedCriteria, may_leave
from hf_vit_accel.decoding.model_in_loop import NOT_PACKED, ModelInLoop
from hf_vit_accel.decoding.packed import CACHE, Arguments
from hf_vit_accel.decoding.parts import depends_on_tokens_alone, joined, parts_of
from hf_vit_accel.decoding.prefill import check_features
from hf_vit_accel.decoding.room import is_linear
from hf_vit_accel.decoding.steps import free_steps, steps_of
from hf_vit_accel.decoding.text_models import (
    Model,
    UnservedError,
    declared_class_of,
    refuse,
)
from hf_vit_accel.decoding.waiting import CannotWaitError, WaitingRows, may_wait, waiting_rows


def graphed_decoding(
    model: transformers.PreTrainedModel,
    input_ids: Tensor,
    logits_processor: transformers.LogitsProcessorList,
    stopping_criteria: transformers.StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    inputs_tensor: Tensor | None = None,
    max_graphs: int = 8,
    max_bytes: int | None = None,
    max_rows: int = 512,
    halve: bool = True,
    features: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as `generate` does, with every step replayed from a CUDA graph.

    Only the forwards of one token are ours, on a static cache; all else is transformers' own code. Calls for which this
    is impossible decode by stock's method, and `status(model)` counts the reasons.

    A `streamer` that `generate` gets works, too. `generate` drops `assistant_model`, and raises for `stop_strings`
    where `custom_generate` is a function: pass a `StopStringCriteria`.

    Args:
        model: Comes from `generate`, as all arguments do that are not listed here.
        streamer: Receives the prompt and every token.
        synced_gpus: Decode by stock's method, as ranks do that must all run equally many steps.
        max_graphs: Captured steps to keep: one for each batch size and number of slots. Each of them may have smaller
            ones, for the rows that go on when a quarter of the rows have ended.
        max_bytes: Bytes of steps to keep; None for an eighth of the device's memory.
        max_rows: Rows that decode at once, or fewer where memory has no room for their keys. The others wait until some
            have ended: in greedy calls of 9 to 1024 new tokens, without processors that read tokens. Other calls decode
            all rows at once.
        halve: Decode half the rows of a greedy call at a time where memory runs out. False raises, for programs that
            make their own batches smaller.
        features: What `model.get_image_features(..., return_dict=True)` returned for all images of the call, as
            `{"image": output}`; of videos likewise. A prompt that runs in our layers takes them. Any other encodes the
            pixels again, as for `num_return_sequences`, and `status` counts the reasons. `generate` of newer
            transformers has `mm_encoder_outputs` for that.

    Raises:
        ValueError: If transformers decodes such a call by code from the Hub, or a streamer meets beams. Also if
            `max_graphs`, `max_bytes` or `max_rows` is no count, for `features` that are not this model's, and for an
            option of `generate` or a misspelt one.

    Example:
        ```python
        model.generate(**inputs, custom_generate=hf_vit_accel.graphed_decoding)
        model.generate(**inputs, custom_generate=functools.partial(hf_vit_accel.graphed_decoding, streamer=streamer))
        ```
    """
    bytes_given = 0 if max_bytes is None else max_bytes
    bounds = ("max_graphs", max_graphs, 1), ("max_rows", max_rows, 1), ("max_bytes", bytes_given, 0)
    for name, bound, least in bounds:
        if type(bound) is not int or bound < least:
            raise ValueError(f"expected {name} to be a whole number of at least {least}, got {bound!r}")
    of_generate = _variables_of_generate()
    mode = generation_config.get_generation_mode(None)
    unknown = sorted(model_kwargs.keys() - of_generate.get("model_kwargs", model_kwargs).keys())
    if unknown:  # transformers' loop takes any keyword, and reads none of these
        own = "streamer, synced_gpus, max_graphs, max_bytes, max_rows, halve, features"
        raise ValueError(f"unknown option {unknown[0]!r}: pass it to generate. graphed_decoding has {own}.")
    if features is not None:
        check_features(model, features)
    streamer = of_generate.get("streamer") if streamer is None else streamer
    if streamer is not None:
        if "beam" in mode.value:
            raise ValueError("transformers cannot stream beams; leave the streamer out, or pass num_beams=1.")
        if streamer is not of_generate.get("streamer"):  # `generate` has put the prompt into its own
            streamer.put(input_ids.cpu())
    method = getattr(type(model), GENERATION_MODES_MAPPING[mode], None)  # as `generate` itself finds it
    if method is None:
        raise ValueError(f"transformers runs {mode.value} by code from the Hub; leave custom_generate out.")
    arguments = model_kwargs | dict(
        logits_processor=logits_processor, stopping_criteria=stopping_criteria, generation_config=generation_config
    )
    synced_gpus = bool(synced_gpus or of_generate.get("synced_gpus"))
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):  # as `generate` decides it
        synced_gpus |= torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if max_bytes is None:
        device = input_ids.device
        max_bytes = torch.cuda.get_device_properties(device).total_memory // 8 if input_ids.is_cuda else 1 << 30
    steps = steps_of(model)
    parts: list[Arguments] = []
    is_simple = streamer is None and depends_on_tokens_alone(generation_config, logits_processor, stopping_criteria)
    try:
        refuse({f"the loop of transformers {transformers.__version__}": _is_loop_too_old()})
        declared_class_of(model)
        _check(input_ids, generation_config, model_kwargs, of_generate, synced_gpus)
        with steps.locked_for_call(max_graphs, max_bytes), torch.no_grad():
            waiting: WaitingRows | None = None
            if is_simple and may_wait(logits_processor, stopping_criteria):
                waiting = waiting_rows(model, input_ids, model_kwargs, features, max_rows, stopping_criteria)
            if waiting is not None:
                return _decode_in_places(model, method, input_ids, arguments, waiting)
            return _decode_by_steps(model, method, input_ids, arguments | {"streamer": streamer}, features, is_simple)
    except UnservedError as error:
        steps.stock_reasons[str(error)] += 1
        steps.encoded_again.update([NOT_PACKED] if features else [])
    except CannotWaitError as error:
        steps.divided[str(error)] += 1
        parts = parts_of(model, input_ids, model_kwargs, min(error.places, (len(input_ids) + 1) // 2))
    except torch.OutOfMemoryError as error:
        # A penalty of repetitions may hold the length of every row's prompt.
        is_penalised = RepetitionPenaltyLogitsProcessor in map(type, logits_processor)
        if not (is_simple and halve) or is_penalised:
            raise
        error.with_traceback(None)  # which would keep what the call computed
        free_steps(model)
        parts = parts_of(model, input_ids, model_kwargs, (len(input_ids) + 1) // 2)
        if not parts:
            raise
    if parts:
        steps.encoded_again.update(["a part of the rows at a time"] if features else [])
        of_call = logits_processor, stopping_criteria, generation_config
        options: Arguments = dict(max_graphs=max_graphs, max_bytes=max_bytes, max_rows=max_rows, halve=halve)
        outputs = [graphed_decoding(model, part.pop("input_ids"), *of_call, **options | part) for part in parts]
        return joined(outputs, generation_config)
    arguments |= {"synced_gpus": synced_gpus} | ({} if streamer is None else {"streamer": streamer})
    if "assisted" in mode.value:
        arguments["inputs_tensor"] = inputs_tensor
    return method(model, input_ids, **arguments)


def _decode_by_steps(
    model: Model,
    method: Callable[..., Any],
    input_ids: Tensor,
    arguments: Arguments,
    features: Mapping[str, Any] | None,
    may_run_ahead: bool,
) -> Any:
    """Run transformers' loop around a model whose forwards of one token are steps."""
    criteria = arguments["stopping_criteria"]
    max_length = criteria.max_length  # of the user's own criterion, if there is one
    watched: WatchedCriteria | None = None
    if may_leave(len(input_ids), arguments["generation_config"], arguments["logits_processor"], criteria):
        watched = arguments["stopping_criteria"] = WatchedCriteria(criteria)
    rows = RowsInStep(len(input_ids), watched)
    loop = ModelInLoop(model, steps_of(model), max_length, input_ids.shape[1], features, rows)
    return _run_loop(loop, method, input_ids, arguments, may_run_ahead)


def _run_loop(
    loop: ModelInLoop, method: Callable[..., Any], input_ids: Tensor, arguments: Arguments, may_run_ahead: bool
) -> Any:
    is_ahead = may_run_ahead and can_run_ahead(input_ids.device)
    sample = running_ahead(method, loop.has_next_step) if is_ahead else method
    with torch.cuda.device(input_ids.device) if input_ids.is_cuda else nullcontext():  # events are of this one
        return loop.finish(sample(loop, input_ids, **arguments))


def _decode_in_places(
    model: Model, method: Callable[..., Any], input_ids: Tensor, arguments: Arguments, waiting: WaitingRows
) -> Tensor:
    """Run transformers' loop for as many rows as decode at once. The others begin in their places."""
    rows = RowsInStep(waiting.places, waiting.criteria)
    columns = input_ids.shape[1]
    features = waiting.first_features()
    loop = ModelInLoop(model, steps_of(model), columns + waiting.due, columns, features, rows, waiting)
    first = arguments | waiting.first_arguments() | {"stopping_criteria": waiting.criteria}
    ids_NC = _run_loop(loop, method, first.pop("input_ids"), first, may_run_ahead=True)
    pad = arguments["generation_config"]._pad_token_tensor
    return waiting.collected(input_ids, ids_NC, 0 if pad is None else int(pad))


def _variables_of_generate() -> Arguments:
    """Return the local variables of transformers' `generate` that runs now; empty without one."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return {} if frame is None else frame.f_locals


def _is_loop_too_old() -> bool:
    """Return whether transformers' models lack what a step calls, or take places in the cache at every step."""
    return Version(transformers.__version__) < Version("5.4")


def _check(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: Arguments, of_generate: Arguments, synced_gpus: bool
) -> None:
    """Raise `UnservedError` if a call decodes by stock's method for a reason that is known before its first token."""
    mode = config.get_generation_mode(None).value
    cache = model_kwargs.get(CACHE)
    was_passed = of_generate.get("kwargs", {CACHE: cache}).get(CACHE) is not None
    kinds = {type(layer) for layer in getattr(cache, "layers", []) if not is_linear(layer)} - {DynamicLayer}
    reasons = {
        "beams": config.num_beams > 1,
        mode.replace("_", " "): mode not in ("greedy_search", "sample"),
        "synced_gpus": synced_gpus,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "use_cache=False": not model_kwargs.get("use_cache"),
        f"a cache of class {type(cache).__name__}": type(cache) is not DynamicCache,
        "a cache that was passed": was_passed,
        "an offloaded cache": getattr(cache, "offloading", False),
        f"cache layers of class {' '.join(kind.__name__ for kind in kinds)}": kinds,
        f"a device of type {input_ids.device.type}": input_ids.device.type not in ("cpu", "cuda"),
    }
    refuse(reasons)
