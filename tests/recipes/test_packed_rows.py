"""Packed conversations: little padding, and no influence of one conversation on another."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_after_tuning import TALKERS, build
from torch import Tensor

from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.hub import FAMILIES
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.recipes.inputs.conversation_rows import EncodedRow, PackedConversations, pack_rows
from bmforge.recipes.inputs.examples import collate
from bmforge.testing import assert_close

DECODERS = [n for n in TALKERS if FAMILIES[n].family_traits.objective == "next token"]
IGNORED = -100


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 120), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_each_text_is_in_one_row(lengths: list[int], width: int, seed: int) -> None:
    rows = pack_rows(lengths, width, seed)
    assert Counter(n for row in rows for n in row) == Counter(range(len(lengths)))
    sizes = [sum(lengths[n] for n in row) for row in rows]
    assert all(0 < size <= width for size in sizes)
    # No two rows fit into one, a property of best fit that gives at most 2 x the fewest rows.
    assert len(sizes) < 2 or sum(sorted(sizes)[:2]) > width


@pytest.mark.parametrize("median", [100, 300, 700, 1000])
@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.1])
def test_at_most_3_percent_is_padding(median: int, sigma: float) -> None:
    """Lengths of chats are about log-normal; 2,000 of them, in rows of 2,048 tokens."""
    draw = np.random.default_rng(median)
    lengths = np.clip(draw.lognormal(np.log(median), sigma, 2000), 8, 2048).astype(int).tolist()
    rows = pack_rows(lengths, 2048, seed=0)
    assert 1 - sum(lengths) / (len(rows) * 2048) <= 0.03


def gradients(model: torch.nn.Module, source: PackedConversations) -> dict[str, Tensor]:
    """Return the gradients of the summed loss over all rows of a source."""
    model.zero_grad()
    batch = collate([source.make(n, ()) for n in range(len(source))], source.columns)
    model(**batch, num_items_in_batch=1.0).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", DECODERS)
def test_no_attention_across_conversations(name: str) -> None:
    """Gradients of a packed row are the sum of those of its conversations in rows of their own.

    The labels of one conversation give no gradient to the embedded tokens of the others.
    """
    model = build(name, vocab_size=43).double().eval()
    texts = [list(range(first, first + length)) for first, length in ((3, 6), (12, 9), (24, 4))]
    rows = [EncodedRow(ids, [IGNORED, IGNORED, *ids[2:]]) for ids in texts]
    packed = PackedConversations(rows, 24, 0)
    assert len(packed) == 1
    want: dict[str, Tensor] = {}
    for row in rows:
        for key, gradient in gradients(model, PackedConversations([row], 24, 0)).items():
            want[key] = want.get(key, torch.zeros_like(gradient)) + gradient
    found = gradients(model, packed)
    assert found.keys() == want.keys()
    for key, gradient in want.items():
        assert_close(found[key], gradient, rtol=1e-9, atol=1e-11)
    for number, row in enumerate(rows):
        check_reach(model, packed, set(row.ids), number)


def check_reach(model: Any, packed: PackedConversations, ids: set[int], number: int) -> None:
    """The labels of one conversation give no gradient to the embedded tokens of the others."""
    batch = collate([packed.make(0, ())], packed.columns)
    own = torch.isin(batch["input_ids"], torch.tensor(sorted(ids)))
    batch["labels"] = torch.where(own, batch["labels"], IGNORED)
    embedded: list[Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        if not embedded and torch.is_tensor(output) and output.shape[:2] == own.shape:
            output.retain_grad()
            embedded.append(output)

    handles = [m.register_forward_hook(keep) for m in model.modules() if not [*m.children()]]
    model(**batch, num_items_in_batch=1.0).loss.backward()
    for handle in handles:
        handle.remove()
    touched = embedded[0].grad.abs().sum(-1) > 0
    assert touched.any(), number
    assert not (touched & ~own).any(), number


@pytest.mark.parametrize(("kind", "separates"), [("mamba2", False), ("ernie4_5", True)])
def test_models_that_mix_documents_get_one_per_row(
    kind: str, separates: bool, tmp_path: Path
) -> None:
    """Rows have one conversation, and padding behind it changes no gradient."""
    transformers = pytest.importorskip("transformers")
    twin = build_small_copy(transformers.AutoConfig.for_model(kind), "language_model")
    twin.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(model).separates_documents(model.config) == separates
    texts = [list(range(5, 5 + length)) for length in (6, 9)]
    rows = [EncodedRow(ids, [IGNORED, IGNORED, *ids[2:]]) for ids in texts]
    source = PackedConversations(rows, 24, 0, packs=False)
    assert len(source) == len(rows)
    found = gradients(model, source)
    want: dict[str, Tensor] = {}
    for row in rows:
        exact = PackedConversations([row], len(row.ids), 0, packs=False)
        for key, gradient in gradients(model, exact).items():
            want[key] = want.get(key, torch.zeros_like(gradient)) + gradient
    assert found.keys() == want.keys()
    for key, gradient in want.items():
        assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)  # Mamba-2 scans in fp32


def test_the_log_counts_conversations_and_answers(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        EncodedRow([1, 2, 3, 4, 5], [IGNORED, 2, IGNORED, 4, 5]),
        EncodedRow([1, 2], [IGNORED, 2]),
        EncodedRow([1, 2], [IGNORED, IGNORED]),
    ]
    get_logger().addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "bmforge"):
            PackedConversations(rows, 8, 0, conversations=2)
    finally:
        get_logger().removeHandler(caplog.handler)
    assert caplog.messages[-1].startswith(
        "2 conversations with 3 answers to train on, in 1 sequences of 8 tokens: 7 tokens"
    )
