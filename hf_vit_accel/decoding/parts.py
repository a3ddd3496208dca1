"""A call in parts, where its memory ran out and no row's tokens depend on the others."""

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


def parts_of(model: Model, input_ids: Tensor, model_kwargs: Arguments, most: int) -> list[Arguments]:
    """Return the inputs of parts of at most so many rows, each with an empty cache; none where they cannot be cut."""
    cache = model_kwargs[CACHE]
    cache.layers = [DynamicLayer() for _ in cache.layers]  # frees what was computed
    prompt = GroupedPrompt(model, model_kwargs | {"input_ids": input_ids})
    batch = len(input_ids)
    if not prompt.groups or most < 1 or most >= batch:
        return []
    parts = []
    for begin in range(0, batch, most):
        rows = range(begin, min(begin + most, batch))
        parts.append(prompt.inputs_of(rows, copy.deepcopy(cache), input_ids.shape[1]))
    return parts


def joined(tokens: Sequence[Tensor], config: Any) -> Tensor:
    """Join the tokens of all rows. Rows that ended in a shorter part are padded, as stock pads them."""
    longest = max(of_part.shape[1] for of_part in tokens)
    pad = config._pad_token_tensor
    value = 0 if pad is None else int(pad)
    return torch.cat([nn.functional.pad(of_part, (0, longest - of_part.shape[1]), value=value) for of_part in tokens])
