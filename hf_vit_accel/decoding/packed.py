"""The forward of a prompt without its padding: all tokens of a group of rows one after the other.

transformers' own code embeds pictures and computes logits. In between our layers run instead of its text model, and
write keys and values to the slots of a decode step.
`G` rows of a group, `C` their columns, `T` their tokens, `E` width, `H` and `K` heads, `D` head dim, `F` heads' widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import MoeModelOutputWithPast

from hf_vit_accel.decoding.layers import CausalAttention, norm, refuse_unpacked, run_layers
from hf_vit_accel.decoding.room import Room, on_device
from hf_vit_accel.decoding.text_models import Model, TextReading, refuse
from hf_vit_accel.versions import cache_name

CACHE = cache_name()
"""The name of the cache among the arguments of a model."""
Arguments: TypeAlias = dict[str, Any]
"""The arguments of a model's method by name: tensors, caches and flags."""


class _Standin:
    """A module with another forward, or with parts exchanged that its own forward calls. It stays as it is itself."""

    def __init__(self, module: Model, forward: Callable[..., Any] | None = None, **parts: Any) -> None:
        vars(self).update(parts, _module=module, _forward=forward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is not None:
            return self._forward(*args, **kwargs)
        return type(self._module).forward(self, *args, **kwargs)


def _returning(output: Any) -> Callable[..., Any]:
    """Return a function of any arguments that returns this output."""
    return lambda *_, **__: output


class PackedRows:
    """The tokens of rows, one after the other, out of columns with padding.

    Attributes:
        is_token_GC: Which columns are tokens.
        rows_T: The row of every token.
        columns_T: Its column.
        attend: Attention within rows.
    """

    def __init__(self, mask_GC: Tensor) -> None:
        self.is_token_GC = mask_GC != 0
        self.rows_T, self.columns_T = self.is_token_GC.nonzero(as_tuple=True)
        lengths = [length for length in self.is_token_GC.sum(1).tolist() if length]
        refuse({"no token": not lengths})
        self.attend = CausalAttention(lengths, mask_GC.device)

    def run(
        self,
        reading: TextReading,
        embeds_GCE: Tensor,
        positions: Tensor,
        deepstack: tuple[Tensor | None, Sequence[Tensor] | None],
        **options: Any,
    ) -> Tensor:
        """Return the hidden states (1, T, E) behind the last layer.

        Args:
            positions: (axes, G or 1, C) or (G or 1, C).
            deepstack: Which columns are of pictures, and what the first layers add to them.
            options: Those of `run_layers`.
        """
        positions = positions.expand(*positions.shape[:-2], *self.is_token_GC.shape)[..., self.rows_T, self.columns_T]
        positions = positions.reshape(-1, 1, positions.shape[-1])
        is_picture_GC, of_layers = deepstack
        of_tokens = None
        if is_picture_GC is not None and of_layers is not None:
            is_kept = self.is_token_GC[is_picture_GC]
            pictures = is_picture_GC[self.rows_T, self.columns_T].nonzero()[:, 0]
            of_tokens = pictures, [of_layer.to(is_kept.device)[is_kept] for of_layer in of_layers]
        hidden_1TE = embeds_GCE[self.rows_T, self.columns_T][None]
        positions = positions if reading.declared.has_mrope else positions[0]
        return run_layers(reading, hidden_1TE, positions, self.attend, deepstack=of_tokens, **options)

    def unpacked(self, hidden_1TE: Tensor) -> Tensor:
        """Return hidden states (G, C, E), with zeros for padding."""
        hidden_GCE = hidden_1TE.new_zeros(*self.is_token_GC.shape, hidden_1TE.shape[-1])
        hidden_GCE[self.rows_T, self.columns_T] = hidden_1TE[0]
        return hidden_GCE


class PackedPrompt:
    """Forwards of groups of rows of one prompt.

    Args:
        reading: The model as it is now.
        columns: Of the whole prompt.
    """

    def __init__(self, model: Model, reading: TextReading, columns: int) -> None:
        refuse({"the language model alone": reading.text is model.model})
        refuse_unpacked(reading)
        weight = reading.text.embed_tokens.weight
        self._model = model
        self._reading = reading
        self.columns = columns
        config = reading.text.config
        shape = 0, config.num_key_value_heads, 0, reading.text.layers[0].self_attn.head_dim
        self.layers: list[Any] = [DynamicLayer() for _ in reading.text.layers]
        """Layers of a cache without tokens, for `make_room`."""
        for layer in self.layers:
            layer.keys = layer.values = torch.empty(shape, dtype=weight.dtype, device=weight.device)

    def logits(self, inputs: Arguments, rows: Sequence[int], room: Room, encoded: Mapping[str, Any]) -> Tensor:
        """Return the logits (G, 1, vocabulary) of the last column, and write keys and values to this room.

        Args:
            inputs: Stock's inputs of a group; the last column is no padding.
            rows: The group's rows in the room.
            encoded: The group's features that are encoded already, by modality.
        """
        forward = partial(self._text, rows, room)  # no attribute: a cycle of references would keep the room
        text = _Standin(self._reading.text, forward)
        methods = {f"get_{modality}_features": _returning(output) for modality, output in encoded.items()}
        model = _Standin(self._model, model=_Standin(self._model.model, language_model=text, **methods))
        logits_G1V: Tensor = model(**inputs, return_dict=True).logits
        return logits_G1V[:, -1:]

    def _text(
        self,
        rows_of_group: Sequence[int],
        room: Room,
        *,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **others: Any,
    ) -> MoeModelOutputWithPast:
        """Return the last column's hidden state (G, 1, E) of every row, as if the text model had returned no more."""
        refuse({f"the argument {name} of the text model": not isinstance(x, bool | None) for name, x in others.items()})
        mask_GC = inputs_embeds.new_ones(inputs_embeds.shape[:2]) if attention_mask is None else attention_mask
        rows = PackedRows(mask_GC)
        rows_T = on_device(rows_of_group, mask_GC.device)[rows.rows_T]
        slots = room.slots_of(rows_T, rows.columns_T + self.columns - mask_GC.shape[1])
        deepstack = visual_pos_masks, deepstack_visual_embeds
        last_G = rows.attend.last_G
        hidden_1GE = rows.run(self._reading, inputs_embeds, position_ids, deepstack, slots=slots, returned_T=last_G)
        last_G1E = norm(self._reading.text.norm, hidden_1GE[0]).unsqueeze(1)
        return MoeModelOutputWithPast(last_hidden_state=last_G1E)
