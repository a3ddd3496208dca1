"""Sixty faults, a few lines each, that a rebuild could bring in unseen; `run.py` seeds one at a time.

Each names its kind, the place, and the tests that should catch it. A rebuilt part gets the same kinds anew.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault of a few lines.

    Attributes:
        kind: What goes wrong.
        path: The file, below the package.
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
RANKS = "tests/unit/test_data_parallel.py tests/unit/test_ranks.py tests/unit/test_split.py"
CHANGES = (
    "tests/integration/test_changes.py tests/unit/test_checks.py tests/integration/test_replaced.py "
    "tests/integration/test_structures.py"
)
PROOF = "tests/unit/test_proof.py tests/unit/test_newer_transformers.py"
LIKE = "tests/integration/test_like.py"
FP8 = "tests/unit/test_fp8.py"
LORA = "tests/unit/test_adapter.py"
FAULTS_OF_PARTS = "tests/integration/test_faults.py tests/integration/test_faults_of_backends.py"

FAULTS = (
    # --- metadata ---
    Fault(
        "an offset of clips is that of frames",
        "layout.py",
        "t_F * h_F * w_F if geometry.clips else np.repeat(h_F * w_F, t_F)",
        "np.repeat(h_F * w_F, t_F)",
        LAYOUT,
    ),
    Fault(
        "windows of a frame are counted by the height alone",
        "layout.py",
        "row // side * -(-w // side) + column // side",
        "row // side * -(-h // side) + column // side",
        LAYOUT,
    ),
    Fault(
        "the inverse order is the order",
        "layout.py",
        "inverse_index_M[window_index_M] = np.arange(len(window_index_M))",
        "inverse_index_M[:] = window_index_M",
        LAYOUT,
    ),
    Fault(
        "positions lie in row-major order",
        "layout.py",
        "blocks = positions.reshape(h // merge, merge, w // merge, merge, 2).swapaxes(1, 2)",
        "blocks = positions",
        LAYOUT,
    ),
    Fault(
        "weights of the table's other axis",
        "layout.py",
        "weights_TK = (weights[0][:, :, None] * weights[1][:, None, :])",
        "weights_TK = (weights[1][:, :, None] * weights[0][:, None, :])",
        LAYOUT,
    ),
    Fault(
        "arrays overlap when they are packed",
        "layout.py",
        "total += -(-array.nbytes // _ALIGN) * _ALIGN",
        "total += array.nbytes // _ALIGN * _ALIGN",
        LAYOUT,
    ),
    # --- the encoder ---
    Fault(
        "features stay in the order of windows",
        "engine/encoder.py",
        'outputs[-1] = outputs[-1][tensors["inverse_index"]]',
        'outputs[-1] = outputs[-1][tensors["window_index"]]',
        FAMILIES,
    ),
    Fault(
        "positions are not reordered with the rows",
        "engine/encoder.py",
        "positions_T2 = positions_T2.unflatten(0, merges)[window_index_M].flatten(0, 1)",
        "pass",
        FAMILIES,
    ),
    Fault(
        "the residual is kept beside deepstack, and added twice",
        "engine/encoder.py",
        "            del merged\n            delta_TE = None\n",
        "            del merged\n",
        FAMILIES,
    ),
    Fault(
        "a merger under a checkpoint wrapper keeps what its gradient needs",
        "engine/encoder.py",
        "finish = ops.finish_by(_checkpointed(ops.merge, merger_checkpoint))",
        "finish = ops.finish",
        "tests/integration/test_checkpoint_functions.py",
    ),
    # --- routes and caches ---
    Fault(
        "a layout is found by the number of its rows",
        "engine/route.py",
        "return self.cache.get(RouteKey(grid, spec, stream, replay, budget), make)",
        "return self.cache.get((sum(t * h * w for t, h, w in grid), spec, stream, replay, budget), make)",
        TOWER,
    ),
    Fault(
        "segments of an attention-only tower are those of its first layout",
        "tower/stock_way.py",
        "route = state.routes.get(grid, state.attention_spec(",
        "route = state.last_route or state.routes.get(grid, state.attention_spec(",
        "tests/unit/test_attention_only.py",
    ),
    # --- inputs ---
    Fault(
        "pixels of another grid are taken",
        "engine/inputs.py",
        "if rows != pixels.shape[0]:",
        "if rows < 0:",
        "tests/integration/test_fuzz.py",
    ),
    Fault(
        "frames that pad a batch count as images",
        "engine/inputs.py",
        "if t or h < 0 or w < 0])",
        "])",
        TOWER,
    ),
    # --- graphs ---
    Fault(
        "arrays of the layout are not copied before a replay",
        "graphs/runner.py",
        "graph.packed.copy_(route.packed)",
        "pass",
        GRAPHS,
    ),
    Fault(
        "pixels of the last call stay behind those of this one",
        "graphs/runner.py",
        "graph.pixels_TP[rows:].zero_()",
        "pass",
        GRAPHS,
    ),
    Fault(
        "outputs are those of the graph, not copies",
        "graphs/runner.py",
        "results.append(fresh.clone())",
        "results.append(fresh)",
        GRAPHS,
    ),
    Fault(
        "a graph is found by the number of its rows",
        "engine/route.py",
        "return self.metadata.rows, arrays, plans",
        "return self.metadata.rows",
        GRAPHS,
    ),
    Fault(
        "padding rows join the last image",
        "graphs/budgets.py",
        "    if parts:\n        shares",
        "    lengths_S[segments.count - 1] += spare_rows\n    if False:\n        shares",
        GRAPHS,
    ),
    Fault(
        "the last tokens of a padded layout are not permuted",
        "graphs/budgets.py",
        "of_tokens[name][len(array) :] = np.arange(len(array), tokens)",
        "of_tokens[name][len(array) - 4 :] = np.arange(len(array) - 4, tokens)",
        GRAPHS,
    ),
    Fault(
        "weights that moved do not make graphs stale",
        "graphs/store.py",
        "or self._identities[-1] != identity:",
        "or self._identities[-1]._replace(memory=identity.memory) != identity:",
        "tests/integration/test_changes.py",
    ),
    Fault(
        "trained tensors do not make graphs stale",
        "graphs/store.py",
        "or self._identities[-1] != identity:",
        "or self._identities[-1]._replace(requires_grad=identity.requires_grad) != identity:",
        STEPS,
    ),
    Fault(
        "a second call overwrites the activations of the first",
        "graphs/training.py",
        "if last is not None and not last.is_over:",
        "if False:",
        STEPS,
    ),
    Fault(
        "gradients of an overwritten call come from the graph",
        "graphs/training.py",
        "is_overwritten = was_over or self._last is None or self._last() is not call",
        "is_overwritten = False",
        STEPS,
    ),
    Fault(
        "gradients of the graph are not copied",
        "graphs/step.py",
        "copies = [torch.empty_like(gradient) for gradient in self.gradients]\n"
        "        if copies:\n            torch._foreach_copy_(copies, self.gradients)",
        "copies = list(self.gradients)",
        STEPS,
    ),
    Fault(
        "a shared parameter keeps the gradient of one stage",
        "graphs/step.py",
        "gradient if earlier is None else earlier.add_(gradient)",
        "gradient",
        STEPS,
    ),
    Fault(
        "captures need not be paid for",
        "graphs/policy.py",
        "if self.credit < captures * _CAPTURE:",
        "if False:",
        AUTO,
    ),
    Fault(
        "graphs take all the memory that is free",
        "graphs/store.py",
        "return NO_ROOM if self.nbytes >= most_bytes else None",
        "return None",
        AUTO,
    ),
    Fault(
        "graphs stay when memory runs out",
        "graphs/memory.py",
        'store.give_up("device memory ran out after graphs were captured")',
        "pass",
        AUTO,
    ),
    Fault(
        "a failed capture leaves the recorder in use",
        "graphs/store.py",
        "isinstance(error, Fault) else ())\n        finally:\n            recorder.done()",
        "isinstance(error, Fault) else ())\n        else:\n            recorder.done()",
        AUTO,
    ),
    # --- passes, reuse, ranks ---
    Fault(
        "a pass begins a frame late",
        "options/passes.py",
        "            room = max_rows\n",
        "            room = max_rows\n            if len(passes) > 2:\n                continue\n",
        PASSES,
    ),
    Fault(
        "the last frames of long videos are in no pass",
        "options/split.py",
        "for frame in range(t)]",
        "for frame in range(min(t, 4))]",
        PASSES,
    ),
    Fault(
        "an output of a pass is written to the rows of another",
        "options/passes.py",
        "[output[start * len(output) // total :",
        "[output[start:",
        PASSES,
    ),
    Fault(
        "a weight written before the backward goes unseen",
        "engine/recorded.py",
        "return isinstance(self.value, Tensor) and version_of(self._counted) != self._version",
        "return False",
        PASSES + " " + STEPS,
    ),
    Fault(
        "pictures of equal checksums are equal",
        "options/reuse.py",
        "            if is_equal:\n                sources[index] = candidate",
        "            sources[index] = candidate",
        REUSE,
    ),
    Fault(
        "features of earlier weights are used",
        "options/reuse.py",
        "identity = weights_sum, table.form,",
        "identity = table.form,",
        REUSE,
    ),
    Fault(
        "the gradient of a repeated picture is that of its last copy",
        "options/reuse.py",
        "return zeros.index_add(0, source_rows_T, grad.to(dtype)).to(grad.dtype), None, None",
        "return zeros.index_copy(0, source_rows_T, grad.to(dtype)).to(grad.dtype), None, None",
        REUSE,
    ),
    Fault(
        "kept features are the caller's tensors",
        "options/reuse.py",
        "bits_TW, *clones = [tensor.clone() for tensor in tensors]",
        "bits_TW, *clones = tensors",
        REUSE,
    ),
    Fault(
        "gradients of one rank are scaled by the number of ranks",
        "options/data_parallel.py",
        "dweights[index] = total if ranks_reached or has_hooks else None",
        "dweights[index] = total / len(assignment.rows) if ranks_reached or has_hooks else None",
        RANKS,
    ),
    Fault(
        "a rank takes the outputs of its neighbour",
        "options/data_parallel.py",
        "self._assignment.put_together([outputs_there[index] for outputs_there in by_rank], output)",
        "self._assignment.put_together([outputs_there[index] for outputs_there in by_rank[::-1]], output)",
        RANKS,
    ),
    Fault(
        "gradients of a replayed share pass the sum over ranks",
        "options/data_parallel.py",
        "plan = replace(plan, parameters=[alias_of.get(id(weight), weight) for weight in plan.parameters])",
        "pass",
        RANKS,
    ),
    Fault(
        "a rank that runs stock tells nobody",
        "options/data_parallel.py",
        'self._exchange(attempt, Report(grid=plan.inputs.grid, why_alone="; ".join(reasons)))',
        "pass",
        "tests/unit/test_not_shared.py",
    ),
    Fault(
        "hooks inside a shared call see a share of its rows",
        "options/data_parallel.py",
        "            if plan.why_whole is not None:",
        "            if False:",
        "tests/unit/test_not_shared.py",
    ),
    Fault(
        "distinct pictures get the features of others",
        "options/reuse.py",
        "pieces = [pieces_of_call[index] for index in repeats.encoded]",
        "pieces = list(pieces_of_call[: len(repeats.encoded)])",
        REUSE,
    ),
    # --- operations ---
    Fault(
        "values are normalised like keys",
        "ops/heads.py",
        "x = tl.where(kind == 2, x, tl.where(kind == 0, q, k)",
        "x = tl.where(kind == 3, x, tl.where(kind == 0, q, k)",
        KERNELS,
    ),
    Fault(
        "the norm of a LayerNorm's gradient keeps its mean",
        "ops/training/norm_backward.py",
        "        y1 = y1 - level\n        y2 = y2 - level\n",
        "        pass\n",
        BACKWARD,
    ),
    Fault(
        "the gradient of the sum is dropped",
        "ops/training/norm_backward.py",
        "HAS_DSUM=dsum_TE is not None,",
        "HAS_DSUM=False,",
        BACKWARD,
    ),
    Fault(
        "the gradient of the gate lacks its second term",
        "ops/training/mlp.py",
        "dx = gradient * (gate + x * slope)",
        "dx = gradient * gate",
        BACKWARD,
    ),
    Fault(
        "the last rows of a window attend to nothing of it",
        "ops/window_attention.py",
        'scores = tl.where((t < length)[None, :], scores * scale_log2, float("-inf"))',
        'scores = tl.where((t < length - 1)[None, :], scores * scale_log2, float("-inf"))',
        BACKWARD,
    ),
    Fault(
        "rotated gradients are not rotated back",
        "ops/window_attention.py",
        "tl.store(dqkv + cell, (y1 * c + y2 * s).to(dtype), mask=inside)",
        "tl.store(dqkv + cell, y1.to(dtype), mask=inside)",
        BACKWARD,
    ),
    Fault(
        "a missing bias of a joined product is not made",
        "ops/base.py",
        "return [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs]",
        "return [weight.new_ones(len(weight)) if bias is None else bias for weight, bias in pairs]",
        LORA,
    ),
    Fault(
        "weights are read once",
        "ops/base.py",
        "        if not (cast and self.casts_weights):\n            return read",
        "        if not (cast and self.casts_weights):\n            values = read()\n            return lambda: values",
        "tests/unit/test_fsdp.py",
    ),
    Fault(
        "a changed attribute of a module goes unseen",
        "watch.py",
        "attribute_reads = [(_ATTRIBUTE, itemgetter(*names), owners) for names, owners in owners_by_names.items()]",
        "attribute_reads = []",
        CHANGES,
    ),
    Fault(
        "an attribute that appears goes unseen",
        "tower/snapshot.py",
        'watch.add("the number of a module\'s attributes", len, self.attributes_inside)',
        "pass",
        CHANGES,
    ),
    Fault(
        "a buffer of a copy that is written to goes unseen",
        "watch.py",
        "return id(tensor), tensor, tensor.data_ptr(), version_of(tensor)",
        "return id(tensor), tensor, tensor.data_ptr(), None",
        LIKE,
    ),
    Fault(
        "the merger writes into rows that a module keeps",
        "ops/merger.py",
        "x_TE = x_TE if in_place else x_TE.clone()",
        "pass",
        OPS + " " + CHANGES,
    ),
    Fault(
        "LoRA's factor is left out",
        "ops/product.py",
        "adapters.append(Adapter(linear, lora.owner.scaling[name]))",
        "adapters.append(Adapter(linear, 1.0))",
        LORA,
    ),
    # --- what may change ---
    Fault(
        "a hook inside is not called",
        "tower/forward.py",
        '                return [f"hooks on {name}"]',
        "                return []",
        "tests/unit/test_hooked_parts.py " + TOWER,
    ),
    Fault(
        "a replaced function of the tower's file goes unseen",
        "tower/code.py",
        'self.watch.add("a function in the tower\'s file", file.get, functions)',
        "pass",
        CHANGES,
    ),
    Fault(
        "a replaced class of a module goes unseen",
        "tower/snapshot.py",
        'watch.add("the class of a module", type, self._modules)',
        "pass",
        CHANGES,
    ),
    Fault(
        "global hooks are not called",
        "tower/forward.py",
        "    if any(_GLOBAL_HOOKS):",
        "    if False:",
        CHANGES,
    ),
    Fault(
        "dropout is left out in training",
        "tower/forward.py",
        "if snapshot.dropout and any(",
        "if False and any(",
        "tests/unit/test_attention.py " + OPS,
    ),
    # --- proofs ---
    Fault(
        "gradients of a class are not compared",
        "tower/trials.py",
        "    why = gradients_differ(ours.gradients,",
        "    why = None and gradients_differ(ours.gradients,",
        PROOF,
    ),
    Fault(
        "a class is compared in one grid",
        "tower/proof.py",
        "why_not_fast = compare(subject, one_image)[1]",
        "pass",
        PROOF,
    ),
    Fault(
        "training mode is not compared",
        "tower/proof.py",
        "why_not_fast = compare(replace(subject), trial_of_small_weights(grids))[1]",
        "pass",
        PROOF,
    ),
    Fault(
        "a module of others that our operations call counts as proven",
        "tower/proof.py",
        "return frozenset(places.values()) - called",
        "return frozenset(places.values())",
        "tests/integration/test_mixing.py",
    ),
    # --- faults and backends ---
    Fault(
        "a failed backend is tried at every call",
        "tower/forward.py",
        "    faults = state.faults\n",
        "    faults = state.faults = {}\n",
        FAULTS_OF_PARTS,
    ),
    Fault(
        "offsets are those of contiguous queries",
        "backends/flashinfer_cudnn.py",
        '"packed": padded_S1 * np.int32(3 * width),',
        '"packed": padded_S1 * np.int32(width),',
        "tests/unit/test_backends.py",
    ),
    Fault(
        "a transposed weight goes unseen",
        "tower/snapshot.py",
        "if is_same and list(map(Tensor.is_contiguous, squares)) == weights.contiguous:",
        "if is_same:",
        "tests/integration/test_changes.py",
    ),
    # --- decoding ---
    Fault(
        "a weight in other memory goes unseen",
        "decoding/text_models.py",
        "(value.data_ptr(), value.dtype,",
        "(value.dtype,",
        "tests/integration/test_changes.py -k decoded",
    ),
    Fault(
        "another function of a module goes unseen",
        "decoding/text_models.py",
        "NoneType | torch.dtype | FunctionType",
        "NoneType | torch.dtype",
        "tests/integration/test_changes.py -k decoded",
    ),
    Fault(
        "rows that share an axis overlap",
        "decoding/room.py",
        "begin += _padded(length + after)",
        "begin += _padded(length)",
        "tests/unit/test_prefill.py",
    ),
    Fault(
        "padding of a shared axis is seen",
        "ops/decode_attention.py",
        "is_own_BS = slots_BS < ends_B2[:, 1:]",
        "is_own_BS = slots_BS < ends_B2[:, 1:] + 64",
        "tests/unit/test_prefill.py tests/unit/test_decode_attention.py",
    ),
    Fault(
        "the room of a prompt outlives its call",
        "decoding/packed.py",
        "text = partial(self._text, rows, room)",
        "text = self._text_of_last = partial(self._text, rows, room)",
        "tests/unit/test_prefill.py",
    ),
    Fault(
        "a sample takes a random number too many",
        "decoding/halves.py",
        "return is_greedy and not config.return_dict_in_generate and kinds <= _OF_TOKENS",
        "return not config.return_dict_in_generate",
        "tests/unit/test_decoding.py",
    ),
    Fault(
        "forwards of stock run ahead",
        "decoding/ahead.py",
        "return not self._has_next_step() and bool(unfinished_sequences.max() == 0)",
        "return False",
        "tests/unit/test_decoding.py",
    ),
)
