"""The model as transformers' decoding loop sees it: prompts in groups, then steps, whose rows leave and begin."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_vit_accel.decoding.leaving import WORTH_A_CAPTURE, RowsInStep, places_without_ended, sizes_of_smaller
from hf_vit_accel.decoding.packed import CACHE, Arguments, PackedPrompt
from hf_vit_accel.decoding.prefill import GroupedPrompt
from hf_vit_accel.decoding.room import (
    Room,
    Size,
    bytes_of_room,
    is_linear,
    make_room,
    on_device,
    plan_axis,
    room_of,
    slots_after,
    unshare,
)
from hf_vit_accel.decoding.step import DecodeStep, inputs_of_rows, key_of_inputs, key_of_positions, tensors_of_rows
from hf_vit_accel.decoding.steps import FEWEST, DecodeSteps
from hf_vit_accel.decoding.text_models import TextReading, UnservedError, has_hooks_around, read_model, refuse, remember
from hf_vit_accel.decoding.waiting import CannotWaitError, WaitingRows
from hf_vit_accel.graphs.memory import capture_of_ours
from hf_vit_accel.machine import one_line

NOT_PACKED = "a prompt that did not run in our layers"
_PROVEN_ROWS = 8
"""Rows of a new step that stock computes, too: its step copies keys and values of all its rows several times."""


class ModelInLoop:
    """The model as transformers' `_sample` sees it. Attributes that this class lacks are the model's own.

    For every token after the prompt `_sample` calls `prepare_inputs_for_generation`, then this object with the result.
    """

    def __init__(
        self,
        model: Any,
        steps: DecodeSteps,
        max_length: int,
        columns: int,
        features: Mapping[str, Any] | None,
        rows: RowsInStep,
        waiting: WaitingRows | None = None,
    ) -> None:
        self._model = model
        self._steps = steps
        self._rows = rows
        self._waiting = waiting
        self._has_new_rows = False  # which the step does not know yet
        self._largest: DecodeStep | None = None  # in whose room a smaller one runs
        self._max_length = max_length
        self._due = max_length - columns - 1  # after the first token
        self._features = features
        self._why_encoded_again = [NOT_PACKED] if features else []
        self._room: Room | None = None  # a new one that holds the prompt
        self._reading: TextReading | None = None  # since the prompt
        self._key: Hashable = None
        self._step: DecodeStep | None = None
        self._reason: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **arguments: Any) -> Arguments:
        """Pass on the arguments. `__call__` computes stock's inputs where it needs them."""
        return {"input_ids": input_ids, "arguments": arguments}

    def has_next_step(self) -> bool:
        """Return whether the next forward of one token is a replay, or one without code of the user's."""
        return self._step is not None and self._step.length < self._step.room.columns

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: Arguments,
        is_first_iteration: bool = True,
    ) -> Any:
        """Return the output of the prompt's forward, in groups of rows where that pays.

        Groups leave zeros where stock leaves the keys of padding. So a cache that the call returns is stock's.
        """
        is_new = model_kwargs[CACHE].get_seq_length() == 0 and model_kwargs.get("inputs_embeds") is None
        is_whole = generation_config.prefill_chunk_size is None and not generation_config.return_dict_in_generate
        if is_first_iteration and is_new and is_whole:
            columns = input_ids.shape[1]
            inputs = self._model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=columns, is_first_iteration=True, **model_kwargs
            )
            prompt = GroupedPrompt(self._model, inputs, self._features)
            if prompt.groups and not has_hooks_around(self._model):
                packed: PackedPrompt | None = None
                with self._giving_up():
                    with self._model._optimize_model_for_decode():  # which gives steps other experts than the prompt
                        self._reading = read_model(self._model)
                    self._key = self._reading.key
                    packed = self._packed(prompt, self._reading, columns)
                if packed is None or self._key in self._steps.refusals:
                    self._refuse_to_wait("a prompt or a step that is not ours")
                if self._reason is None and (packed is not None or len(prompt.groups) > 1):
                    if len(prompt.groups) > 1:
                        self._steps.groups += len(prompt.groups)
                    if packed is not None:
                        self._why_encoded_again = prompt.why_encoded_again()
                    return prompt.run(self._room_for, packed)
            return self._model(**inputs, return_dict=True)
        return self._model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration)

    def _packed(self, prompt: GroupedPrompt, reading: TextReading, columns: int) -> PackedPrompt | None:
        """Return what runs the groups without padding; None where stock's text model runs them, with the reason."""
        reasons = self._steps.padded_reasons
        key = reading.key, prompt.names()  # a prompt of text says nothing of one with pictures
        if reasons.get(key) or not prompt.may_be_packed():
            return None
        try:
            packed = PackedPrompt(self._model, reading, columns)
            if key in reasons:
                return packed
            prompt.prove(packed)
            why = ""
        except UnservedError as error:
            why = str(error)
        except torch.OutOfMemoryError:
            return None
        except Exception as error:  # whatever a kernel or a quantised module raises, stock goes on
            why = one_line(error)
        remember(reasons, key, why)
        return None if why else packed

    def __call__(self, input_ids: Tensor, arguments: Arguments, return_dict: bool) -> Any:
        """Return the output of a forward of one token: of the step, or of stock where there is none."""
        ids_B1 = input_ids[:, -1:]
        cache = arguments[CACHE]
        step = self._step
        if step is not None and self._has_new_rows:
            inputs = self._rows.inputs_of_step(self._model.prepare_inputs_for_generation(input_ids, **arguments))
            step.load(inputs, cache, input_ids.shape[1] - 1)
            self._has_new_rows = False
        if step is not None and (step.length == step.room.columns or not step.reading.switches.unchanged()):
            step.store(cache)
            self._step = None
        if self._step is not None and not self._rows_wait:
            self._let_rows_leave(self._step, input_ids, arguments)
        ids_N1 = self._rows.ids_of_step(ids_B1)
        if self._step is None or not self._step.is_proven:
            inputs = self._rows.inputs_of_step(self._model.prepare_inputs_for_generation(input_ids, **arguments))
            if self._step is None and self._reason is None:
                with self._giving_up():
                    self._load(inputs, cache, self._max_length - input_ids.shape[1])
            if self._step is not None and not self._step.is_proven:
                with self._giving_up():  # code of others runs in a capture, such as kernels of quantised modules
                    return self._output(self._prove(self._step, inputs), cache)
            if self._step is None:
                self._refuse_to_wait(self._reason or "the model changed within a call")
                unshare(cache, len(ids_N1))
                output = self._model(**inputs, return_dict=True)
                return self._output(output.logits[:, -1:], cache) if self._rows.some_left else output
        logits_N1V = self._step(ids_N1)
        if self._waiting is not None and self._rows_wait:
            self._let_rows_begin(self._waiting, self._step, input_ids, arguments, logits_N1V)
        return self._output(logits_N1V, cache)

    @property
    def _rows_wait(self) -> bool:
        return self._waiting is not None and len(self._waiting) > 0

    def _refuse_to_wait(self, reason: str) -> None:
        """Raise `CannotWaitError` in a call of which rows wait, or have waited."""
        if self._waiting is not None:
            raise CannotWaitError(reason, self._waiting.places)

    def _let_rows_begin(
        self, waiting: WaitingRows, step: DecodeStep, input_ids: Tensor, arguments: Arguments, logits_N1V: Tensor
    ) -> None:
        """Let rows that wait begin where others have ended. Their prompts give the logits of these places."""
        columns = input_ids.shape[1]
        place_of_row = waiting.take_places(self._rows.go_on(), columns)
        if not place_of_row:
            return
        rows, places = [*place_of_row], [*place_of_row.values()]
        of_rows = waiting.arguments_of(rows)
        of_rows["next_sequence_length"] = of_rows["input_ids"].shape[1]
        inputs = self._model.prepare_inputs_for_generation(**of_rows, is_first_iteration=True)
        prompt = GroupedPrompt(self._model, inputs, waiting.features_of(rows))
        try:
            self._refuse_changes(step)
            packed = self._packed(prompt, step.reading, columns) if prompt.groups else None
            refuse({"a prompt that is not ours": packed is None})
            step.room.begin_rows(places, prompt.lengths_B, columns)
            logits = prompt.run(lambda *_: step.room, packed, places).logits
            assert logits is not None
        except UnservedError as error:
            raise CannotWaitError(str(error), waiting.places) from error
        logits_N1V.index_copy_(0, on_device(places, logits_N1V.device), logits)
        for name in ("attention_mask", "position_ids"):  # the loop's own tensors, to which it appends
            of_loop = arguments[name]
            places_N = on_device(places, of_loop.device)
            of_places = torch.zeros_like(of_loop.index_select(-2, places_N))
            of_places[..., -prompt.columns :] = of_rows[name]
            of_loop.index_copy_(-2, places_N, of_places)
        self._begin_overdue_rows_anew(step, arguments, columns)
        self._steps.groups += len(prompt.groups)
        self._steps.rows_waited += len(rows)
        self._max_length = columns + waiting.due
        step.room.columns = columns + waiting.due + 1
        self._has_new_rows = True

    def _output(self, logits_N1V: Tensor, cache: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self._rows.logits_of_call(logits_N1V), **{CACHE: cache})

    def _begin_overdue_rows_anew(self, step: DecodeStep, arguments: Arguments, columns: int) -> None:
        """Let rows that ended long ago, and have no more slots, see one token alone from now on.

        Args:
            columns: In the cache.
        """
        if self._waiting is None:
            return
        place_of_row = self._rows.place_of()
        rows = [row for row in self._waiting.take_overdue(columns) if row in place_of_row]
        if rows:
            step.room.begin_rows([place_of_row[row] for row in rows], [1] * len(rows), columns)
            mask_NC = arguments["attention_mask"]
            mask_NC[on_device(rows, mask_NC.device), : columns - 1] = 0

    def _let_rows_leave(self, step: DecodeStep, input_ids: Tensor, arguments: Arguments) -> None:
        """Go on with a step of fewer rows where a quarter of them have ended, if it is captured or worth it."""
        go_on = self._rows.go_on()
        due = self._max_length - input_ids.shape[1]
        has_room = step.room.columns - step.length >= 2  # a capture writes two tokens
        if not any(go_on) or due < FEWEST or not has_room or any(map(is_linear, step.layers)):
            return
        size = self._smaller_size(self._largest or step, sizes_of_smaller(sum(go_on), len(go_on)), due)
        if size is not None:
            self._begin_overdue_rows_anew(step, arguments, step.length)  # tensors of the loop's own inference mode
            with self._giving_up(), torch.inference_mode(False), torch.no_grad(), capture_of_ours():
                self._take_smaller_step(step, places_without_ended(go_on, size), input_ids, arguments)

    def _smaller_size(self, largest: DecodeStep, sizes: Sequence[int], due: int) -> int | None:
        """Return the smallest size whose step is captured, or worth it by all that ran in vain and may yet do so."""
        if sizes:
            largest.rows_in_vain += len(self._rows) - sizes[0]
        for size in sizes:
            may_run_in_vain = (len(self._rows) - size) * due
            if size in largest.smaller or largest.rows_in_vain + may_run_in_vain >= WORTH_A_CAPTURE:
                return size
        return None

    def _take_smaller_step(self, step: DecodeStep, places: list[int], input_ids: Tensor, arguments: Arguments) -> None:
        """Replace a step by one of the rows at some of its places. All rows stay where memory runs out."""
        cache = arguments[CACHE]
        step.store(cache)
        largest = self._largest or step
        inputs = self._model.prepare_inputs_for_generation(input_ids, **arguments)
        try:
            smaller = largest.smaller.get(len(places))
            if smaller is None:
                inputs_of_places = tensors_of_rows(self._rows.inputs_of_step(inputs), places)
                smaller = self._capture_smaller(largest, step, inputs_of_places)
            smaller.room.take_rows(places, step.room, step.length)
        except torch.OutOfMemoryError:  # the present step has lost nothing of rows that go on
            self._rows.stay()
            return
        smaller.reading = step.reading
        self._steps.rows_left += len(self._rows) - len(places)
        self._rows.leave(places, step.device)
        smaller.room.give_to(cache, step.length)
        smaller.load(self._rows.inputs_of_step(inputs), cache, step.length)
        self._step, self._largest = smaller, largest

    def _capture_smaller(self, largest: DecodeStep, step: DecodeStep, inputs: Arguments) -> DecodeStep:
        """Capture a step of fewer rows; `UnservedError` if the model changed since the present one was loaded."""
        self._refuse_changes(step)
        room = largest.room.first_rows(len(inputs["input_ids"]))
        smaller = DecodeStep(largest.key, step.reading, inputs, room, step.length)
        self._steps.capture(smaller)
        largest.rows_in_vain = 0
        return smaller

    def _refuse_changes(self, step: DecodeStep) -> None:
        """Raise `UnservedError` if the model changed since a step was loaded."""
        refuse({"the model changed within a call": read_model(self._model).key != step.reading.key})

    def _prove(self, step: DecodeStep, inputs: Arguments) -> Tensor:
        """Return the logits of a new step, and keep it if stock computes those of some rows alike."""
        ids_B1 = inputs["input_ids"]
        rows = sorted({len(ids_B1) * number // _PROVEN_ROWS for number in range(_PROVEN_ROWS - 1)} | {len(ids_B1) - 1})
        expected = self._model(**inputs_of_rows(inputs, rows), return_dict=True).logits[:, -1:]
        logits_B1V = step.prove(ids_B1, expected, rows)
        step.is_proven = True
        if self._largest is None:
            self._steps.kept[step.key] = step
        else:
            self._largest.smaller[len(ids_B1)] = step
        return logits_B1V

    def _room_for(self, inputs: Arguments, layers: Sequence[Any], lengths: Sequence[int] | None) -> Room:
        """Return room for the prompt: of the step that this call will take, or new room.

        Args:
            inputs: Stock's inputs of the prompt.
            layers: Of a cache of some rows.
            lengths: The columns of every row from its first token on, if rows may share an axis.
        """
        rows, columns = inputs["input_ids"].shape
        slots = slots_after(columns, self._due)
        may_step = self._key not in self._steps.refusals
        plan = None
        if may_step and lengths is not None:
            plan = plan_axis(lengths, columns, self._due, slots if self._waiting is None else None)
        size = Size(rows, slots, slots) if plan is None else plan.size
        step = self._steps.find(self._key, key_of_positions(inputs["position_ids"], rows), size)
        room = None if step is None else step.room
        if room is None:
            if plan is None and not (may_step and self._due >= FEWEST):
                size = Size(rows, columns, columns)
            self._room = room = self._new_room(layers, size)
        else:
            torch._foreach_zero_([states for layer in room.layers for states in (layer.keys, layer.values)])
        if plan is not None:
            room.share(plan, self._model.device)
        return room

    def _new_room(self, layers: Sequence[Any], size: Size) -> Room:
        """Return new room. Earlier steps leave where memory is short."""
        with torch.inference_mode(False), capture_of_ours():
            self._steps.make_space(bytes_of_room(layers, size), self._model.device)
            return make_room(layers, size)

    def _load(self, inputs: Arguments, cache: Any, due: int) -> None:
        """Load a step with room for some of the `due` tokens; `UnservedError` if this call alone gets none."""
        reading = self._reading
        if reading is None or not reading.switches.unchanged():
            reading = read_model(self._model)
        self._key = reading.key
        if self._key in self._steps.refusals:
            raise UnservedError(self._steps.refusals[self._key])
        length = int(cache.get_seq_length())
        rows = len(inputs["input_ids"])
        slots = slots_after(length, due)
        size = Size(rows, slots, slots)
        key_of_call = key_of_inputs(inputs, length)
        room = room_of(cache)  # None unless rows share an axis
        step = self._steps.find(self._key, key_of_call, size if room is None else room.size)
        if step is not None and room is not None and step.room is not room:
            step = None
        if step is None and room is None and due < FEWEST:
            raise UnservedError(f"fewer than {FEWEST} tokens to come, and no step captured")
        if step is None and reading is self._reading:  # a capture holds the model as it is now, since the prompt or not
            reading = read_model(self._model)
            self._key = reading.key
        self._largest = None
        # Buffers of inference mode could not be written later. Stock goes on if memory runs out: no graph is dropped.
        with torch.inference_mode(False), torch.no_grad(), capture_of_ours():
            if step is None:
                new_room = self._room
                if new_room is None or (new_room is not room and new_room.size != size):
                    unshare(cache, rows)
                    new_room = self._new_room(cache.layers, size)
                step = DecodeStep((self._key, key_of_call, new_room.size), reading, inputs, new_room, length)
                self._steps.capture(step)
            else:
                self._steps.kept.move_to_end(step.key)
            step.reading = reading
            step.load(inputs, cache, length)
        self._step = step
        self._room = None

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Let stock go on after an error, and remember one that every call of this model would meet."""
        try:
            yield
        except UnservedError as error:
            self._reason = str(error)
        except torch.OutOfMemoryError:
            self._reason = "memory ran out"
        except Exception as error:  # whatever a kernel or a quantised module raises, stock goes on
            self._reason = one_line(error)
            remember(self._steps.refusals, self._key, self._reason)
        if self._reason is not None:
            self._step = None

    def finish(self, output: Any) -> Any:
        """Count a call that ended, and return its output, whose cache is as stock would have left it."""
        if self._reason is not None:
            self._steps.stock_reasons[self._reason] += 1
        elif self._due < 1:
            self._steps.prompts += 1
        else:
            self._steps.decoded += 1
        self._steps.encoded_again.update(self._why_encoded_again)
        if self._step is not None and not isinstance(output, Tensor):
            self._step.store(output[CACHE], is_kept=True)
        return output
