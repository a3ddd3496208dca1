"""Sixty faults, a few lines each, that a rebuild could bring in unseen; `run.py` seeds one at a time.

Each names its kind, the place, and the tests that should catch it. A rebuilt part gets the same kinds anew.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault of a few lines.

    Attributes:
        kind: What goes wrong.
        path: The file, as seen from the package's folder.
        before: Text that stands there once.
        after: Text that takes its place.
        tests: Arguments of pytest: where the fault should be caught.
    """

    kind: str
    path: str
    before: str
    after: str
    tests: str


LAYOUT = "tests/unit/test_layout.py"
FAMILIES = "tests/unit/test_families.py"
TOWER = "tests/unit/test_tower.py"
KERNELS = "tests/unit/test_kernels.py tests/unit/test_interpreted.py"
BACKWARD = "tests/unit/test_backward.py tests/unit/test_interpreted.py"
OPS = "tests/unit/test_ops.py"
GRAPHS = f"tests/unit/test_graphs.py tests/unit/test_graph_machine.py {FAMILIES}"
AUTO = "tests/unit/test_auto_graphs.py tests/unit/test_graph_machine.py"
STEPS = "tests/unit/test_training_graphs.py tests/unit/test_graph_machine.py"
PASSES = "tests/unit/test_passes.py"
REUSE = "tests/unit/test_reuse.py"
RANKS = "tests/unit/test_data_parallel.py tests/unit/test_ranks.py"
CHANGES = (
    "tests/integration/test_changes.py tests/unit/test_checks.py tests/integration/test_replaced.py "
    "tests/integration/test_structures.py"
)
PROOF = "tests/unit/test_proof.py tests/unit/test_newer_transformers.py"
LIKE = "tests/integration/test_like.py"
LORA = "tests/unit/test_adapter.py"
STATUS = "tests/unit/test_status.py"
SCRIPTS = "tests/examples/test_scripts.py"
FAULTS_OF_PARTS = "tests/integration/test_faults.py tests/integration/test_faults_of_backends.py"

