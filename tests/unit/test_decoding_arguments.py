"""Every argument of `generate`: what `graphed_decoding` gives for it is stock's, by the way that the table says."""

from collections import Counter
from typing import Any

import pytest
import tiny
import transformers
from packaging.version import Version
from support.decoding import argument_names, both, counts_of
from support.generate_arguments import ARGUMENTS, Argument

CALLS = [
    pytest.param(argument, call, id=f"{argument.names[0]}-{index}")
    for argument in ARGUMENTS
    for index, call in enumerate(argument.calls)
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.TINY["qwen2_5_vl"].build()


def test_every_argument_of_this_transformers_is_in_the_table() -> None:
    names = Counter(name for argument in ARGUMENTS for name in argument.names)
    assert set(names.values()) == {1}
    assert not argument_names() - set(names), "new arguments: declare what becomes of them"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("argument", "call"), CALLS)
def test_an_argument_gives_what_stock_gives(model: Any, argument: Argument, call: dict[str, Any]) -> None:
    unknown = {name.removeprefix("make_") for name in call} - argument_names()
    if unknown:
        pytest.skip(f"this transformers has no {unknown}")
    if "prefill_chunk_size" in call and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("stock raises")
    before = counts_of(model)
    inputs = tiny.left_padded(model)
    if "prompt_lookup_num_tokens" in call:  # for one row alone
        inputs = tiny.chat_inputs(model, [(1, 4, 6)])
    if {"prefill_chunk_size", "use_cache"} & set(call):  # for text alone
        inputs = {"input_ids": inputs["input_ids"][1:] % 50}
    both(model, inputs, **{"max_new_tokens": 8} | call)
    after = counts_of(model)
    new_reasons = {why for why, count in after.reasons.items() if count > before.reasons.get(why, 0)}
    assert after.static_calls - before.static_calls == (argument.outcome == "served"), new_reasons
    if argument.outcome == "stock":
        assert len(new_reasons) == 1
        assert argument.why.startswith("the reason is") or new_reasons == {argument.why}
