"""Proof, by running, of the code around a tower: methods of a stub of the model's class run beside ours.

The stub has the class and the config of the model, and no weights. Its tower and text model are stand-ins.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families import Config, Family, Model, Tower, family_of
from hf_vit_accel.machine import one_line
from hf_vit_accel.model.every_rank import KINDS, Features, encode_once
from hf_vit_accel.model.positions import RULES, Arguments, HostCopies, Result, Rule, placeholder_masks, positions_of

METHODS = (
    "get_rope_index",
    "get_vision_position_ids",
    "get_placeholder_mask",
    "get_image_features",
    "get_video_features",
    "compute_3d_position_ids",
    "forward",
)
"""Methods that the proof runs. A model that overrides one of them stays stock."""

PADDINGS = ("left", "right", "hole", None)
PROMPTS: tuple[tuple[tuple[str, tuple[int, int, int]], ...], ...] = (
    (("text", (3, 1, 1)), ("image", (1, 2, 3)), ("text", (2, 1, 1)), ("video", (2, 1, 2)), ("image", (1, 1, 1))),
    (("video", (3, 2, 1)), ("text", (1, 1, 1)), ("image", (1, 3, 2)), ("text", (4, 1, 1)), ("video", (4, 1, 1))),
    (("text", (9, 1, 1)),),
)
"""Samples of a batch: runs of text, and pictures by their frames, rows and columns of merged tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelProof:
    """The result of running a class beside our code.

    Attributes:
        kind: The class in transformers.
        functions: The methods that ran.
        rule: How it numbers frames; None where positions stay stock.
        video_token: The config's field of the token that marks videos; None where counting stays stock.
        host_grids: Whether its methods for features take a grid on the host.
        one_call: Whether images and videos may be encoded in one call.
        reasons: Why the others are not proven.
    """

    kind: type
    functions: tuple[object, ...]
    rule: Rule | None = None
    video_token: str | None = None
    host_grids: bool = False
    one_call: bool = False
    reasons: tuple[str, ...] = ()

    def unchanged(self) -> bool:
        """Return whether the class still has the methods that ran."""
        return self.functions == _functions(self.kind)

    def is_overridden(self, model: nn.Module, ours: type) -> bool:
        """Return whether the instance, or a subclass, has one of the methods itself."""
        kind = type(model)
        attributes = vars(model)
        for name, function in zip(METHODS, self.functions, strict=True):
            if getattr(kind, name, None) is not function or not isinstance(attributes.get(name, None), ours | None):
                return True
        return False


