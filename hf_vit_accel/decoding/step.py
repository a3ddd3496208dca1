"""One decode step over static buffers: the model's own forward of one token a row, on a static cache.

`B` batch, `S` slots of the cache, `H` heads of queries, `K` heads of keys, `D` head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_vit_accel.decoding.norms import as_one_kernel, norms_of
from hf_vit_accel.model.host import Arguments
from hf_vit_accel.ops.decode_attention import attend_in_chunks, why_not_in_chunks
from hf_vit_accel.versions import cache_name

ATTENTION = "hf_vit_accel_decode_step"
"""The name of the attention that the text model has while its step runs or is captured."""
CACHE = cache_name()
"""The name of the cache among the arguments of a model."""
_FURTHER_TERMS = ("softcap", "s_aux", "sinks", "position_bias")
_PER_CALL = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "rope_deltas")
"""Arguments that a decode step ignores, since it gets positions."""


class UnservedError(RuntimeError):
    """A call that has no static step. The text is the reason; another call may have one."""


def attend_grouped(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the query heads of a group as rows of one query, so that no key head is copied.

    Older transformers repeat key heads in memory wherever there is a mask. Half precision on a GPU takes our
    kernel, all else torch's.
    The forward of another thread may come here with several tokens, and gets transformers' own function.
    """
    further = [name for name in _FURTHER_TERMS if kwargs.get(name) is not None]
    if further:
        raise NotImplementedError(f"attention with {further[0]}")
    batch, heads, tokens, width = query_BHTD.shape
    key_heads = key_BKSD.shape[1]
    mask = attention_mask
    if mask is None or mask.shape[1] != 1 or tokens != 1 or dropout or heads % key_heads:
        return sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, mask, dropout, scaling, **kwargs)
    if mask.dtype != torch.bool:
        mask = mask.to(query_BHTD.dtype)  # autocast
    query = query_BHTD.reshape(batch, key_heads, heads // key_heads, width)
    if why_not_in_chunks(query, key_BKSD, value_BKSD, mask) is None:
        out = attend_in_chunks(query, key_BKSD, value_BKSD, mask, width**-0.5 if scaling is None else scaling)
    else:
        out = nn.functional.scaled_dot_product_attention(query, key_BKSD, value_BKSD, attn_mask=mask, scale=scaling)
    return out.reshape(batch, 1, heads, value_BKSD.shape[-1]), None


AttentionInterface.register(ATTENTION, attend_grouped)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def _step_attention(config: Any) -> Iterator[None]:
    """Give a text config the attention of the step."""
    former = config._attn_implementation_internal
    config._attn_implementation_internal = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = former


class SlotLayer(StaticLayer):
    """Keys and values of one layer. Every step writes the slot that all layers share."""

    def __init__(self, like: Any, slots: int, slot_1: Tensor) -> None:
        super().__init__(max_cache_len=slots)
        self.keys: Tensor = like.keys.new_zeros((*like.keys.shape[:2], slots, like.keys.shape[3]))
        self.values: Tensor = like.values.new_zeros((*like.values.shape[:2], slots, like.values.shape[3]))
        self._slot_1 = slot_1
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values; return those of all slots.

        Under autocast values may have a narrower dtype than keys. A dynamic cache has that of its first keys.
        """
        self.keys.index_copy_(2, self._slot_1, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self._slot_1, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Return the tokens before this step, as a tensor that replays follow."""
        return self._slot_1[0]


def is_linear(layer: Any) -> bool:
    """Return whether a layer keeps the states of linear attention alone, which do not grow with the text."""
    return hasattr(layer, "recurrent_states") and not isinstance(layer, DynamicLayer)


def _states_of(layer: Any) -> list[Tensor]:
    """Return the tensors that a step of this layer writes."""
    if not is_linear(layer):
        return [layer.keys, layer.values]
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


def smallest_window_of(cache: Any) -> float:
    """Check that a cache can become static. Return its smallest sliding window, infinity without any.

    Raises:
        UnservedError: If the cache cannot become static.
    """
    if cache.offloading:
        raise UnservedError("an offloaded cache")
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and not is_linear(layer):
            raise UnservedError(f"cache layers of class {type(layer).__name__}")
        if any(state is None or state.dim() < 3 for state in _states_of(layer)):
            raise UnservedError("cache layers without keys")
    return min([float("inf"), *(layer.sliding_window for layer in cache.layers if hasattr(layer, "sliding_window"))])


class StepInputs:
    """Stock's inputs of a forward of one token.

    Attributes:
        tensors: Tensors of one value a row: ids, positions, kinds of tokens.
        constants: Other arguments.
        mask: The mask of padding, one column for every token; None without padding.
        key: What steps for such inputs have in common.
    """

    def __init__(self, inputs: Arguments, length: int) -> None:
        """Read the inputs. `length` is the number of tokens in the cache.

        Raises:
            UnservedError: If an input has a meaning that a static step would lose.
        """
        rows = len(inputs["input_ids"])
        self.tensors: dict[str, Tensor] = {}
        self.constants: Arguments = {}
        self.mask: Tensor | None = inputs.get("attention_mask")
        if self.mask is not None and (not isinstance(self.mask, Tensor) or self.mask.shape != (rows, length + 1)):
            raise UnservedError("an attention_mask of a shape of its own")
        for name, value in inputs.items():
            if name in ("attention_mask", CACHE, *_PER_CALL):
                continue
            if isinstance(value, Tensor) and name.endswith("token_type_ids"):
                value = value[:, -1:]  # older transformers pass those of the whole text
            is_of_rows = name == "position_ids" or name.endswith(("input_ids", "token_type_ids"))
            if isinstance(value, Tensor) and is_of_rows and value.shape[-2:] == (rows, 1):
                self.tensors[name] = value
            elif isinstance(value, bool | int | float | str | None):
                self.constants[name] = value
            else:
                raise UnservedError(f"the argument {name} in every step")
        if "position_ids" not in self.tensors:
            raise UnservedError("the model computes positions in every step itself")
        shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()]
        self.key = (*shapes, *self.constants.items())


