"""Choosing an answer by its loss, compared with log-probabilities summed from the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError, DataError
from bmforge.infer.score import choose_text, score_texts
from bmforge.models.bert import Bert, BertConfig
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.models.t5 import T5, T5Config

SIZES: dict[str, Any] = {"vocab_size": 41, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 48}
OPTIONS = [([3, 4, 5], [6, 7]), ([3, 4], [9, 1, 2, 8]), ([8], [1])]


def decoders() -> list[Any]:
    return [
        GPT2.from_config(GPT2Config(**SIZES, max_seq_len=32, dropout=0.3, init_std=0.3)),
        Llama.from_config(LlamaConfig(**WIDE, max_seq_len=32, init_std=0.3)),
        CPM1.from_config(CPM1Config(**SIZES, max_seq_len=32, init_std=0.3)),
        CPMBee.from_config(CPMBeeConfig(**WIDE, head_dim=8, num_buckets=16, num_relations=64)),
    ]


@pytest.mark.parametrize("number", range(4))
def test_losses_of_decoders(number: int) -> None:
    """The model is left in the mode it was in, and dropout is off meanwhile."""
    model = decoders()[number].train()
    losses = score_texts(model, OPTIONS)
    assert model.training
    model.eval()
    for (prompt, text), loss in zip(OPTIONS, losses, strict=True):
        ids = torch.tensor([prompt + text])
        with torch.no_grad():
            scores = model(ids).logits[0].log_softmax(-1)
        want = -sum(float(scores[len(prompt) + i - 1, id]) for i, id in enumerate(text)) / len(text)
        assert loss == pytest.approx(want, rel=1e-5)


def test_losses_of_an_encoder_decoder() -> None:
    model = T5.from_config(T5Config(**WIDE, head_dim=8)).eval()
    for (prompt, text), loss in zip(OPTIONS, score_texts(model, OPTIONS), strict=True):
        target = torch.tensor([[model.config.decoder_start_token_id, *text[:-1]]])
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), decoder_input_ids=target).logits
        scores = logits[0].log_softmax(-1)
        want = -sum(float(scores[i, id]) for i, id in enumerate(text)) / len(text)
        assert loss == pytest.approx(want, rel=1e-5)


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]


def test_the_lowest_mean_is_chosen() -> None:
    """Classes may stand in the prompt or in the text; what the model wants first comes first."""
    model = decoders()[2].eval()
    options = [("ab", "cd"), ("ae", "cd"), ("f", "cdg")]
    choice = choose_text(model, Letters(), options, begin=[30])
    pairs = [([30, *Letters().encode(p)], Letters().encode(t)) for p, t in options]
    assert choice.losses == score_texts(model, pairs)
    assert choice.losses[choice.option] == min(choice.losses)


def test_bad_input() -> None:
    model = decoders()[0]
    with pytest.raises(ConfigError, match="list of options is empty"):
        score_texts(model, [])
    with pytest.raises(DataError, match="option 1 has 2 prompt tokens and 0 text tokens"):
        score_texts(model, [([1], [2]), ([1, 2], [])])
    ant = CPMAntConfig(**WIDE, head_dim=8, prompt_types=3, prompt_length=2, segment_types=3)
    for other in (CPMAnt.from_config(ant), Bert.from_config(BertConfig(**WIDE, max_seq_len=32))):
        with pytest.raises(ConfigError, match=f"a {type(other).__name__} .* cannot score"):
            score_texts(other, OPTIONS)
