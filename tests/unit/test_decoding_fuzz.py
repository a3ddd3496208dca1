"""Random calls of `graphed_decoding`, with changes of the model between them: every output is stock's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import torch
from support.decoding import add_adapters, both, counts_of
from support.towers import alike
from tiny import TINY

Arguments = dict[str, Any]


def draw_prompt(model: Any, rng: random.Random) -> Arguments:
    """Draw pictures and text, padded text, or text."""
    kind = rng.randrange(4)
    if kind == 0:
        return tiny.left_padded(model)
    if kind == 1:
        return tiny.chat_inputs(model, [rng.choice([(1, 4, 6), (1, 8, 4), (2, 4, 4)])], rng.randrange(99))
    rows = rng.randint(1, 4)
    length = rng.choice([1, 2, 5, 17, 60, 121, 126, 128, 130])
    ids = torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    if kind == 2:
        return {"input_ids": ids}
    pads = torch.tensor([rng.randrange(length) for _ in range(rows)])
    mask = (torch.arange(length) >= pads[:, None]).long()
    return {"input_ids": torch.where(mask > 0, ids, 2), "attention_mask": mask}


def draw_arguments(rng: random.Random) -> Arguments:
    """Draw how to choose tokens, and when to stop."""
    choices: list[Arguments] = [
        {},
        dict(do_sample=True, temperature=rng.uniform(0.5, 2.0)),
        dict(do_sample=True, top_k=rng.randint(2, 20), num_return_sequences=rng.randint(1, 3)),
        dict(do_sample=True, top_p=0.8, repetition_penalty=1.2),
        dict(no_repeat_ngram_size=2),
        dict(eos_token_id=list(range(3, 50, rng.randint(4, 9)))),
        dict(return_dict_in_generate=True, output_logits=True, output_scores=True),
        dict(num_beams=2),
    ]
    return rng.choice(choices) | dict(max_new_tokens=rng.choice([1, 2, 3, 7, 12, 20]))


def change(model: Any, rng: random.Random) -> None:
    """Change the model, or most often do not."""
    what = rng.randrange(12)
    weight = rng.choice([module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)])
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    noise = torch.randn(weight.shape, generator=generator) * 0.1 * weight.std()
    with torch.no_grad():
        if what == 0:
            weight.add_(noise)
        elif what == 1:
            weight.data = weight + noise
        elif what == 2:
            model.set_adapter(rng.choice(["one", "two"]))
        elif what == 3:
            (model.disable_adapters if rng.random() < 0.5 else model.enable_adapters)()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("calls", alike(16, 600))
@pytest.mark.parametrize("family", alike("qwen3_vl", "qwen2_5_vl"))
def test_random_calls_give_the_outputs_of_stock(family: str, calls: int) -> None:
    model = TINY[family].build()
    add_adapters(model)
    rng = random.Random(calls)
    calls_of_stock = 0
    for index in range(calls):
        change(model, rng)
        prompt = draw_prompt(model, rng)
        arguments = draw_arguments(rng)
        calls_of_stock += "num_beams" in arguments or arguments["max_new_tokens"] == 1
        both(model, prompt, seed=index, **arguments)
    counts = counts_of(model)
    assert set(counts.reasons) <= {"beams", "no token after the first"}
    assert counts.static_calls == calls - calls_of_stock > calls / 2
