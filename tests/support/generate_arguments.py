"""Declare for every argument of `generate` whether `graphed_decoding` serves it, with calls that show it."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

from hf_vit_accel.decoding.packed import CACHE

Outcome = Literal["served", "stock", "dropped", "raises", "none"]


@dataclass(frozen=True)
class Argument:
    """How one argument, or several of a kind, fares.

    Args:
        words: The arguments, between spaces.
        outcome: Who decodes a call with it: "served" stands for static steps. `generate` itself drops an argument
            that is "dropped", and raises for one that "raises". An argument of "none" has no effect here.
        why: The reason, as `status` or the docs say it.
        calls: Arguments of calls to compare with stock. Functions named `make_...` make an argument.
    """

    words: str
    outcome: Outcome
    why: str = ""
    calls: tuple[dict[str, Any], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments."""
        return tuple(self.words.split())


def _served(words: str, *calls: dict[str, Any], why: str = "") -> Argument:
    return Argument(words, "served", why, calls)


def _sampled(**value: Any) -> Argument:
    """Return an argument of sampling, which is served."""
    [name] = value
    return _served(name, dict(do_sample=True) | value)


def _plain(**value: Any) -> Argument:
    """Return an argument that is served with any way to choose tokens."""
    [name] = value
    return _served(name, value)


def _prefix(batch: int, ids: torch.Tensor) -> list[int]:
    return [int(ids[-1]) % 50 + 3, 7 + batch, 9]


_SAMPLE = dict(do_sample=True, num_return_sequences=3)
_PROCESSOR = dict(make_logits_processor=lambda: LogitsProcessorList([TemperatureLogitsWarper(0.7)]))
_CRITERION = dict(make_stopping_criteria=lambda: StoppingCriteriaList([MaxTimeCriteria(1000.0)]))
_IN_BEAMS = "the reason is the beams"
_HUB = "transformers itself runs this by code from the Hub"

ARGUMENTS = (
    _served("inputs", {}, why="`input_ids` by another name"),
    _plain(generation_config=GenerationConfig(max_new_tokens=6, eos_token_id=[1, 5])),
    _served("logits_processor", _PROCESSOR, _PROCESSOR | _SAMPLE),
    _served("stopping_criteria", _CRITERION),
    _plain(prefix_allowed_tokens_fn=_prefix),
    Argument("synced_gpus", "stock", "synced_gpus"),
    Argument("assistant_model", "dropped", "leave `custom_generate` out"),
    Argument("streamer", "none", "served, though `generate` passes none on to a function"),
    Argument(
        "negative_prompt_ids negative_prompt_attention_mask guidance_scale",
        "raises",
        "in Qwen-VL stock raises, too; without `guidance_scale` the others do nothing",
    ),
    Argument("custom_generate", "none", "names `graphed_decoding`"),
    _served("max_length", dict(max_length=40, max_new_tokens=None)),
    _served("max_new_tokens", *(dict(max_new_tokens=count) for count in (2, 3, 33))),
    _plain(min_length=25),
    _plain(min_new_tokens=9),
    Argument("early_stopping length_penalty", "stock", _IN_BEAMS, (dict(num_beams=2, length_penalty=0.5),)),
    _plain(max_time=1000.0),
    Argument("stop_strings tokenizer", "raises", "pass a `StopStringCriteria` in `stopping_criteria`"),
    _served("do_sample", dict(do_sample=True), _SAMPLE),
    Argument("num_beams", "stock", "beams", (dict(num_beams=2), dict(num_beams=2, do_sample=True))),
    Argument("use_mtp", "stock", "assisted generation"),
    Argument("use_cache", "stock", "use_cache=False", (dict(use_cache=False),)),
    Argument(
        "cache_implementation cache_config max_cache_len",
        "stock",
        "a cache of class StaticCache",
        (dict(cache_implementation="static"),),
    ),
    Argument("past_key_values", "stock", "a cache that was passed", ({f"make_{CACHE}": DynamicCache},)),
    _sampled(temperature=1.7),
    _sampled(top_k=7),
    _sampled(top_p=0.6),
    _sampled(min_p=0.05),
    _sampled(top_h=0.5),
    _sampled(typical_p=0.6),
    _sampled(epsilon_cutoff=0.01),
    _sampled(eta_cutoff=0.01),
    _plain(repetition_penalty=1.4),
    _plain(encoder_repetition_penalty=1.4),
    _plain(no_repeat_ngram_size=2),
    _plain(encoder_no_repeat_ngram_size=2),
    _plain(bad_words_ids=[[5], [7, 8]]),
    _plain(renormalize_logits=True),
    _plain(forced_bos_token_id=3),
    _plain(forced_eos_token_id=1),
    _plain(remove_invalid_values=True),
    _plain(exponential_decay_length_penalty=(3, 1.5)),
    _plain(suppress_tokens=[5, 6, 7]),
    _plain(begin_suppress_tokens=[5, 6, 7]),
    _plain(sequence_bias=[[[5], 3.0]]),
    Argument("token_healing", "raises", "it needs the tokenizer, which `generate` drops"),
    _plain(watermarking_config=WatermarkingConfig()),
    _served("num_return_sequences", _SAMPLE),
    Argument(
        "output_attentions output_hidden_states",
        "stock",
        "output_hidden_states",
        (dict(output_hidden_states=True, return_dict_in_generate=True),),
    ),
    _served(
        "output_scores output_logits return_dict_in_generate",
        dict(output_scores=True, output_logits=True, return_dict_in_generate=True),
    ),
    _plain(pad_token_id=4),
    _plain(bos_token_id=4),
    _served("eos_token_id", *(dict(eos_token_id=ids) for ids in (5, list(range(1, 40, 3))))),
    Argument("decoder_start_token_id", "none", "for models with an encoder"),
    Argument(
        "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit",
        "stock",
        "assisted generation",
        (dict(prompt_lookup_num_tokens=3),),
    ),
    Argument(
        "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type",
        "none",
        "for assisted decoding",
    ),
    _served("compile_config disable_compile", dict(disable_compile=True), dict(compile_config=CompileConfig())),
    Argument("continuous_batching_config", "none", "for `generate_batch`"),
    Argument("penalty_alpha dola_layers", "raises", _HUB),
    Argument("diversity_penalty num_beam_groups", "none", "act on groups of beams, for which `generate` raises"),
    _plain(low_memory=True),
    Argument("constraints force_words_ids", "raises", _HUB),
    _served("prefill_chunk_size", dict(prefill_chunk_size=4), why="the prompt is stock's"),
    Argument("transformers_version", "none", "no effect"),
)
"""Every argument of `generate`."""