def known_class(model: nn.Module) -> type | None:
    """Return the class in transformers of a model with M-RoPE, or None."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return kind if all(hasattr(kind, name) for name in METHODS[:4]) else None
    return None


_PROOFS: dict[tuple[type, str], ModelProof] = {}


def prove(model: Model, kind: type) -> ModelProof:
    """Return the proof for a model's class and config, made once per process and code in 30 to 100 ms."""
    fields = {name: getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")}
    vision = model.config.vision_config
    for name in ("spatial_merge_size", "temporal_merge_size", "tokens_per_second"):
        fields[name] = getattr(vision, name, None)
    key = kind, repr(fields)
    proof = _PROOFS.get(key)
    if proof is None or not proof.unchanged():
        proof = _PROOFS[key] = machine.run_isolated(_prove, model, kind)
    return proof


def _functions(kind: type) -> tuple[object, ...]:
    return tuple(getattr(kind, name, None) for name in METHODS)


def tower_in(model: nn.Module) -> tuple[str, Tower, Family] | None:
    """Return name, tower and family of the tower directly in a model; None without one."""
    for name, module in model.named_children():
        family = family_of(module)
        if family is not None:
            return name, module, family
    return None


class _Tower:
    """A stand-in for the tower: every merged token is the sum of its patches, so that all of them tell apart."""

    dtype = torch.float32

    def __init__(self, family: Family, tower: Tower, merge: int) -> None:
        self.family = family
        self.output_class = family.output_class(tower)
        self.spatial_merge_size = merge
        self.config = SimpleNamespace(spatial_merge_size=merge, in_channels=2, temporal_patch_size=2, patch_size=1)
        self.calls = 0

    def __call__(self, pixels: Tensor, grid_thw: Tensor, **options: object) -> Result:
        assert int(grid_thw.prod(-1).sum()) == len(pixels)
        self.calls += 1
        merged = pixels.reshape(-1, self.spatial_merge_size**2, pixels.shape[1]).sum(1)
        return self.family.output_of(self.output_class, [pixels, merged, merged * 2, merged * 3])


class _Text:
    """A stand-in for the text model, which keeps its inputs."""

    def __call__(self, **inputs: Result) -> Result:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        self.inputs = inputs
        return BaseModelOutputWithPast(last_hidden_state=inputs["inputs_embeds"])


def _stub(model: Model, kind: Any, tower_name: str, tower: _Tower) -> Model:
    """Return an instance of the class without weights."""
    stub = kind.__new__(kind)
    nn.Module.__init__(stub)
    attributes = vars(stub)
    attributes["config"] = copy.deepcopy(model.config)
    attributes["config"].return_dict = True
    attributes[tower_name] = tower
    attributes["language_model"] = _Text()
    attributes["rope_deltas"] = None
    attributes["get_input_embeddings"] = lambda: lambda ids: ids[..., None] * torch.arange(1.0, 5.0, device="cpu")
    return stub


def _batch(
    config: Config, rule: Rule, padding: str | None, names: tuple[str, ...] = ("image", "video"), *, video_token: str
) -> Arguments:
    """Return the arguments of a forward for all prompts, as a family with this rule would get them.

    Args:
        config: Of the model.
        rule: Of the family.
        padding: Where padding is; None for no mask, and thus for one prompt.
        names: The kinds of pictures to keep.
        video_token: The config's field of the token that marks videos.
    """
    merge = config.vision_config.spatial_merge_size
    merged_frames = config.vision_config.temporal_merge_size if rule.merges_frames else 1
    ids = {"image": config.image_token_id, "video": getattr(config, video_token)}
    ids["text"] = next(token for token in range(3) if token not in ids.values())
    kinds = {"text": 0, "image": 1, "video": 2}
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    rows: list[list[str]] = []
    for prompt in PROMPTS if padding else PROMPTS[:1]:
        row: list[str] = []
        for name, (t, h, w) in prompt:
            if name in grids and name in names:
                grids[name].append([t * (merged_frames if name == "video" else 1), h * merge, w * merge])
            run = [name if name in names else "text"] * (h * w)
            for _ in range(t):
                row += [*run, "text"] if name == "video" and rule.frames else run
        rows.append(row)
    longest = max(len(row) for row in rows)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        fill = ["text"] * (longest - len(row))
        start = len(fill) if padding == "left" else 0
        mask[index, start : start + len(row)] = 1
        rows[index] = fill + row if padding == "left" else row + fill
    if padding == "hole":
        mask[0, 1] = 0
        mask[2, 4] = 0
    batch: Arguments = {
        "input_ids": torch.tensor([[ids[name] for name in row] for row in rows]),
        "mm_token_type_ids": torch.tensor([[kinds[name] for name in row] for row in rows], dtype=torch.int32),
        "attention_mask": mask if padding else None,
    }
    for kind, grid in grids.items():
        batch[f"{kind}_grid_thw"] = torch.tensor(grid) if grid else None
    return batch


def _prove(model: Model, kind: type) -> ModelProof:
    """Run the methods of a stub beside ours; what cannot be run is not proven."""
    functions = _functions(kind)
    in_model = tower_in(model)
    if in_model is None:
        return ModelProof(kind=kind, functions=functions, reasons=("the model holds no supported tower",))
    name, tower, family = in_model
    reasons: list[str] = []
    with torch.device("cpu"), torch.no_grad():
        stand_in = _Tower(family, tower, model.config.vision_config.spatial_merge_size)
        stub = _stub(model, kind, name, stand_in)
        rule = _first(reasons, "positions", _prove_rule, [(stub, rule) for rule in RULES])
        tokens = ("video_token_id", "image_token_id")
        video_token = _first(reasons, "placeholders", _prove_video_token, [(stub, token) for token in tokens])
        host_grids = _first(reasons, "grids on the host", _prove_host_grids, [(stub,)])
        one_call = None
        if rule is not None:
            trial = (stub, family, rule, video_token or tokens[0])
            one_call = _first(reasons, "one call of the tower", _prove_one_call, [trial])
    return ModelProof(
        kind=kind,
        functions=functions,
        rule=rule,
        video_token=video_token,
        host_grids=bool(host_grids),
        one_call=bool(one_call),
        reasons=tuple(reasons),
    )


def _first(
    reasons: list[str], subject: str, prove_it: Callable[..., Result], trials: Sequence[tuple[object, ...]]
) -> Result:
    """Return the result of the first trial that passes, or note why the first one failed and return None."""
    why: str | None = None
    for trial in trials:
        try:
            return prove_it(*trial)
        except Exception as error:  # of transformers' method, or of a comparison
            why = why or f"{subject}: {one_line(error)}"
    reasons.append(str(why))
    return None


def _check(is_equal: bool, text: str) -> None:
    if not is_equal:
        raise ValueError(text)


def _prove_rule(stub: Model, rule: Rule) -> Rule:
    """Compare positions under a rule with those of the class, over paddings and intervals."""
    seconds: list[Result] = [None, torch.tensor([0.55, 1.7, 3.3, 0.4]), [0.55, 2, 1.7, 0.4]]
    for index, padding in enumerate(PADDINGS):
        for names in (("image", "video"), ("image",), ("video",), ()):
            batch = _batch(stub.config, rule, padding, names, video_token="video_token_id")
            batch["second_per_grid_ts"] = seconds[index % len(seconds)]
            expected = type(stub).get_rope_index(stub, **batch)
            ours = positions_of(HostCopies(), rule, stub.config, batch)
            is_equal = ours is not None and all(
                torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(ours, expected, strict=True)
            )
            _check(is_equal, f"{type(stub).__name__} numbers tokens in a way that we do not know")
    return rule


def _prove_video_token(stub: Model, video_token: str) -> str:
    """Compare the masks of placeholders with those of the class, and what it refuses."""
    batch = _batch(stub.config, Rule(), "left", video_token=video_token)
    ids = batch["input_ids"]
    embeddings = torch.zeros(*ids.shape, 4)
    tokens = (stub.config.image_token_id, getattr(stub.config, video_token))
    full = [torch.zeros(int((ids == token).sum()), 4) for token in tokens]
    for features in (full, [full[0], None], [None, full[1]], [full[0][1:], None], [None, full[1][1:]]):
        ours = placeholder_masks(stub.config, video_token, ids, ids.numpy(), embeddings, features)
        try:
            expected = type(stub).get_placeholder_mask(stub, ids, embeddings, *features)
        except ValueError:
            expected = None
        is_equal = (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            is_equal = len(expected) == 2 and all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
        _check(is_equal, f"{type(stub).__name__} marks placeholders in a way that we do not know")
    return video_token


def _prove_host_grids(stub: Model) -> bool:
    """Run the methods for features on the meta device with a grid on the CPU: mixing the two is an error."""
    merge = stub.config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, merge, 2 * merge], [3, merge, merge]])
    pixels = torch.empty(5 * merge * merge, 4, device="meta")
    for method in (type(stub).get_image_features, type(stub).get_video_features):
        sizes = [len(part) for part in method(stub, pixels, grid, return_dict=True).pooler_output]
        _check(sizes == [2, 3], f"{type(stub).__name__} splits features in a way that we do not know")
    return True


