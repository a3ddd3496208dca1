"""Change a model with torch and transformers alone: freeze, checkpoint, cast, copy, load weights, hook, set flags.

A change is called with the model and a stack of what must be undone after the test. It returns the model to use from
then on. A function that takes other arguments returns a change.
"""

import io
import pickle
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import torch
from tiny import checkpoint_layers, tower_of
from torch import nn

Change = Callable[[nn.Module, ExitStack], nn.Module]


def unchanged(model: nn.Module, _: ExitStack) -> nn.Module:
    return model


def by(function: Callable[[nn.Module], nn.Module]) -> Change:
    """Replace the model by the function's result."""
    return lambda model, _: function(model)


def frozen(model: nn.Module, _: ExitStack) -> nn.Module:
    tower_of(model).requires_grad_(False)
    return model


def checkpointed(*, reentrant: bool, freeze: bool = False) -> Change:
    """Turn on gradient checkpointing and training mode; freeze the tower if asked."""

    def change(model: nn.Module, _: ExitStack) -> nn.Module:
        checkpoint_layers(model, reentrant=reentrant)
        if freeze:
            tower_of(model).requires_grad_(False)
        return model.train()

    return change


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_save_pretrained(model: nn.Module, stack: ExitStack) -> nn.Module:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def other_weights(*, assign: bool) -> Change:

    def change(model: nn.Module, _: ExitStack) -> nn.Module:
        weights = {name: value * 1.25 for name, value in model.state_dict().items()}
        model.load_state_dict(weights, assign=assign)
        return model

    return change


def attending_by(implementation: str | dict[str, str]) -> Change:

    def change(model: nn.Module, _: ExitStack) -> nn.Module:
        model.set_attn_implementation(implementation)
        return model

    return change


def config_flag(name: str) -> Change:
    """Set a flag of the vision config. (The setter of `output_attentions` wants eager attention: write behind it.)"""

    def change(model: nn.Module, _: ExitStack) -> nn.Module:
        config = tower_of(model).config
        setattr(config, f"_{name}" if name == "output_attentions" else name, True)
        return model

    return change


def hooked(path: str) -> Change:
    """Hook a module of the tower: the hook doubles what it returns, if that is one tensor."""

    def double(module: nn.Module, inputs: object, output: object) -> torch.Tensor | None:
        return output * 2 if isinstance(output, torch.Tensor) else None

    def change(model: nn.Module, _: ExitStack) -> nn.Module:
        tower_of(model).get_submodule(path).register_forward_hook(double)
        return model

    return change
