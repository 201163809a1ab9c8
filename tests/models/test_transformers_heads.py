"""Heads other than causal language models by the transformers backend: loss, adapters, int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.models import AutoModel
from bmforge.models.pack import quantize_
from bmforge.models.transformers.small_copy import build_twin
from bmforge.testing.foreign_inputs import Example, find_example
from bmforge.testing.foreign_layouts import default_config
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

LONG = pytest.mark.long
# Text with an encoder-decoder, a classifier, images (as pixels and as patches), sound, and a
# decoder that transformers lists with the encoder-decoders.
KINDS = [
    pytest.param("bart", "sequence_to_sequence", "text", id="bart"),
    pytest.param("electra", "sequence_classification", "text", id="electra"),
    pytest.param("llava", "image_text_to_text", "image", id="llava"),
    pytest.param("qwen2_vl", "image_text_to_text", "image", id="qwen2_vl"),
    pytest.param("pix2struct", "image_text_to_text", "image", id="pix2struct"),
    pytest.param("whisper", "speech_to_text", "audio", id="whisper"),
    pytest.param("voxtral", "sequence_to_sequence", "text", id="voxtral"),
    pytest.param("pegasus", "sequence_to_sequence", "text", id="pegasus", marks=LONG),
    pytest.param("electra", "masked_lm", "text", id="electra-masked", marks=LONG),
    pytest.param("deberta-v2", "masked_lm", "text", id="deberta", marks=LONG),
    pytest.param("modernbert", "token_classification", "text", id="modernbert", marks=LONG),
    pytest.param("gemma2", "sequence_classification", "text", id="gemma2", marks=LONG),
]


@pytest.fixture
def sample(kind: str, head: str, tmp_path: Path) -> tuple[Path, Example]:
    config = default_config(kind)
    config.get_text_config().pad_token_id = config.pad_token_id = 0
    plain = build_twin(config, head)
    plain.save_pretrained(tmp_path)
    return tmp_path, find_example(plain, head)


def open_plain(directory: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    return getattr(transformers, config.architectures[0]).from_pretrained(directory).eval()


@pytest.mark.parametrize(("kind", "head", "modality"), KINDS)
def test_loss_gradients_adapters_and_int8(modality: str, sample: tuple[Path, Example]) -> None:
    """The loss and gradients are transformers'; adapters train; int8 runs."""
    directory, example = sample
    inputs = example.inputs
    assert example.modality == modality
    plain = open_plain(directory)
    ours = AutoModel.from_pretrained(directory, backend="transformers").eval()
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
    # The last layer of LLaVA's image encoder is not used, so that it gets no gradient.
    reached = {n.rpartition(".")[0] for n, p in theirs.items() if p.grad is not None}
    trained = {n: p for n, p in tuned.named_parameters() if p.requires_grad}
    assert any(p.grad is not None for p in trained.values())
    idle = [n for n, p in trained.items() if p.grad is None]
    assert not [n for n in idle if n.rpartition(".")[0].rpartition(".")[0] in reached]
    packed = quantize_(AutoModel.from_pretrained(directory, backend="transformers"), "int8")
    with torch.no_grad():
        assert bool(packed(**inputs).loss.isfinite())