def _prove_one_call(stub: Model, family: Family, rule: Rule, video_token: str) -> bool:
    """Compare the inputs of the text model after one call of the tower with those after transformers' calls."""
    tower = next(value for value in vars(stub).values() if isinstance(value, _Tower))
    combinations: list[tuple[str, ...]] = [("image",), ("video",), ()]
    if video_token == "video_token_id":
        combinations.append(("image", "video"))
    for names in combinations:
        batch = _batch(stub.config, rule, "left", names, video_token=video_token)
        for pixels, grid in KINDS.values():
            if batch[grid] is not None:
                batch[pixels] = torch.rand(int(batch[grid].prod(-1).sum()), 4)
        type(stub).forward(stub, **batch)
        expected = stub.language_model.inputs
        features = Features()
        tower.calls = 0
        encode_once(features, stub.get_image_features, tower, family, batch, {})
        stub.get_image_features = lambda pixels, *_, **__: features.take("image", pixels)  # noqa: B023
        stub.get_video_features = lambda pixels, *_, **__: features.take("video", pixels)  # noqa: B023
        try:
            type(stub).forward(stub, **batch)
        finally:
            del stub.get_image_features, stub.get_video_features
        ours = stub.language_model.inputs
        is_equal = tower.calls == 1 and not features.outputs and _equal(ours, expected)
        is_equal = is_equal and (features.zero is None or float(features.zero) == 0.0)
        _check(is_equal, f"{type(stub).__name__} does not use features of images and videos as we know")
    return True


def _equal(ours: Result, expected: Result) -> bool:
    """Return whether two structures of tensors are equal."""
    if isinstance(expected, Tensor):
        return isinstance(ours, Tensor) and torch.equal(ours, expected)
    if isinstance(expected, dict):
        return ours.keys() == expected.keys() and all(_equal(ours[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(ours) == len(expected) and all(_equal(x, y) for x, y in zip(ours, expected, strict=True))
    return bool(ours == expected)


@lru_cache(maxsize=64)
def parameters_of(method: Callable[..., Result]) -> tuple[str, ...]:
    """Return the names of a method's parameters, without `self` and the one for all other keyword arguments."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)
