"""Tests of text encoders, beyond `ModelSuite`'s: padding, segments, packing."""

from __future__ import annotations

from typing import ClassVar

import torch

from bmforge.models import Model
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.model_suite import ModelSuite
from bmforge.testing.reference_pair import Twin
from bmforge.testing.tolerance import assert_close

__all__ = ["EncoderSuite"]


class EncoderSuite(ModelSuite):
    """Tests that compare a text encoder with transformers, for each config in `cases`."""

    not_applicable: ClassVar[dict[str, str]] = {
        "generate": "does not generate text",
        "native step": "does not generate text",
    }

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return token ids; the first sequence is padded on the right."""
        ids = make_batch(model, batch, seed=seed)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def test_padding_changes_nothing(self, twin: Twin) -> None:
        """Padding does not change the outputs of the other tokens."""
        ids = make_batch(twin.model)
        mask = torch.ones_like(ids)
        mask[0, 7:] = 0
        padded = twin.model(ids, attention_mask=mask).last_hidden_state
        alone = twin.model(ids[:1, :7]).last_hidden_state
        assert padded.isfinite().all()
        assert_close(padded[:1, :7], alone)

    def test_packed_documents(self, twin: Twin) -> None:
        """Documents packed into one sequence have the same outputs as each document alone."""
        ids = make_batch(twin.model, batch=1)
        lengths = (3, 5, 4)
        documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
        first = getattr(twin.model.spec, "position_offset", 0)
        positions = torch.cat([torch.arange(n) for n in lengths])[None] + first
        packed = twin.model(ids, document_ids=documents, position_ids=positions)
        alone = [twin.model(document).last_hidden_state for document in ids.split(lengths, 1)]
        assert_close(packed.last_hidden_state, torch.cat(alone, 1))
