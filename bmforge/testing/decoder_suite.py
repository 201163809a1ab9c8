"""Tests of decoder-only families, beyond `ModelSuite`'s: padding, packing, cached decoding."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from bmforge.infer import KVCache, generate
from bmforge.models import Model
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.capability import capability
from bmforge.testing.model_suite import ModelSuite
from bmforge.testing.reference_pair import Twin
from bmforge.testing.tolerance import assert_close

__all__ = ["DecoderOwnSuite", "DecoderSuite"]


class DecoderOwnSuite:
    """Tests of a decoder that need no reference model; the fixture `tiny` is a small model."""

    def test_cached_decode(self, tiny: Model) -> None:
        """Decoding step by step with a cache gives the same logits as a single forward pass."""
        check_cached_decode(tiny)

    def test_packed_documents(self, tiny: Model) -> None:
        """Documents packed into one sequence give the same logits as each document alone."""
        check_packed_documents(tiny)

    @pytest.mark.long
    def test_decoding_compiles_whole(self, tiny: Model) -> None:
        """Cached decoding compiles to one graph with the same results."""
        torch.compiler.reset()
        ids = make_batch(tiny)
        compiled = torch.compile(tiny, fullgraph=True, backend="eager")
        cache = KVCache(tiny.config.num_layers, ids.shape[1])
        with torch.no_grad():
            steps = [compiled(ids[:, :8], cache=cache).logits]
            steps += [compiled(ids[:, i : i + 1], cache=cache).logits for i in range(8, 12)]
            assert_close(torch.cat(steps, 1), tiny(ids).logits)
        torch.compiler.reset()


class DecoderSuite(DecoderOwnSuite, ModelSuite):
    """Tests that compare a decoder with transformers, for each config in `cases`.

    `long_length` is the sequence length of the comparison; for a config with scaled rotary
    embeddings it exceeds the original context length.
    """

    long_length: ClassVar[int] = 24

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return long sequences of token ids."""
        return {"input_ids": make_batch(model, batch, self.long_length, seed)}

    def test_last_logits(self, twin: Twin) -> None:
        """`logits_to_keep` returns only the last logits."""
        ids = make_batch(twin.model)
        assert_close(twin.model(ids, logits_to_keep=2).logits, twin.model(ids).logits[:, -2:])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding(self, twin: Twin, side: str) -> None:
        """Logits of a padded batch equal those of transformers, and are not NaN at padding."""
        ids = make_batch(twin.model)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        mask = mask if side == "left" else mask.flip(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = twin.reference(ids, attention_mask=mask, position_ids=positions).logits
        logits = twin.model(ids, attention_mask=mask, position_ids=positions).logits
        assert logits.isfinite().all()
        assert_close(logits[mask.bool()], expected[mask.bool()])

    def test_loss_of_part_of_a_batch(self, twin: Twin) -> None:
        """With `num_items_in_batch`, the summed loss is divided by this number."""
        ids = make_batch(twin.model)
        expected = twin.reference(ids, labels=ids, num_items_in_batch=7).loss
        assert_close(twin.model(ids, labels=ids, num_items_in_batch=7).loss, expected)

    def test_padded_gradients_are_finite(self, twin: Twin) -> None:
        """Sequences that start with padding have finite gradients."""
        ids = make_batch(twin.model)
        mask = torch.ones_like(ids)
        mask[0, :-1] = 0
        twin.model.zero_grad()
        twin.model(
            ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss.backward()
        assert all(p.grad.isfinite().all() for p in twin.model.parameters())

    def test_cached_decode_of_every_case(self, twin: Twin) -> None:
        """Cached decoding gives the logits of a single forward pass, for each config in `cases`."""
        check_cached_decode(twin.model)

    def test_packed_documents_of_every_case(self, twin: Twin) -> None:
        """Packed documents give the logits of each document alone, for each config in `cases`."""
        check_packed_documents(twin.model)

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    def test_generates_the_same_ids(self, twin: Twin, beams: int) -> None:
        """Greedy and beam search return the same ids as transformers, also for padded prompts."""
        ids = make_batch(twin.model, length=6, seed=4)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 6, "do_sample": False}
        expected = twin.reference.generate(ids, attention_mask=mask, **options)
        assert torch.equal(generate(twin.model, ids, mask, **options), expected)


def check_cached_decode(model: Model) -> None:
    """Compare decoding step by step with a single forward pass, with and without left padding."""
    ids = make_batch(model)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for use_mask in (False, True):
        cache = KVCache(model.config.num_layers, ids.shape[1])
        chunks = []
        for start, end in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 12)):
            extra = {}
            if use_mask:
                extra = {
                    "attention_mask": mask[:, :end],
                    "position_ids": positions[:, start:end],
                }
            chunks.append(model(ids[:, start:end], cache=cache, **extra).logits)
            assert cache.length == end
        extra = {"attention_mask": mask, "position_ids": positions} if use_mask else {}
        assert_close(torch.cat(chunks, 1), model(ids, **extra).logits)


def check_packed_documents(model: Model) -> None:
    """Compare documents packed into one sequence with each document alone."""
    ids = make_batch(model, batch=1)
    lengths = (3, 5, 4)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, document_ids=documents, position_ids=positions).logits
    alone = [model(document).logits for document in ids.split(lengths, 1)]
    assert_close(packed, torch.cat(alone, 1))
