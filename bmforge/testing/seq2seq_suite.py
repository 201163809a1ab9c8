"""Tests of encoder-decoders, beyond `ModelSuite`'s: masks, cached decoding, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.infer import KVCache, generate
from bmforge.models import Model
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.capability import capability
from bmforge.testing.model_suite import ModelSuite
from bmforge.testing.reference_pair import Twin
from bmforge.testing.tolerance import assert_close

__all__ = ["Seq2SeqSuite"]


class Seq2SeqSuite(ModelSuite):
    """Tests that compare an encoder-decoder with transformers, for each config in `cases`."""

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return decoder inputs and source ids; the first source is padded on the right."""
        ids = make_batch(model, batch, seed=seed)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if model.config.head not in ("token_classification", "sequence_classification"):
            inputs["decoder_input_ids"] = make_batch(model, batch, 7, seed + 1)
        return inputs

    def test_cached_decode(self, twin: Twin) -> None:
        """Decoding the target step by step gives the same logits as a single forward pass."""
        inputs = self.make_inputs(twin.model)
        targets = inputs.pop("decoder_input_ids")
        at_once = twin.model(**inputs, decoder_input_ids=targets).logits
        cache = KVCache(len(twin.model.decoder.layers), targets.shape[1])
        steps = [
            twin.model(**inputs, decoder_input_ids=targets[:, start:end], cache=cache).logits
            for start, end in ((0, 3), (3, 4), (4, 7))
        ]
        assert_close(torch.cat(steps, 1), at_once)

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    def test_generates_the_same_ids(self, twin: Twin, beams: int) -> None:
        """Greedy and beam search return the same ids as transformers, also for padded sources."""
        inputs = self.make_inputs(twin.model)
        del inputs["decoder_input_ids"]
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 6, "do_sample": False}
        expected = twin.reference.generate(**inputs, **options)
        assert torch.equal(generate(twin.model, **inputs, **options), expected)
