"""`text=True`: the layers of the language model on our operations, in forwards without gradients and without a cache.

The tokens of all rows run one after the other, without padding. Hidden states of padding are zeros.
`B` rows, `G` some of them, `C` columns, `T` tokens, `V` tokens of pictures, `A` axes of positions, `E` width.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel.attached import OurHooks, OurMethod
from hf_vit_accel.decoding.layers import check_equal, norm, refuse_unpacked
from hf_vit_accel.decoding.packed import CACHE, Arguments, PackedRows
from hf_vit_accel.decoding.text_models import (
    Model,
    TextReading,
    UnservedError,
    declared_texts,
    has_other_forward,
    read_text,
    refuse,
    remember,
)
from hf_vit_accel.machine import one_line, raise_if_any, reasons_untraceable

GRADIENTS = "gradients are enabled"
HAS_CACHE = "a cache; use_cache=False does without"
_PER_COLUMN = ("input_ids", "inputs_embeds", "attention_mask", "visual_pos_masks")
"""Inputs of shape (B, C, ...)."""
_TENSORS = (*_PER_COLUMN, "position_ids", "deepstack_visual_embeds")
_OPTIONS: dict[str, tuple[bool, ...]] = {
    "is_causal": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False, True),
    "output_router_logits": (False,),
    "return_dict": (False, True),
    "use_cache": (False,),
}
"""The values of options that we serve, of a call or of the config."""
_CALLED_ON = "_hf_vit_accel_called_on"
"""The keyword argument that names the shallow copy of a text model that is called."""


class TextForward(OurMethod):
    """Replacement for a text model's `forward`. Copies and pickles begin without counts."""

    def __init__(self, text: Model, strict: bool, former: object = None, hooks: OurHooks | None = None) -> None:
        super().__init__(text)
        self.__name__ = "forward"
        self._strict = strict
        self._former = former  # the class's forward, where the instance had it; None where it had none
        self._proofs: dict[Hashable, type[Any] | str] = {}  # stock's class of outputs, or why stock runs such calls
        self.calls = 0
        self.stock_reasons: Counter[str] = Counter()
        self.__signature__ = inspect.signature(type(text).forward.__get__(text))
        self.hooks = hooks

    def __reduce__(self) -> tuple[object, ...]:
        return self._reduced(self._strict, self._former, self.hooks)

    @staticmethod
    def in_text(text: nn.Module) -> TextForward | None:
        """Return ours of a text model; None for a model without."""
        forward = vars(text).get(_place_of(text))
        return forward if isinstance(forward, TextForward) else None

    @staticmethod
    def former_of(text: Model) -> object:
        """Return what stands in the place of a text model's forward, or stood there before ours."""
        ours = TextForward.in_text(text)
        return vars(text).get("forward") if ours is None else ours._former

    def put_on(self, text: nn.Module) -> None:
        """Let the calls of a text model, or of a copy of it, reach this forward."""
        vars(text)[_place_of(text)] = self

    def take_off(self, text: nn.Module) -> None:
        """Leave a text model, or a copy of it, as it was before."""
        place = _place_of(text)
        if place == "forward" and self._former is None:
            del vars(text)["forward"]
        else:  # a hook of accelerate calls what it found there
            vars(text)[place] = self._former or type(text).forward.__get__(text)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stock forward returns.

        Raises:
            FallbackError: Our layers cannot run a call without gradients and without a cache, under `strict`.
        """
        copied = kwargs.pop(_CALLED_ON, None)
        if copied is not None:
            self.stock_reasons["a shallow copy"] += 1
            return type(copied).forward(copied, *args, **kwargs)
        text = self.__self__
        kind: Any = type(text)
        stock = kind.forward
        if torch.compiler.is_compiling() or reasons_untraceable():
            return stock(text, *args, **kwargs)
        try:
            arguments = dict(zip(_parameters_of(kind), args, strict=False)) | kwargs
            output = self._output(text, {name: x for name, x in arguments.items() if x is not None})
        except UnservedError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            reason = "memory ran out"
        else:
            self.calls += 1
            return output
        self.stock_reasons[reason] += 1
        if self._strict and reason not in (GRADIENTS, HAS_CACHE):
            raise_if_any([reason], "the language model")
        return stock(text, *args, **kwargs)

    def _output(self, text: Model, arguments: Arguments) -> Any:
        """Return the output of our layers; `UnservedError` with the reason if stock's have to run."""
        call = TextCall(text, arguments)
        reading = read_text(text)
        call.embed()  # after a hook on the embedding was refused, which stock's call runs
        key = reading.key, call.kind
        proof = self._proofs.get(key)
        if isinstance(proof, str):
            raise UnservedError(proof)
        if proof is None:
            refuse_unpacked(reading)
        try:
            states = call.run(reading)
            output_class = proof or call.prove(states)
        except (UnservedError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a kernel or a quantised module raises, stock goes on
            remember(self._proofs, key, one_line(error))
            raise UnservedError(one_line(error)) from error
        if proof is None:
            remember(self._proofs, key, output_class)
        output = output_class(last_hidden_state=states[-1])
        if call.keeps_states:
            output["hidden_states"] = tuple(states)
        return output if call.returns_dict else output.to_tuple()

    def __str__(self) -> str:
        text = f"{self.calls} call{'s' * (self.calls != 1)} without padding"
        counts = "; ".join(f"{count} x {why}" for why, count in self.stock_reasons.items())
        return text + (f", {self.stock_reasons.total()} by stock ({counts})" if counts else "")


def _place_of(text: nn.Module) -> str:
    """Return the attribute that holds a text model's forward: a hook of accelerate moves it, and calls it there."""
    return "_old_forward" if "_old_forward" in vars(text) else "forward"


def _name_shallow_copy(module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments] | None:
    """Add a shallow copy to the arguments of its call, which stock's layers run; a forward pre-hook of text models.

    It holds the forward of the original, which cannot see the instance that it is called on: a hook can. `copy.copy`
    makes such copies, and `nn.DataParallel` its replicas.
    """
    forward = vars(module).get("forward")
    if torch.compiler.is_compiling() or not isinstance(forward, TextForward) or forward._module() is module:
        return None
    return args, {**kwargs, _CALLED_ON: module}


@lru_cache(maxsize=64)
def _parameters_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a class's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class TextCall:
    """One call of a text model; `UnservedError` if it asks for more than hidden states.

    Attributes:
        keeps_states: Whether the hidden states of all layers are returned.
        returns_dict: Whether the output is an object, no tuple.
        kind: What calls share that one proof holds for.
    """

    def __init__(self, text: Model, arguments: Arguments) -> None:
        self._text = text
        self._arguments = arguments
        options = {name: arguments.get(name, getattr(text.config, name, None)) for name in _OPTIONS}
        unknown = [name for name in arguments if name not in (*_TENSORS, *_OPTIONS)]
        unknown += [name for name, x in options.items() if x is not None and all(x is not y for y in _OPTIONS[name])]
        refuse(
            {
                GRADIENTS: torch.is_grad_enabled(),
                HAS_CACHE: not {"use_cache", CACHE}.isdisjoint(unknown),
                f"the argument {', '.join(unknown)}": unknown,
                "input_ids and inputs_embeds": ("input_ids" in arguments) == ("inputs_embeds" in arguments),
            }
        )
        self.keeps_states = options["output_hidden_states"] is True
        self.returns_dict = options["return_dict"] is not False

    def embed(self) -> None:
        """Embed the tokens; `UnservedError` if tensors of the call do not fit them."""
        arguments = self._arguments
        embeds_BCE: Tensor | None = arguments.get("inputs_embeds")
        self._embeds_BCE = self._text.embed_tokens(arguments["input_ids"]) if embeds_BCE is None else embeds_BCE
        self.kind: Hashable = frozenset(arguments), self.keeps_states, self._embeds_BCE.dtype, self._embeds_BCE.device
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Raise `UnservedError` for tensors that mean other rows than those of tokens and padding."""
        shape = self._embeds_BCE.shape[:2]
        for name in ("attention_mask", "visual_pos_masks"):
            mask = self._arguments.get(name)
            refuse({f"{name} of a shape of its own": mask is not None and getattr(mask, "shape", None) != shape})
        positions = self._arguments.get("position_ids", self._embeds_BCE)
        is_of_pictures = positions.dim() == 3 and len(positions) == 3
        is_packed = "position_ids" in self._arguments and "attention_mask" not in self._arguments and not is_of_pictures
        refuse({"positions without a mask, which may be of packed rows": is_packed})
        tensors = [x for x in self._arguments.values() if isinstance(x, Tensor)]
        refuse({"several devices": any(x.device != self._text.embed_tokens.weight.device for x in tensors)})

    def run(self, reading: TextReading) -> list[Tensor]:
        """Return the last hidden states (B, C, E); before them those of all layers, if they are kept."""
        shape = self._embeds_BCE.shape[:2]
        device = self._embeds_BCE.device
        mask_BC = self._arguments.get("attention_mask")
        self._rows = PackedRows(torch.ones(shape, device=device) if mask_BC is None else mask_BC)
        states_1TE: list[Tensor] = []
        hidden_1TE = self._rows.run(
            reading,
            self._embeds_BCE,
            self._arguments.get("position_ids", torch.arange(shape[1], device=device)[None]),
            (self._arguments.get("visual_pos_masks"), self._arguments.get("deepstack_visual_embeds")),
            keep=states_1TE.append if self.keeps_states else lambda hidden_1TE: None,
        )
        last_BCE = self._rows.unpacked(norm(self._text.norm, hidden_1TE))
        if not self.keeps_states:
            return [last_BCE]
        states_1TE = states_1TE[: len(self._text.layers) - 1]
        return [self._embeds_BCE, *map(self._rows.unpacked, states_1TE), last_BCE]

    def prove(self, states: list[Tensor]) -> type[Any]:
        """Compare with stock's layers on two rows; ArithmeticError if tokens differ by more than rounding.

        Returns:
            The class of stock's output.
        """
        is_token_BC = self._rows.is_token_GC
        is_picture_BC = self._arguments.get("visual_pos_masks", is_token_BC)
        rows_G = torch.stack([mask_BC.sum(1).argmax() for mask_BC in (is_token_BC, is_picture_BC)]).unique()
        options = {"use_cache": False, "return_dict": True, "output_hidden_states": self.keeps_states}
        output = type(self._text).forward(self._text, **self._inputs_of(rows_G) | options)
        expected = output.hidden_states if self.keeps_states else [output.last_hidden_state]
        for of_ours, of_stock in zip(states, expected, strict=True):
            for ours_CE, stock_CE, is_token_C in zip(of_ours[rows_G], of_stock, is_token_BC[rows_G], strict=True):
                check_equal(ours_CE[is_token_C], stock_CE[is_token_C], "hidden states differ")
        return type(output)

    def _inputs_of(self, rows_G: Tensor) -> Arguments:
        """Return stock's inputs of some rows, in ascending order."""
        inputs = dict(self._arguments)
        for name in _PER_COLUMN:
            if name in inputs:
                inputs[name] = inputs[name][rows_G]
        positions = inputs.get("position_ids")
        if positions is not None and positions.shape[-2] > 1:
            inputs["position_ids"] = positions.index_select(-2, rows_G)
        if "deepstack_visual_embeds" in inputs:
            rows_V = self._arguments["visual_pos_masks"].nonzero()[:, 0]
            is_in_V = torch.isin(rows_V, rows_G)
            inputs["deepstack_visual_embeds"] = [of_layer[is_in_V] for of_layer in inputs["deepstack_visual_embeds"]]
        return inputs


def forwards_for(model: nn.Module, strict: bool) -> dict[str, TextForward]:
    """Return new forwards for the declared text models in a model, by their paths.

    Raises:
        ValueError: If it has none, or one with a forward of its own.
    """
    texts = declared_texts(model)
    if not texts:
        raise ValueError(
            f"text=True needs a declared language model, but {type(model).__name__} has none. Leave it out."
        )
    for text in texts.values():
        if has_other_forward(text):
            raise ValueError(f"text=True needs transformers' forward, but {type(text).__name__} has one of its own")
    forwards = {path: TextForward(text, strict, TextForward.former_of(text)) for path, text in texts.items()}
    for path, forward in forwards.items():
        hook = texts[path].register_forward_pre_hook(_name_shallow_copy, prepend=True, with_kwargs=True)
        forward.hooks = OurHooks(hook)
    return forwards
