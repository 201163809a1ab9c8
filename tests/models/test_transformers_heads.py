"""Heads other than causal language models by the transformers backend: loss, adapters, int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.models import AutoModel
from bmforge.models.pack import quantize_
from bmforge.models.transformers.small_copy import build_twin
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

LONG = pytest.mark.long
KINDS = [
    pytest.param("bart", "sequence_to_sequence", id="bart"),
    pytest.param("electra", "sequence_classification", id="electra"),
    pytest.param("pegasus", "sequence_to_sequence", id="pegasus", marks=LONG),
    pytest.param("electra", "masked_lm", id="electra-masked", marks=LONG),
    pytest.param("deberta-v2", "masked_lm", id="deberta", marks=LONG),
    pytest.param("modernbert", "token_classification", id="modernbert", marks=LONG),
    pytest.param("gemma2", "sequence_classification", id="gemma2", marks=LONG),
]


def batch(head: str) -> dict[str, Tensor]:
    """Return token ids and labels of two rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 150, (2, 12), generator=generator)
    labels = torch.randint(5, 150, (2, 12), generator=generator)
    if head == "sequence_classification":
        labels = torch.tensor([0, 1])
    elif head == "token_classification":
        labels = torch.randint(0, 2, (2, 12), generator=generator)
    else:
        labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.fixture
def directory(kind: str, head: str, tmp_path: Path) -> Path:
    config = transformers.AutoConfig.for_model(kind)
    config.pad_token_id = 0
    build_twin(config, head).save_pretrained(tmp_path)
    return tmp_path


def open_plain(directory: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    return getattr(transformers, config.architectures[0]).from_pretrained(directory).eval()


@pytest.mark.parametrize(("kind", "head"), KINDS)
def test_loss_gradients_adapters_and_int8(kind: str, head: str, directory: Path) -> None:
    """The loss and gradients are transformers'; adapters train; int8 runs."""
    plain = open_plain(directory)
    ours = AutoModel.from_pretrained(directory, backend="transformers").eval()
    inputs = batch(head)
    wanted, got = plain(**inputs).loss, ours(**inputs).loss
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    wanted.backward()
    got.backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        # transformers trains fixed position tables once they are loaded; bmforge keeps them.
        if parameter.requires_grad and theirs[name].grad is not None:
            torch.testing.assert_close(
                parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-5, msg=name
            )
    tuned = AutoModel.from_pretrained(directory, backend="transformers")
    Lora(tuned, targets=["all-linear"], rank=2)
    tuned(**inputs).loss.backward()
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)
    packed = quantize_(AutoModel.from_pretrained(directory, backend="transformers"), "int8")
    with torch.no_grad():
        assert bool(packed(**inputs).loss.isfinite())
