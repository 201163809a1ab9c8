"""Words and templates that are searched for, against trying all of them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.models import GPT2, T5, GPT2Config, T5Config
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.tune.prompt import Template, search_label_words, search_templates

LETTERS = CharacterTokenizer()
EXAMPLES = [{"text_a": "a film"}, {"text_a": "so dull"}]
WORDS = ["good", "bad"]


def test_words_are_the_best_of_all_sets():
    torch.manual_seed(0)
    logits, labels = torch.randn(12, 9), torch.tensor([0, 1, 2] * 4)
    found = search_label_words(logits, labels, num_candidates=9, keep=6)
    chances = logits.softmax(-1)
    means = [chances[labels == number].mean(0) for number in range(3)]

    def judge(words):
        right = (logits[:, list(words)].argmax(-1) == labels).sum().item()
        return right, sum(float(means[n][word]) for n, word in enumerate(words))

    sets = [words for words in product(range(9), repeat=3) if len(set(words)) == 3]
    best = sorted(sets, key=judge, reverse=True)[:6]
    assert [tuple(words) for words, _ in found] == best
    assert found[0][1] == pytest.approx(judge(best[0])[0] / 12)
    few = search_label_words(logits, labels, max_tries=8, keep=1)  # two candidates a class
    assert judge(few[0][0])[0] <= judge(best[0])[0]
    with pytest.raises(ConfigError, match=r"classes without examples: \[0\]"):
        search_label_words(logits, torch.ones(12, dtype=torch.long))


class TwoSentinels(CharacterTokenizer):
    """Letters with no third sentinel: what is written ends with the end token."""

    def token_to_id(self, token: str) -> int | None:
        return None if token == "<extra_id_2>" else super().token_to_id(token)


@pytest.mark.parametrize("letters", [LETTERS, TwoSentinels()], ids=["sentinel", "end"])
@pytest.mark.long
def test_templates_are_the_likeliest_of_all(letters: CharacterTokenizer) -> None:
    config = T5Config(
        vocab_size=43, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, head_dim=8,
        init_std=1.5, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5.from_config(config, dtype=torch.float64).eval()
    found = search_templates(model, letters, EXAMPLES, WORDS, beams=5000, max_tokens=3, keep=4)
    s0, s1, s2 = (LETTERS.token_to_id(f"<s_{n}>") for n in range(3))
    plain = [id for id in range(43) if id not in {*LETTERS.special_ids.values(), s0, s1, s2}]
    if letters is not LETTERS:
        plain, s2 = [*plain, s2], LETTERS.eos_id
    # What stands between the sentinels: nothing, or one token in front or behind.
    written = [[s1, s2], *([a, s1, s2] for a in plain), *([s1, a, s2] for a in plain)]
    text = '{"placeholder":"text_a"} {"mask"} {"meta":"label_word"} {"mask"}'
    template, scores = Template(text, LETTERS, model), {}
    for ids in written:
        total = 0.0
        for example, word in zip(EXAMPLES, WORDS, strict=True):
            prompt = template.encode({**example, "meta": {"label_word": word}})
            logits = model(
                input_ids=torch.tensor([prompt.input_ids]),
                decoder_input_ids=torch.tensor([[0, s0, *ids[:-1]]]),
            ).logits[0, 1:].log_softmax(-1)  # fmt: skip
            total += logits[torch.arange(len(ids)), ids].sum().item() / 2
        scores[tuple(ids)] = total
    best = sorted(scores.values(), reverse=True)[:4]
    assert [score for _, score in found] == pytest.approx(best, rel=1e-6)
    for text, _ in found:
        assert Template(text, LETTERS, model).num_masks == 1
    causal = GPT2.from_config(GPT2Config(vocab_size=43, hidden_size=16, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="after its mask"):
        search_templates(causal, LETTERS, EXAMPLES, WORDS)
    with pytest.raises(ConfigError, match="2 examples and 1 words"):
        search_templates(model, LETTERS, EXAMPLES, WORDS[:1])