_BY_PLACE: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("layout.py", LAYOUT): {
        "an offset of clips is that of frames": (
            "t_F * h_F * w_F if geometry.clips else np.repeat(h_F * w_F, t_F)",
            "np.repeat(h_F * w_F, t_F)",
        ),
        "windows of a frame are counted by the height alone": (
            "row // side * -(-w // side) + column // side",
            "row // side * -(-h // side) + column // side",
        ),
        "the inverse order is the order": (
            "inverse_index_M[window_index_M] = np.arange(len(window_index_M))",
            "inverse_index_M[:] = window_index_M",
        ),
        "positions lie in row-major order": (
            "blocks = positions.reshape(h // merge, merge, w // merge, merge, 2).swapaxes(1, 2)",
            "blocks = positions",
        ),
        "weights of the table's other axis": (
            "weights_TK = (weights[0][:, :, None] * weights[1][:, None, :])",
            "weights_TK = (weights[1][:, :, None] * weights[0][:, None, :])",
        ),
        "arrays overlap when they are packed": (
            "total += -(-array.nbytes // _ALIGN) * _ALIGN",
            "total += array.nbytes // _ALIGN * _ALIGN",
        ),
    },
    ("engine/encoder.py", FAMILIES): {
        "features stay in the order of windows": (
            'outputs[-1] = outputs[-1][tensors["inverse_index"]]',
            'outputs[-1] = outputs[-1][tensors["window_index"]]',
        ),
        "positions are not reordered with the rows": (
            "positions_T2 = positions_T2.unflatten(0, merges)[window_index_M].flatten(0, 1)",
            "pass",
        ),
        "the residual is kept beside deepstack, and added twice": (
            "            del merged\n            delta_TE = None\n",
            "            del merged\n",
        ),
    },
    ("engine/encoder.py", "tests/integration/test_checkpoint_functions.py"): {
        "a merger under a checkpoint wrapper keeps what its gradient needs": (
            "finish = ops.finish_by(_checkpointed(ops.merge, merger_checkpoint))",
            "finish = ops.finish",
        ),
    },
    ("engine/route.py", TOWER): {
        "a layout is found by the number of its rows": (
            "self.cache.get(RouteKey(grid, spec, stream, replay, budget), make",
            "self.cache.get((sum(t * h * w for t, h, w in grid), spec, stream, replay, budget), make",
        ),
    },
    ("engine/route.py", GRAPHS): {
        "a graph is found by the number of its rows": (
            "return self.metadata.rows, arrays, plans",
            "return self.metadata.rows",
        ),
    },
    ("tower/stock_way.py", "tests/unit/test_attention_only.py"): {
        "segments of an attention-only tower are those of its first layout": (
            "route = state.routes.get(grid, state.attention_spec(",
            "route = state.last_route or state.routes.get(grid, state.attention_spec(",
        ),
    },
    ("tower/attention.py", "tests/integration/test_faults_of_backends.py"): {
        "offsets of the caller keep the plans of a backend that failed": (
            "settings.score_mod, tuple(faults)",
            "settings.score_mod",
        ),
    },
    ("tower/attention.py", "tests/integration/test_wrapping.py -k change_in_place"): {
        "offsets of inference mode keep their first plans": (" or (version is None and route is None)", ""),
        "offsets that the caller writes to keep their first plans": (
            "key = version, rows, route, settings",
            "key = rows, route, settings",
        ),
    },
    ("tower/stock_way.py", "tests/unit/test_checks.py -k twice"): {
        "a decision counts a hit of the layouts": (
            "settings = state.settings\n    # A copy's forward may take no metadata.",
            "settings = state.settings\n    state.routes.hits += 1\n    # A copy's forward may take no metadata.",
        ),
    },
    ("tower/state.py", "tests/unit/test_attention_only.py"): {
        "an attention-only tower keeps the windows of its first call": (
            "spec is None or spec.geometry != geometry or",
            "spec is None or",
        ),
    },
    ("families/interface.py", "tests/integration/test_fuzz.py"): {
        "pixels of another grid are taken": ("if rows != pixels.shape[0]:", "if rows < 0:"),
    },
    ("families/interface.py", TOWER): {
        "frames that pad a batch count as images": (
            "if t or h < 0 or w < 0 or (h * w and (h % merge or w % merge))])",
            "])",
        ),
        "padding without patches is to be merged": ("(h * w and (h % merge or w % merge))", "h % merge or w % merge"),
    },
    ("graphs/runner.py", GRAPHS): {
        "arrays of the layout are not copied before a replay": ("self.packed.copy_(route.packed)", "pass"),
        "arrays of another layout of the same spec are not copied": (
            "if self.packed_route is not route:",
            "if self.packed_route.spec is not route.spec:",
        ),
        "outputs are those of the graph of a layout, not copies": (
            "return [output.clone() for output in graph.outputs]",
            "return list(graph.outputs)",
        ),
        "pixels of the last call stay behind those of this one": ("graph.pixels_TP[rows:].zero_()", "pass"),
        "outputs are those of the graph, not copies": ("results.append(fresh.clone())", "results.append(fresh)"),
    },
    ("graphs/budgets.py", GRAPHS): {
        "padding rows join the last image": (
            "    if parts:\n        shares",
            "    lengths_S[segments.count - 1] += spare_rows\n    if False:\n        shares",
        ),
        "the last tokens of a padded layout are not permuted": (
            "of_tokens[name][len(array) :] = np.arange(len(array), tokens)",
            "of_tokens[name][len(array) - 4 :] = np.arange(len(array) - 4, tokens)",
        ),
    },
    ("graphs/store.py", "tests/integration/test_changes.py"): {
        "weights that moved do not make graphs stale": (
            "or self._identities[-1] != identity:",
            "or self._identities[-1]._replace(memory=identity.memory) != identity:",
        ),
    },
    ("graphs/store.py", "tests/unit/test_hidden_states.py"): {
        "a graph without hidden states replays a call that requests them": (
            "            identity = Identity(\n                spec, plan.hidden_states,",
            "            identity = Identity(\n                spec, False,",
        ),
        "a step with hidden states is replayed from a graph without": (
            "if plan.hidden_states and plan.spec.request.grad:",
            "if False:",
        ),
    },
    ("graphs/store.py", STEPS): {
        "trained tensors do not make graphs stale": (
            "or self._identities[-1] != identity:",
            "or self._identities[-1]._replace(requires_grad=identity.requires_grad) != identity:",
        ),
    },
    ("graphs/store.py", AUTO): {
        "graphs take all the memory that is free": (
            "return NO_ROOM if self.nbytes >= most_bytes else None",
            "return None",
        ),
        "a failed capture leaves the recorder in use": (
            "isinstance(error, Fault) else ())\n        finally:\n            recorder.done()",
            "isinstance(error, Fault) else ())\n        else:\n            recorder.done()",
        ),
    },
    ("graphs/training.py", STEPS): {
        "a second call overwrites the activations of the first": (
            "if last is not None and not last.is_over:",
            "if False:",
        ),
        "gradients of an overwritten call come from the graph": (
            "is_overwritten = was_over or self._last is None or self._last() is not call",
            "is_overwritten = False",
        ),
    },
    ("graphs/step.py", STEPS): {
        "gradients of the graph are not copied": (
            "copies = [torch.empty_like(gradient) for gradient in self.gradients]\n"
            "        if copies:\n            torch._foreach_copy_(copies, self.gradients)",
            "copies = list(self.gradients)",
        ),
        "a shared parameter keeps the gradient of one stage": (
            "gradient if earlier is None else earlier.add_(gradient)",
            "gradient",
        ),
    },
    ("graphs/policy.py", AUTO): {
        "captures need not be paid for": ("if self.credit < captures * _CAPTURE:", "if False:"),
    },
    ("graphs/memory.py", AUTO): {
        "graphs stay when memory runs out": (
            'store.give_up("device memory ran out after graphs were captured")',
            "True",
        ),
    },
    ("options/passes.py", PASSES): {
        "a pass begins a frame late": (
            "            room = max_rows\n",
            "            room = max_rows\n            if len(passes) > 2:\n                continue\n",
        ),
        "an output of a pass is written to the rows of another": (
            "[output[start * len(output) // total :",
            "[output[start:",
        ),
    },
    ("options/split.py", PASSES): {
        "the last frames of long videos are in no pass": ("for frame in range(t)]", "for frame in range(min(t, 4))]"),
    },
    ("engine/recorded.py", PASSES + " " + STEPS): {
        "a weight written before the backward goes unseen": (
            "return isinstance(self.value, Tensor) and version_of(self._counted) != self._version",
            "return False",
        ),
    },
    ("options/reuse.py", REUSE): {
        "pictures of equal checksums are equal": (
            "            if is_equal:\n                sources[index] = candidate",
            "            sources[index] = candidate",
        ),
        "features of earlier weights are used": ("identity = weights_sum, table.form,", "identity = table.form,"),
        "the gradient of a repeated picture is that of its last copy": (
            "return zeros.index_add(0, source_rows_T, grad.to(dtype)).to(grad.dtype), None, None",
            "return zeros.index_copy(0, source_rows_T, grad.to(dtype)).to(grad.dtype), None, None",
        ),
        "kept features are the caller's tensors": (
            "bits_TW, *clones = [tensor.clone() for tensor in tensors]",
            "bits_TW, *clones = tensors",
        ),
        "distinct pictures get the features of others": (
            "pieces = [pieces_of_call[index] for index in repeats.encoded]",
            "pieces = list(pieces_of_call[: len(repeats.encoded)])",
        ),
    },
    ("options/data_parallel.py", RANKS): {
        "gradients of one rank are scaled by the number of ranks": (
            "dweights[index] = total if ranks_reached or has_hooks else None",
            "dweights[index] = total / len(assignment.rows) if ranks_reached or has_hooks else None",
        ),
        "a rank takes the outputs of its neighbour": (
            "self._assignment.put_together([outputs_there[index] for outputs_there in by_rank], output)",
            "self._assignment.put_together([outputs_there[index] for outputs_there in by_rank[::-1]], output)",
        ),
        "gradients of a replayed share pass the sum over ranks": (
            "plan = replace(plan, parameters=tuple(alias_of.get(id(weight), weight) for weight in plan.parameters))",
            "pass",
        ),
    },
    ("options/data_parallel.py", "tests/unit/test_not_shared.py"): {
        "a rank that runs stock tells nobody": (
            'self._exchange(attempt, Report(grid=plan.inputs.grid, why_alone="; ".join(reasons)))',
            "pass",
        ),
        "hooks inside a shared call see a share of its rows": (
            "            if plan.why_whole is not None:",
            "            if False:",
        ),
    },
    ("ops/heads.py", KERNELS): {
        "values are normalised like keys": (
            "x = tl.where(kind == 2, x, tl.where(kind == 0, q, k)",
            "x = tl.where(kind == 3, x, tl.where(kind == 0, q, k)",
        ),
    },
    ("ops/training/norm_backward.py", BACKWARD): {
        "the norm of a LayerNorm's gradient keeps its mean": (
            "        y1 = y1 - level\n        y2 = y2 - level\n",
            "        pass\n",
        ),
        "the gradient of the sum is dropped": ("HAS_DSUM=dsum_TE is not None,", "HAS_DSUM=False,"),
    },
    ("ops/training/mlp.py", BACKWARD): {
        "the gradient of the gate lacks its second term": (
            "dx = gradient * (gate + x * slope)",
            "dx = gradient * gate",
        ),
    },
    ("ops/window_attention.py", BACKWARD): {
        "the last rows of a window attend to nothing of it": (
            'scores = tl.where((t < length)[None, :], scores * scale_log2, float("-inf"))',
            'scores = tl.where((t < length - 1)[None, :], scores * scale_log2, float("-inf"))',
        ),
        "rotated gradients are not rotated back": (
            "tl.store(dqkv + cell, (y1 * c + y2 * s).to(dtype), mask=inside)",
            "tl.store(dqkv + cell, y1.to(dtype), mask=inside)",
        ),
    },
    ("ops/base.py", LORA): {
        "a missing bias of a joined product is not made": (
            "return [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs]",
            "return [weight.new_ones(len(weight)) if bias is None else bias for weight, bias in pairs]",
        ),
    },
    ("ops/base.py", "tests/unit/test_fsdp.py"): {
        "weights are read once": (
            "        if not (cast and self.casts_weights):\n            return read",
            "        if not (cast and self.casts_weights):\n"
            "            values = read()\n            return lambda: values",
        ),
    },
    ("watch.py", CHANGES): {
        "a changed attribute of a module goes unseen": (
            "attribute_reads = [(_ATTRIBUTE, itemgetter(*names), owners) for names, owners in owners_by_names.items()]",
            "attribute_reads = []",
        ),
    },
    ("watch.py", LIKE): {
        "a buffer of a copy that is written to goes unseen": (
            "return id(tensor), tensor, tensor.data_ptr(), version_of(tensor)",
            "return id(tensor), tensor, tensor.data_ptr(), None",
        ),
    },
    ("graphs/recorder.py", "tests/unit/test_graphs.py -k another_stream"): {
        "a replay on another stream does not wait for the last one": (
            "self._last_stream.wait_event(self._event)",
            "pass",
        ),
    },
    ("machine.py", "tests/unit/test_checks.py -k precision"): {
        "a setting of torch's precision goes unseen": ('settings._get_fp32_precision_getter("cuda", "conv"),', ""),
    },
    ("tower/snapshot.py", CHANGES): {
        "a changed attribute of the tower goes unseen": (
            'watch.add_attributes("the tower\'s attribute", weakref.ref(tower), names)',
            "pass",
        ),
        "a changed field of the config goes unseen": (
            'watch.add_attributes("the config\'s field", config_of, fields)',
            "pass",
        ),
        "an attribute that appears goes unseen": (
            'watch.add("the number of a module\'s attributes", len, self.attributes_inside)',
            "pass",
        ),
        "a replaced class of a module goes unseen": ('watch.add("the class of a module", type, self._modules)', "pass"),
    },
    ("tower/snapshot.py", "tests/unit/test_checks.py -k config"): {
        "a changed default of an option goes unseen": (
            "fields -= {",
            'fields -= {"return_dict", "output_hidden_states", ',
        ),
    },
    ("watch.py", "tests/integration/test_changes.py"): {
        "a transposed weight goes unseen": (
            "return is_same and [tensors[index].is_contiguous() for index in self._squares] == self._are_contiguous",
            "return is_same",
        ),
        "a weight in other memory goes unseen": (
            "return self is other or (isinstance(other, Memory) and",
            "return True or (isinstance(other, Memory) and",
        ),
    },
    ("watch.py", "tests/integration/test_changes.py -k decoded"): {
        "a weight of the text in other memory goes unseen": (
            "return tensor.data_ptr(), tensor.dtype",
            "return 0, tensor.dtype",
        ),
    },
    ("status.py", STATUS): {
        "status reads a changed tower in the place of the first call": (
            "state.read_by_status = Snapshot(tower, state.family)",
            "state.read_by_status = state.snapshot(tower)",
        ),
    },
    ("status.py", "tests/integration/test_like.py"): {
        "status takes its former reading of a copy that changed": (
            "if reading is not None and reading.watch.unchanged():",
            "if reading is not None:",
        ),
    },
    ("tower/stock_way.py", STATUS): {
        "status shows what an earlier call fused beside the reasons of a stock call": (
            "state.last_route = plan.route ",
            "state.last_route = plan.route or state.last_route ",
        ),
    },
    ("tower/forward.py", STATUS): {
        "a fast call keeps the reasons of a stock call before": ("state.why_stock = ()", "pass"),
    },
    ("ops/merger.py", OPS + " " + CHANGES): {
        "the merger writes into rows that a module keeps": ("x_TE = x_TE if in_place else x_TE.clone()", "pass"),
    },
    ("ops/product.py", LORA): {
        "LoRA's factor is left out": (
            "adapters.append(Adapter(linear, lora.owner.scaling[name]))",
            "adapters.append(Adapter(linear, 1.0))",
        ),
    },
    ("tower/forward.py", "tests/unit/test_hooked_parts.py " + TOWER): {
        "a hook inside is not called": ('                return [f"hooks on {name}"]', "                return []"),
    },
    ("tower/forward.py", CHANGES): {
        "global hooks are not called": ("    if any(_GLOBAL_HOOKS):", "    if False:"),
    },
    ("tower/forward.py", "tests/unit/test_loading.py " + OPS): {
        "dropout is left out in training": ("if snapshot.dropout and any(", "if False and any("),
    },
    ("tower/forward.py", FAULTS_OF_PARTS): {
        "a failed backend is tried at every call": ("    faults = state.faults\n", "    faults = state.faults = {}\n"),
    },
    ("tower/code.py", CHANGES): {
        "a replaced function of the tower's file goes unseen": (
            'self.watch.add("a function in the tower\'s file", file.get, functions)',
            "pass",
        ),
    },
    ("tower/trials.py", PROOF): {
        "gradients of a class are not compared": (
            "    why = gradients_differ(ours.gradients,",
            "    why = None and gradients_differ(ours.gradients,",
        ),
    },
    ("tower/proof.py", PROOF): {
        "a class is compared in one grid": ("why_not_fast = compare(subject, one_image)[1]", "pass"),
        "training mode is not compared": (
            "why_not_fast = compare(replace(subject), trial_of_small_weights(grids))[1]",
            "pass",
        ),
    },
    ("tower/proof.py", "tests/integration/test_mixing.py"): {
        "a module of others that our operations call counts as proven": (
            "return frozenset(places.values()) - called",
            "return frozenset(places.values())",
        ),
    },
    ("backends/flashinfer_cudnn.py", "tests/unit/test_backends.py"): {
        "offsets are those of contiguous queries": (
            '"packed": padded_S1 * np.int32(3 * width),',
            '"packed": padded_S1 * np.int32(width),',
        ),
    },
    ("backends/sdpa.py", "tests/unit/test_backends.py"): {
        "a backend ignores the scale": (", scale=plan.request.scale", ""),
        "a backend has no gradients": (
            "scaled_dot_product_attention(q, k, v,",
            "scaled_dot_product_attention(q.data, k, v,",
        ),
    },
    ("families/qwen2_5_vl.py", FAMILIES): {"a family does not declare its windows": ("    windows=True,\n", "")},
    ("families/qwen3_vl.py", FAMILIES): {"a family does not declare its deepstack": ("    deepstack=True,\n", "")},
    ("decoding/steps.py", "tests/unit/test_decode_steps.py -k memory_runs_out"): {
        "steps of decoding stay when memory runs out": ("drop_when_memory_runs_out(self)", "pass"),
    },
    ("decoding/text_models.py", "tests/integration/test_changes.py -k decoded"): {
        "another function of a module goes unseen": ("NoneType | torch.dtype | FunctionType", "NoneType | torch.dtype"),
    },
    ("decoding/text_forward.py", "tests/unit/test_text_layers.py -k class_forward"): {
        "the forward that a text model had is not put back": (
            'place == "forward" and self._former is None',
            'place == "forward"',
        ),
    },
    ("decoding/text_forward.py", "tests/unit/test_text_layers.py -k memory"): {
        "memory that ran out refuses a language model for ever": (
            "except (UnservedError, torch.OutOfMemoryError):",
            "except UnservedError:",
        ),
    },
    ("decoding/prefill.py", "tests/unit/test_prefill.py -k memory"): {
        "a group of a prompt takes more than the free memory": (
            "> bytes_left(self._model.device)",
            "> 2 * bytes_left(self._model.device)",
        ),
    },
    ("model/around.py", "tests/unit/test_positions.py -k property"): {
        "a property in the place of a module counts as new": (" and name not in model._modules", ""),
    },
    ("decoding/room.py", "tests/unit/test_prefill.py"): {
        "rows that share an axis overlap": ("begin = spans[-1].stop", "begin = spans[-1].stop - _padded(after)"),
    },
    ("decoding/room.py", "tests/unit/test_leaving_rows.py"): {
        "rows that go on keep the slots of those that left": (
            "self.offsets_B, self.last_B = of_all.offsets_B[places_N],",
            "self.offsets_B, self.last_B = of_all.offsets_B[: len(places)],",
        ),
        "keys of rows that go on stay where they were": (
            "value.index_select(0, from_N)",
            "value.index_select(0, to_N)",
        ),
    },
    ("ops/decode_attention.py", "tests/unit/test_prefill.py tests/unit/test_text_kernels.py"): {
        "padding of a shared axis is seen": (
            "is_own_BS = slots_BS < ends_B2[:, 1:]",
            "is_own_BS = slots_BS < ends_B2[:, 1:] + 64",
        ),
    },
    ("decoding/packed.py", "tests/unit/test_prefill.py"): {
        "the room of a prompt outlives its call": (
            "forward = partial(self._text, rows, room)",
            "forward = self._forward_of_last = partial(self._text, rows, room)",
        ),
    },
    ("decoding/parts.py", "tests/unit/test_decoding.py"): {
        "a sample takes a random number too many": (
            "return is_greedy and not config.return_dict_in_generate and kinds <= OF_TOKENS",
            "return not config.return_dict_in_generate",
        ),
    },
    ("decoding/waiting.py", "tests/unit/test_waiting_rows.py -k random"): {
        "a row that begins later ends as early as the first": (
            "self.criteria.begin([*place_of_row.values()], columns + self.due",
            "self.criteria.begin([*place_of_row.values()], self._prompt.columns + self.due",
        ),
        "a row that ended before it began": ("        self.forget(places)\n", ""),
        "tokens of a row go on with those of the next one": (
            "is_there_BD &= is_end_BD.cumsum(1) - is_end_BD.int() == 0",
            "pass",
        ),
    },
    ("decoding/waiting.py", "tests/unit/test_waiting_rows.py -k late"): {
        "a row that ended long ago keeps its columns": ("columns - since >= self.due]", "columns - since >= 1 << 40]"),
    },
    ("decoding/room.py", "tests/unit/test_waiting_rows.py -k late"): {
        "a capture writes into the slots of another row": (
            "torch.minimum(columns_T + self.offsets_B[rows_T], self.last_B[rows_T])",
            "columns_T + self.offsets_B[rows_T]",
        ),
    },
    ("decoding/step.py", "tests/unit/test_waiting_rows.py -k late"): {
        "the second token of a capture lies in the slots of another row": (
            "            self._last_B.copy_(room.last_B)  # a capture",
            "            pass  # a capture",
        ),
    },
    ("decoding/waiting.py", "tests/unit/test_waiting_rows.py -k begin"): {
        "a long row takes the place of a short one": (
            "self._prompt.lengths_B[row] > self._columns_of_place[place]",
            "self._prompt.lengths_B[row] > self._columns_of_place[place] + 5",
        ),
        "the longest rows wait for ever": ("min(len(most), self.places", "min(len(self._waiting), self.places"),
    },
    ("decoding/waiting.py", "tests/unit/test_waiting_rows.py -k beside"): {
        "rows wait beside a penalty of repetitions": (
            "return kinds <= {SuppressTokensLogitsProcessor, EosTokenCriteria, MaxLengthCriteria}",
            "return True",
        ),
    },
    ("decoding/leaving.py", "tests/unit/test_leaving_rows.py"): {
        "rows leave whose tokens transformers still writes": ("return pads_ended_rows and not", "return not"),
        "a row that goes on leaves": (
            "for place in range(size, len(go_on))",
            "for place in range(size + 1, len(go_on))",
        ),
        "a processor of the user's reads logits of rows that left": (
            "return pads_ended_rows and not config.return_dict_in_generate and kinds <= _OF_ROWS",
            "return pads_ended_rows and not config.return_dict_in_generate",
        ),
    },
    ("decoding/leaving.py", "tests/unit/test_leaving_rows.py -k spoils"): {
        "a row moves to the place of another that goes on": ("    return places\n", "    return sorted(places)\n"),
    },
    ("decoding/model_in_loop.py", "tests/unit/test_leaving_rows.py -k changed"): {
        "a smaller step is captured of a model that changed": (
            "read_model(self._model).key != step.reading.key",
            "False",
        ),
    },
    ("decoding/model_in_loop.py", "tests/unit/test_prefill.py -k picks"): {
        "a step begins without the prompt, which lies in another room": (
            "if step is not None and room is not None and step.room is not room:",
            "if False:",
        ),
    },
    ("decoding/ahead.py", "tests/unit/test_decoding.py"): {
        "forwards of stock run ahead": (
            "return not self._has_next_step() and bool(unfinished_sequences.max() == 0)",
            "return False",
        ),
    },
    (
        "../examples/captioner/journal.py",
        "tests/examples/captioning/test_caption_records.py tests/examples/captioning/test_caption_losses.py",
    ): {
        "a torn line is a record": ('if line.endswith("\\n"):', "if line:"),
    },
    (
        "../examples/captioner/journal.py",
        "tests/examples/captioning/test_caption_records.py tests/examples/captioning/test_caption_changes.py",
    ): {
        "an earlier record takes the place of a later one": (
            "latest[record.run, record.key, record.prompt] = record",
            "latest.setdefault((record.run, record.key, record.prompt), record)",
        ),
    },
    ("../examples/captioner/plan.py", "tests/examples/captioning/test_caption_changes.py"): {
        "a changed picture keeps its caption": ("return checksum(file) == record.checksum", "return True"),
    },
    ("../examples/captioner/worker.py", "tests/examples/captioning/test_caption_worker.py"): {
        "half a batch is lost where memory ran out": (
            "[*self._captioned(rows[:middle], []), *self._captioned(rows[middle:], [])]",
            "self._captioned(rows[:middle], [])",
        ),
    },
    ("../examples/caption.py", SCRIPTS): {
        "a photo is captioned on its side": ("ImageOps.exif_transpose(Image.open(path))", "Image.open(path)"),
    },
    ("../examples/decode.py", SCRIPTS): {
        "an answer is no part of its chat": ('chat.append({"role": "a', '[].append({"role": "a'),
    },
    ("../examples/finetune.py", SCRIPTS): {
        "an option checkpoints nothing": ("    if options.gradient_checkpointing:", "    if False:"),
        "an option accumulates nothing": ("steps=options.accumulate", "steps=1"),
    },
}
"""By file and tests that should catch: kind -> text that stands there once, text that takes its place."""

FAULTS = tuple(
    Fault(kind, path, before, after, tests)
    for (path, tests), rows in _BY_PLACE.items()
    for kind, (before, after) in rows.items()
)
