"""Ways to use a wrapped model: call it, train it, generate with it. Each returns tensors to compare with stock's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from tiny import GRIDS, chat_inputs, pixels_for, tower_of
from torch import nn
from transformers import PreTrainedModel

from support.tensors import flat

Use = Callable[[nn.Module], list[torch.Tensor]]
STEPS = 2  # the second one reads what the first one wrote


def base_of(model: nn.Module) -> PreTrainedModel:
    """Find the composite model inside all wrappers."""
    return next(module for module in model.modules() if type(module).__name__.endswith("ForConditionalGeneration"))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prompt(model: nn.Module) -> dict[str, torch.Tensor]:
    """Make a prompt with two images and a video; pixels have the dtype of the tower's norms, whatever Linears hold."""
    inputs = chat_inputs(base_of(model), [(1, 4, 6), (2, 6, 4), (1, 8, 8)])
    dtype = tower_of(model).blocks[0].norm1.weight.dtype
    for name in ("pixel_values", "pixel_values_videos"):
        inputs[name] = inputs[name].to(dtype)
    return inputs


def prompt_with_labels(model: nn.Module) -> dict[str, torch.Tensor]:
    """Make the same prompt with its own tokens as labels."""
    inputs = prompt(model)
    return inputs | {"labels": inputs["input_ids"]}


@torch.no_grad()
def answers(model: nn.Module) -> list[torch.Tensor]:
    """Call the complete model through all its wrappers; return the logits."""
    return [model(**prompt(model)).logits]


@torch.no_grad()
def answer_to_one_image(model: nn.Module) -> list[torch.Tensor]:
    """Call the complete model with one image; return the logits."""
    return [model(**chat_inputs(base_of(model), [(1, 4, 6)])).logits]


@torch.no_grad()
def features(model: nn.Module) -> list[torch.Tensor]:
    """Call the tower directly; return all its outputs."""
    tower = tower_of(model)
    grid = GRIDS["mixed"]
    weight = tower.blocks[0].norm1.weight
    device = torch.device("cpu") if weight.is_meta else weight.device  # offloaded weights are on meta between calls
    pixels = pixels_for(tower, grid, dtype=weight.dtype, device=device)
    return flat(tower(pixels, grid_thw=torch.tensor(grid, device=device)))


def answers_and_features(model: nn.Module) -> list[torch.Tensor]:
    """Call the complete model, then its tower."""
    return answers(model) + features(model)


@torch.no_grad()
def features_of_two_sizes(model: nn.Module) -> list[torch.Tensor]:
    """Call `model.visual` with one image, then with a larger one: it is compiled for the first."""
    outputs = []
    for grid in ([(1, 4, 6)], [(1, 8, 10)]):
        pixels = pixels_for(tower_of(model), grid)
        outputs += flat(model.model.visual(pixels, grid_thw=torch.tensor(grid)))
    return outputs


def generated(model: nn.Module) -> list[torch.Tensor]:
    return [base_of(model).generate(**prompt(model), max_new_tokens=4, do_sample=False)]


def under_autocast(use: Use) -> Use:
    """Use a model under bf16 autocast."""

    def use_under_autocast(model: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return use(model)

    return use_under_autocast


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Call the complete model through its wrappers; return the loss and the gradients of what is trained."""
    model.zero_grad(set_to_none=True)
    loss = model(**prompt_with_labels(model)).loss
    loss.backward()
    results = [loss]
    for parameter in trained_parameters(model):
        gradient = parameter.grad
        if gradient is not None:
            results.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)  # FSDP2 shards it
    model.zero_grad(set_to_none=True)
    return results


@contextmanager
def restored_later(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Give parameters their present values again at the end, so that the next run starts alike."""
    values = [parameter.detach().clone() for parameter in parameters]
    yield
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def run_of_accelerate(model: nn.Module) -> list[torch.Tensor]:
    """Train some steps in a bf16 loop of accelerate; return the losses and the trained parameters.

    The loss includes a reference without gradients (and without adapters), as in TRL's trainers.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # an earlier test may have left its state
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    parameters = trained_parameters(model)
    losses = []
    with restored_later(parameters):
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(parameters, lr=1e-3))
        for _ in range(STEPS):
            with torch.no_grad(), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
                reference = prepared(**prompt_with_labels(model)).loss
            loss = prepared(**prompt_with_labels(model)).loss
            accelerator.backward(loss + (loss - reference).square())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().float())
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        AcceleratorState._reset_state(True)
        after = [parameter.detach().clone() for parameter in parameters]
    return [torch.stack(losses), *after]
