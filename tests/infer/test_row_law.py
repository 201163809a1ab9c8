"""A row's answer does not depend on the rows next to it, nor on what is cached.

Dynamic and longrope frequencies depend on the length. A cached key keeps the rotation that it was
written with, as in transformers, so cached and whole calls are compared on one side of the border.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.infer import generate
from bmforge.models import Llama, LlamaConfig

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "init_std": 0.3},
    **{"num_layers": 2, "num_heads": 4},
}
# The numbers of positions at which the rotary frequencies change are 16.
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"kind": "linear", "factor": 2.0},
    "dynamic": {"kind": "dynamic", "factor": 2.0},
    "yarn": {"kind": "yarn", "factor": 4.0, "original_seq_len": 16},
    "longrope": {
        "kind": "longrope",
        "factor": 4.0,
        "original_seq_len": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 8.0],
    },
}


def build(name: str) -> Llama:
    more = {} if SCALINGS[name] is None else {"rope_scaling": SCALINGS[name]}
    config = LlamaConfig(**SIZES, **more, max_seq_len=16 if name == "dynamic" else 64)
    return Llama.from_config(config, seed=3).double().eval()


@pytest.mark.parametrize("lengths", [(5, 14, 9), (15, 20, 3), (12, 30)])
@pytest.mark.parametrize("name", SCALINGS)
def test_rows_do_not_depend_on_each_other(name: str, lengths: tuple[int, ...]) -> None:
    model, width = build(name), max(lengths)
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(2, 64, (n,), generator=generator) for n in lengths]
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long).unbind()
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    options = {"max_new_tokens": 8, "eos_token_id": None}
    together = generate(model, ids, mask, **options)[:, width:]
    for row, answer in zip(rows, together, strict=True):
        alone = generate(model, row[None], **options)[0, len(row) :]
        assert answer.tolist() == alone.tolist()


@pytest.mark.parametrize("length", [3, 12, 15, 16, 20])
@pytest.mark.parametrize("name", SCALINGS)
def test_cached_tokens_are_those_of_whole_calls(name: str, length: int) -> None:
    """Each step of greedy decoding is the argmax of a call with all tokens and no cache."""
    if name in ("dynamic", "longrope") and length <= 16:
        new = 17 - length
    elif name == "dynamic":
        return  # every further token changes the frequencies
    else:
        new = 10
    model = build(name)
    ids = torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(length))
    got = generate(model, ids, max_new_tokens=new, eos_token_id=None)
    for _ in range(new):
        with torch.no_grad():
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    assert got.tolist() == ids.tolist()
