"""Generation with encoder-decoders of the transformers backend equals transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, GenerationConfig, Request, generate
from bmforge.models import AutoModel
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

LONG = pytest.mark.long
# Learned and computed positions; positions that are not saved; a cache that cannot be continued.
KINDS = ["bart", "m2m_100", "marian", "prophetnet"]
MORE = ["bigbird_pegasus", "led", "mbart", "mvp", "nllb-moe", "pegasus", "plbart", "t5gemma"]
# What facebook/bart-large-cnn publishes, at a smaller size.
PUBLISHED = {
    "num_beams": 4,
    "no_repeat_ngram_size": 3,
    "length_penalty": 2.0,
    "early_stopping": True,
    "min_length": 7,
    "max_length": 15,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
}


def make_models(kind: str, folder: Path, **published: Any) -> tuple[Any, Any]:
    """Return a small model of transformers and the same model in bmforge."""
    plain = build_small_copy(transformers.AutoConfig.for_model(kind), "sequence_to_sequence")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in plain.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.normal_(0, 0.4, generator=generator)
    for name, value in published.items():
        setattr(plain.generation_config, name, value)
    plain.save_pretrained(folder)
    return plain, AutoModel.from_pretrained(folder, backend="transformers").eval()


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=LONG) for kind in MORE)])
def test_ids_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    plain, ours = make_models(kind, tmp_path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 150, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    for beams in (1, 3):
        options = {"num_beams": beams, "max_new_tokens": 6, "do_sample": False}
        want = plain.generate(ids, attention_mask=mask, **options)
        assert torch.equal(generate(ours, ids, mask, **options), want)
    # Padding on the left gives what the tokens alone give.
    left, left_mask = ids.roll(4, 1)[:1], mask.roll(4, 1)[:1]
    alone = generate(ours, ids[:1, :5], max_new_tokens=6)
    assert torch.equal(generate(ours, left, left_mask, max_new_tokens=6), alone)


def test_the_published_options_of_a_summarizer(tmp_path: Path) -> None:
    plain, ours = make_models("bart", tmp_path, **PUBLISHED)
    ids = torch.randint(5, 150, (3, 9), generator=torch.Generator().manual_seed(3))
    want = plain.generate(ids)
    got = generate(ours, ids, max_new_tokens=14)
    assert torch.equal(got[:, : want.shape[1]], want)
    assert (got[:, 1] == 0).all()


def test_adapters_per_row(tmp_path: Path) -> None:
    _, ours = make_models("bart", tmp_path)
    with torch.no_grad():
        for tensor in Lora(ours, targets=["all-linear"], name="a", rank=2).parameters():
            tensor.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
    ids = torch.randint(5, 150, (2, 7), generator=torch.Generator().manual_seed(3))
    for beams in (1, 2):
        options = {"num_beams": beams, "max_new_tokens": 5, "eos_token_id": ()}
        both = generate(ours, ids, adapter_names=["a", None], **options)
        for row, name in enumerate(["a", None]):
            alone = generate(ours, ids[row : row + 1], adapter_names=[name], **options)
            assert torch.equal(both[row : row + 1], alone)
        assert not torch.equal(generate(ours, ids[:1], adapter_names=[None], **options), both[:1])


def test_a_missing_start_token_is_named(tmp_path: Path) -> None:
    _, ours = make_models("mbart", tmp_path)
    ours.config.raw.pop("bos_token_id")
    with pytest.raises(ConfigError, match="decoder_start_token_id"):
        generate(ours, torch.tensor([[5, 6]]))


def test_source_and_target_have_their_own_positions(tmp_path: Path) -> None:
    """Each may use all 128 positions of the model, as in transformers."""
    plain, ours = make_models("bart", tmp_path)
    ids = torch.randint(5, 150, (2, 120), generator=torch.Generator().manual_seed(5))
    want = plain.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(generate(ours, ids, max_new_tokens=20), want)
    for length, new_tokens in ((129, 5), (5, 129)):
        with pytest.raises(ConfigError, match="need 129 positions"):
            generate(ours, torch.full((1, length), 7), max_new_tokens=new_tokens)


@pytest.mark.parametrize("ngram", [1, 2])
def test_ngrams_of_the_input_are_not_repeated(ngram: int, tmp_path: Path) -> None:
    """The option that Blenderbot publishes, in a batch and in an engine."""
    plain, ours = make_models("blenderbot", tmp_path, encoder_no_repeat_ngram_size=ngram)
    ids = torch.randint(5, 150, (3, 60), generator=torch.Generator().manual_seed(0))
    ids = ids.repeat_interleave(2, 1)  # the model repeats tokens
    for beams in (1, 3):
        options = {"num_beams": beams, "max_new_tokens": 8, "do_sample": False}
        want = plain.generate(ids, **options)
        assert torch.equal(generate(ours, ids, **options), want)
        freely = generate(ours, ids, encoder_no_repeat_ngram_size=0, **options)
        assert not torch.equal(freely, want)
        with Engine(ours) as engine:
            request = Request(ids[1].tolist(), GenerationConfig(**options))
            (answer,) = engine.submit(request).wait(60)
        assert list(answer.ids) == want[1, 1 : 1 + len(answer.ids)].tolist()
