"""Heads other than causal language models by the transformers backend: loss, adapters, int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bmforge.models import AutoModel
from bmforge.models.pack import quantize_
from bmforge.models.transformers.small_copy import build_small_copy, shrink_config
from bmforge.testing.foreign_inputs import Example, find_example
from bmforge.testing.foreign_layouts import default_config
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

LONG = pytest.mark.long
# Text with an encoder-decoder, a classifier, images (as pixels and as patches), sound, and a
# decoder that transformers lists with the encoder-decoders. GIT computes logits of image patches as
# well; files of Kimi have fused and rotated rows; Pop2Piano ties the embeddings, but not the head;
# SpeechT5 has more weights in convolutions than in blocks; FSMT does not shift labels; a pair of
# an encoder and a decoder masks the padding in shifted labels.
KINDS = [
    pytest.param("bart", "sequence_to_sequence", "text", id="bart"),
    pytest.param("electra", "sequence_classification", "text", id="electra"),
    pytest.param("llava", "image_text_to_text", "image", id="llava"),
    pytest.param("qwen2_vl", "image_text_to_text", "image", id="qwen2_vl"),
    pytest.param("pix2struct", "image_text_to_text", "image", id="pix2struct"),
    pytest.param("whisper", "speech_to_text", "audio", id="whisper"),
    pytest.param("voxtral", "sequence_to_sequence", "text", id="voxtral"),
    pytest.param("git", "image_text_to_text", "image", id="git"),
    pytest.param("kimi_k25", "image_text_to_text", "text", id="kimi_k25"),
    pytest.param("pop2piano", "speech_to_text", "text", id="pop2piano"),
    pytest.param("speecht5", "speech_to_text", "audio", id="speecht5"),
    pytest.param("fsmt", "sequence_to_sequence", "text", id="fsmt"),
    pytest.param("fun_asr_nano", "speech_to_text", "text", id="fun_asr_nano", marks=LONG),
    pytest.param("chameleon", "image_text_to_text", "image", id="chameleon", marks=LONG),
    pytest.param("instructblip", "image_text_to_text", "image", id="instructblip", marks=LONG),
    pytest.param("ernie4_5_vl_moe", "image_text_to_text", "image", id="ernie", marks=LONG),
    pytest.param("dots3_note", "image_text_to_text", "image", id="dots3_note", marks=LONG),
    pytest.param("qwen3_asr", "speech_to_text", "audio", id="qwen3_asr", marks=LONG),
    pytest.param("encoder-decoder", "sequence_to_sequence", "text", id="pair", marks=LONG),
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
    plain = build_small_copy(config, head)
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


def test_decoder_inputs_are_shifted_labels(tmp_path: Path) -> None:
    """FSMT does not shift labels itself; it gets the decoder's inputs of transformers' collator."""
    plain = build_small_copy(default_config("fsmt"), "sequence_to_sequence")
    plain.save_pretrained(tmp_path)
    inputs = dict(find_example(plain, "sequence_to_sequence").inputs)
    del inputs["decoder_input_ids"]
    shifted = plain.prepare_decoder_input_ids_from_labels(inputs["labels"].clone())
    ours = AutoModel.from_pretrained(tmp_path, backend="transformers").eval()
    expected = plain(**inputs, decoder_input_ids=shifted).loss
    torch.testing.assert_close(ours(**inputs).loss, expected, rtol=1e-5, atol=1e-6)


# Rotated rows of heads in a fused tensor; alternating rows of experts, in a fused tensor of three
# dims; rows of padding.
@pytest.mark.parametrize("kind", ["kimi_k25", "inkling_mm_model", "inkling2"])
def test_rearranged_rows_are_read_and_saved_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config = shrink_config(default_config(kind))
    if kind == "inkling2":
        config.text_config.unpadded_vocab_size = 150
    torch.manual_seed(0)
    plain = transformers.AutoModelForImageTextToText.from_config(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    ours = AutoModel.from_pretrained(tmp_path / "plain", backend="transformers")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(input_ids=ids).logits)
    ours.save_pretrained(tmp_path / "ours")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "ours"))
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