class DecodeStep:
    """The decode step of a batch on a cache of some slots. Everything that advances does so inside the step.

    Attributes:
        length: Tokens in the cache, counted on the host.
        nbytes: Bytes of the cache and of the graph.
        replay: Replays the step from a graph; None where every step runs.
        is_proven: Whether its logits were compared with stock's.
    """

    def __init__(self, inputs: StepInputs, cache: Any, slots: int, model: Any) -> None:
        self._tensors = {name: torch.zeros_like(tensor).contiguous() for name, tensor in inputs.tensors.items()}
        self._constants = inputs.constants
        self._config = model.config.get_text_config(decoder=True)
        self._norms = norms_of(model)
        self.device = self._tensors["input_ids"].device
        self._slot_1 = torch.zeros(1, dtype=torch.long, device=self.device)
        layers: list[Any] = []
        for layer in cache.layers:
            layers.append(copy.deepcopy(layer) if is_linear(layer) else SlotLayer(layer, slots, self._slot_1))
        self._cache = Cache(layers=layers)
        self._states = [state for layer in layers for state in _states_of(layer)]
        keys = next(layer.keys for layer in layers if isinstance(layer, SlotLayer))
        self._mask_B11S = torch.zeros(len(keys), 1, 1, slots, dtype=keys.dtype, device=keys.device)
        self._logits: Tensor | None = None
        self.length = 0
        self.nbytes = sum(state.nbytes for state in self._states)
        self.replay: Callable[[], None] | None = None
        self.is_proven = False

    def load(self, inputs: StepInputs, cache: Any, length: int) -> None:
        """Go on from a call: copy the tokens of its cache and its inputs into this step's buffers.

        Afterwards the call's cache is a view of the buffers, which frees the memory of the prompt's.
        """
        for name, buffer in self._tensors.items():
            buffer.copy_(inputs.tensors[name])
        self._slot_1.fill_(length)
        self.length = length
        self._mask_B11S.fill_(float("-inf"))
        visible_BS = self._mask_B11S[:, 0, 0, :length]
        if inputs.mask is None:
            visible_BS.zero_()
        else:
            visible_BS.masked_fill_(inputs.mask[:, :length] != 0, 0.0)
        for layer, source in zip(self._cache.layers, cache.layers, strict=True):
            for state, value in zip(_states_of(layer), _states_of(source), strict=True):
                if isinstance(layer, SlotLayer):
                    state[:, :, length:].zero_()  # a masked slot counts zero times, but NaN would stay NaN
                    state[:, :, :length].copy_(value)
                else:
                    state.copy_(value)
            if isinstance(layer, SlotLayer):
                source.keys = layer.keys[:, :, :length]
                source.values = layer.values[:, :, :length]

    def store(self, cache: Any, *, is_kept: bool = False) -> None:
        """Leave in a cache what stock would have left there: views of this step's keys, copies in one that is kept."""
        for layer, target in zip(self._cache.layers, cache.layers, strict=True):
            if isinstance(layer, SlotLayer):
                target.keys, target.values = [
                    state[:, :, : self.length].clone() if is_kept else state[:, :, : self.length]
                    for state in _states_of(layer)
                ]
                if isinstance(target, DynamicSlidingWindowLayer):
                    target.cumulative_length = self.length
            else:
                for state, value in zip(_states_of(target), _states_of(layer), strict=True):
                    state.copy_(value)

    def run(self, model: Any) -> None:
        """Compute one step, and advance the buffers. This is what a graph captures."""
        self._mask_B11S.index_fill_(3, self._slot_1, 0.0)
        arguments = self._tensors | self._constants | {"attention_mask": self._mask_B11S, "return_dict": True}
        with _step_attention(self._config), as_one_kernel(self._norms), torch.no_grad():
            self._logits = model(**arguments, **{CACHE: self._cache}).logits
        self._slot_1.add_(1)
        self._tensors["position_ids"].add_(1)
        states = [state for layer in self._cache.layers for state in _states_of(layer)]
        assert [state.data_ptr() for state in states] == [state.data_ptr() for state in self._states], "not in place"

    def __call__(self, model: Any, ids_B1: Tensor) -> Tensor:
        """Return the logits (B, 1, vocabulary) after one more token a row. The next step overwrites them."""
        self._tensors["input_ids"].copy_(ids_B1)
        if self.replay is None:
            self.run(model)
        else:
            self.replay()
        self.length += 1
        assert self._logits is not None
        return self._logits

    def prove(self, model: Any, ids_B1: Tensor, expected: Tensor) -> None:
        """Compute a step that stock has computed, too, and compare the logits. The step counts: its token is written.

        Raises:
            ArithmeticError: If the logits differ.
        """
        logits = self(model, ids_B1).double()
        is_exact = expected.dtype.itemsize > 2 and torch.get_float32_matmul_precision() == "highest"
        difference = (logits - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
        error = float(difference.max())
        if not error <= (1e-4 if is_exact else 0.05):  # nor for NaN
            raise ArithmeticError(f"logits differ from stock's by {error:.2g}")
        self.is_proven = True
