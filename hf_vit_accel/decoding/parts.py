"""A call whose memory ran out, as two calls of half its rows, where no row's tokens depend on the others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import (
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_vit_accel.decoding.packed import CACHE, Arguments
from hf_vit_accel.decoding.prefill import GroupedPrompt
from hf_vit_accel.decoding.text_models import Model

OF_TOKENS = {
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
}
"""Processors and criteria that read the tokens of each row by itself, and keep nothing of a call."""


def depends_on_tokens_alone(
    config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList
) -> bool:
    """Return whether a row's tokens follow from its own tokens: no random numbers, no state, no code of the user's."""
    is_greedy = config.get_generation_mode(None).value == "greedy_search"
    kinds = {type(each) for each in (*processors, *criteria)}
    return is_greedy and not config.return_dict_in_generate and kinds <= OF_TOKENS


def halves_of(model: Model, input_ids: Tensor, model_kwargs: Arguments) -> list[Arguments]:
    """Return the inputs of both halves of the rows, each with an empty cache; none where they cannot be cut."""
    cache = model_kwargs[CACHE]
    cache.layers = [DynamicLayer() for _ in cache.layers]  # frees what was computed
    prompt = GroupedPrompt(model, model_kwargs | {"input_ids": input_ids})
    middle = len(input_ids) // 2
    if not prompt.groups or not middle:
        return []
    halves = []
    for rows in (range(middle), range(middle, len(input_ids))):
        halves.append(prompt.inputs_of(rows, copy.deepcopy(cache), input_ids.shape[1]))
    return halves


def joined(tokens: Sequence[Tensor], config: Any) -> Tensor:
    """Join the tokens of all rows. Rows that ended in a shorter half are padded, as stock pads them."""
    longest = max(of_half.shape[1] for of_half in tokens)
    pad = config._pad_token_tensor
    value = 0 if pad is None else int(pad)
    return torch.cat([nn.functional.pad(of_half, (0, longest - of_half.shape[1]), value=value) for of_half in tokens])
