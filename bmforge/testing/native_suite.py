"""Compares decoding by native CPU kernels with torch, for every family that generates."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.infer.decoder_factory import start_decoder
from bmforge.models import Model
from bmforge.models.pack import quantize_
from bmforge.nn.packing import PRESETS
from bmforge.testing.batches import make_batch
from bmforge.testing.capability import capability
from bmforge.testing.tolerance import assert_close

__all__ = ["NativeSuite", "decode_both_ways"]


class NativeSuite:
    """Tests of decoding with the native CPU kernels; `FamilySuite` inherits this."""

    @capability("native step")
    @pytest.mark.parametrize("scheme", ["", "int8", "int4"])
    @torch.no_grad()
    def test_native_step(self, wide: Model, scheme: str) -> None:
        """Logits of padded sequences equal those of torch, for one or several tokens per step.

        With float activations the logits are equal up to rounding. With 8-bit activations a
        difference in the last bit can change a rounded value, so the tolerance is larger.
        """
        if not wide.traits.can_generate:
            return
        used: Any = [None]
        if scheme:
            used = [PRESETS[scheme], replace(PRESETS[scheme], activations="float")]
        for spec in used:
            model: Any = wide if spec is None else quantize_(copy.deepcopy(wide), spec)
            is_rounded = spec is not None and spec.activations == "int8"
            self.check_native_step(model, 0.05 if is_rounded else 1e-5)

    def check_native_step(self, model: Any, off: float) -> None:
        """Compare the native kernels' logits with torch's, up to `off` times the largest logit."""
        native, plain, counts = decode_both_ways(model)
        stack: Any = model.decoder if hasattr(model, "decoder") else model
        assert counts == [(0, 0)] + [(len(stack.layers), 0)] * 4
        assert_close(native, plain, rtol=0, atol=off * float(plain.abs().max()))


def decode_both_ways(
    model: Any, masked: bool = True
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Decode some steps with native kernels and with torch; return both logits and block counts.

    Shape:
        returns the logits of both, (steps, B, V), and for every step a pair (number of blocks that
        native kernels ran, number of blocks that torch ran)
    """
    ids = make_batch(model, 2, length=7, seed=3)
    mask = torch.ones_like(ids) if masked else None
    if mask is not None:
        mask[0, slice(-2, None) if model.traits.is_encoder_decoder else slice(0, 2)] = 0
    results, counts = [], []
    for is_native in (True, False):
        decoder, start = start_decoder(model, ids, mask, 8)
        step: Any = decoder.cache.step
        decoder.cache.step = step if is_native else None
        scores = []
        for tokens in (start, *(ids[:, n : n + 1] for n in range(3)), ids[:, :3]):
            scores.append(decoder.run(tokens))
            if is_native:
                counts.append((step.native_blocks, step.torch_blocks))
        results.append(torch.stack(scores))
    return results[0], results[1], counts
