"""Trained and found label words, classes as texts, levels and losses: against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from golden_prompts import CASES, open_golden
from torch import nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.models import GPT2, T5, Bert, BertConfig, GPT2Config, T5Config
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.tune.prompt import (
    AutomaticVerbalizer,
    GenerationVerbalizer,
    ManualVerbalizer,
    PrefixTemplate,
    PromptClassifier,
    PrototypeVerbalizer,
    SoftVerbalizer,
    Template,
    score_levels,
)
from bmforge.tune.prompt.classifier import class_loss

RECORDED = CASES["verbalizer"]
LETTERS = CharacterTokenizer()
SIZES = {"vocab_size": 43, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.3}
FAMILIES = {
    "bert": (Bert, BertConfig(**SIZES, intermediate_size=24, max_seq_len=48, head="masked_lm")),
    "gpt2": (GPT2, GPT2Config(**SIZES, max_seq_len=48)),
    "t5": (T5, T5Config(**{**SIZES, "init_std": 1.0}, intermediate_size=24, head_dim=8)),
}
TEXT = '{"placeholder":"text_a"} is {"mask"}'
EXAMPLES = [{"text_a": "a film"}, {"text_a": "not so bad"}, {"text_a": "dull"}]


def build(name):
    family, config = FAMILIES[name]
    model = family.from_config(config, dtype=torch.float64).eval()
    return model, Template(TEXT, LETTERS, model)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_head_begin_as_the_models_own(name):
    model, template = build(name)
    soft = SoftVerbalizer(["<!>g", ["<!>bd", "never"]], LETTERS, model)
    classifier = PromptClassifier(model, template, soft).eval()
    found = classifier.classify(EXAMPLES)
    logits = classifier.look(EXAMPLES).logits
    head = model.mlm_head.decoder if name == "bert" else model.lm_head
    logits = logits if head.bias is None else logits - head.bias
    g, b, d = (LETTERS.token_to_id(letter) for letter in "gbd")
    expected = torch.stack((logits[:, g], (logits[:, b] + logits[:, d]) / 2), 1)
    torch.testing.assert_close(found, expected)
    loss = classifier(**classifier.collate([classifier.ask(e) for e in EXAMPLES], [0, 1, 1])).loss
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in soft.parameters())
    assert {n for n, _ in soft.named_parameters() if "decoder" in n} == set()


def test_a_head_is_needed_for_rows_of_one():
    with pytest.raises(ConfigError, match="no head"):
        SoftVerbalizer(["<!>g", "<!>b"], LETTERS, nn.Linear(2, 2))


def test_points_are_pulled_to_their_classes():
    torch.manual_seed(0)
    hidden = torch.cat((torch.randn(4, 6) + 2, torch.randn(4, 6) - 2))
    labels = torch.tensor([0] * 4 + [1] * 4)
    ours = PrototypeVerbalizer(2, 6, size=5)
    rows = nn.functional.normalize(hidden @ ours.project.weight.detach().T, dim=-1)
    points = nn.functional.normalize(ours.points.detach(), dim=-1)
    total = 0.0
    for i in range(8):  # the paper's sums, term by term
        chance = math.exp(rows[i] @ points[labels[i]]) / sum(math.exp(rows[i] @ p) for p in points)
        total -= math.log(chance) / (2 * 2 * 4)
        below = sum(math.exp(rows[i] @ row) for row in rows)
        same = [j for j in range(8) if labels[j] == labels[i]]
        total -= sum(math.log(math.exp(rows[i] @ rows[j]) / below) for j in same) / (4 * 16)
    assert ours.loss(hidden, labels).item() == pytest.approx(total, rel=1e-5)
    ours.fit_(hidden, labels, epochs=60, lr=0.02)
    assert torch.equal(ours(hidden).argmax(-1), labels)
    with pytest.raises(ShapeError, match=r"\[1\] have no example"):
        ours.fit_(hidden[:4], labels[:4])


def test_points_and_words_together_are_the_mean_of_both():
    model, template = build("bert")
    words = ManualVerbalizer(["<!>g", "<!>b", "<!>d"], LETTERS)
    both = PrototypeVerbalizer(3, 16, words=words).double()
    found = PromptClassifier(model, template, both).classify(EXAMPLES)
    logits, hidden = PromptClassifier(model, template, both).look(EXAMPLES, hidden=True)
    alone = both(hidden, logits) * 2
    assert torch.isfinite(both(hidden, torch.zeros_like(logits))).all()  # of words all alike

    def spread(scores):
        return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True)

    both.words, expected = None, spread(words(logits))
    expected = expected + spread(both(hidden))
    torch.testing.assert_close(found * 2, alone.detach())
    torch.testing.assert_close(alone, expected)
    with pytest.raises(ConfigError, match="expected: 4"):
        PrototypeVerbalizer(4, 16, words=words)


@pytest.mark.parametrize(
    "case", [c for c in RECORDED["cases"] if c["kind"] == "automatic"], ids=str
)
def test_found_words_classify_like_given_ones(case, tmp_path):
    tokenizer = open_golden("bert", tmp_path)
    logits = torch.tensor(RECORDED["automatic_logits"])
    labels = torch.tensor(RECORDED["automatic_labels"])
    ours = AutomaticVerbalizer(
        int(labels.max()) + 1, tokenizer, words_per_class=case["words_per_class"],
        num_candidates=case["num_candidates"], score=case["score"], balance=case["balance"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="Call fit_"):
        ours(logits)
    ours.fit_(logits, labels)
    assert ours.ids[..., 0].tolist() == case["chosen_ids"]
    chosen = logits[:, ours.ids[..., 0]]
    expected = chosen.flatten(1).log_softmax(-1).view_as(chosen).mean(-1)
    torch.testing.assert_close(ours(logits), expected, rtol=1e-5, atol=1e-5)
    if "output" in case:
        torch.testing.assert_close(ours(logits), torch.tensor(case["output"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_classes_as_texts_of_each_example(name):
    model, template = build(name)
    rules = ['{"meta":"first"}', 'no {"meta":"second","post_processing":"lower"} !']
    texts = GenerationVerbalizer(rules, LETTERS, rule=True)
    examples = [
        {"text_a": "a film", "meta": {"first": "abc", "second": "DE"}},
        {"text_a": "so", "meta": {"first": "x", "second": "YZ"}},
    ]
    assert texts.write(examples[0], 1) == "no de !"
    classifier = PromptClassifier(model, template, texts)
    found = classifier.classify(examples)
    for row, example in enumerate(examples):
        for label in range(2):
            ids = LETTERS.encode(texts.write(example, label))
            prompt = template.encode(example, answer=ids)
            batch = classifier.collate([prompt])
            places = batch.pop("mask_at")[0]
            logits = model(**batch).logits[0, places].log_softmax(-1)
            score = logits[torch.arange(len(ids)), ids].sum()
            torch.testing.assert_close(found[row, label], score.detach())
    texts.per_token = True
    lengths = torch.tensor([[3, 7], [1, 7]])
    torch.testing.assert_close(classifier.classify(examples), found / lengths)
    with pytest.raises(ConfigError, match="the model generates it"):
        GenerationVerbalizer(['{"mask"}', "a"], LETTERS, rule=True)


def test_text_behind_a_causal_mask_is_scored_after_each_word():
    model, _ = build("gpt2")
    text = '{"placeholder":"text_a"} is {"mask"} , yes'
    with pytest.raises(ConfigError, match="behind='score'"):
        Template(text, LETTERS, model)
    template = Template(text, LETTERS, model, behind="score")
    words = ManualVerbalizer(["good", "bad"], LETTERS, join="joint", normalize=False)
    found = PromptClassifier(model, template, words).classify(EXAMPLES[:1])[0]
    for number, word in enumerate((" good", " bad")):
        ids = torch.tensor(LETTERS.encode(f"a film is{word} , yes"))
        first = len("a film is")
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        score = logits[torch.arange(first - 1, len(ids) - 1), ids[first:]].sum()
        torch.testing.assert_close(found[number], score.detach())
    with pytest.raises(ConfigError, match="join='joint'"):
        PromptClassifier(model, template, ManualVerbalizer(["good", "bad"], LETTERS))


def test_calibrated_words_of_several_tokens_are_equally_likely_on_their_own_text():
    model, template = build("gpt2")
    words = ManualVerbalizer([["good", "fine"], ["bad"]], LETTERS, join="joint")
    classifier = PromptClassifier(model, template, words)
    with torch.no_grad():
        said = classifier(**next(classifier.batches(EXAMPLES[:1]))).vocab_logits
    assert said.shape == (1, 3)
    words.calibrate_(said)
    expected = torch.full((1, 2), math.log(1 / 3), dtype=torch.float64)
    torch.testing.assert_close(classifier.classify(EXAMPLES[:1]), expected, rtol=1e-6, atol=1e-6)


def test_examples_stand_in_front_of_a_prompt():
    template = build("gpt2")[1]
    template.show([{"text_a": "dull"}], ["bad"])
    shown = template.encode(EXAMPLES[0])
    assert LETTERS.decode(shown.input_ids) == "dull is bad<unk>a film is"
    with pytest.raises(ConfigError, match="1 examples, but 0 answers"):
        template.show([EXAMPLES[0]], [])


def test_levels_add_up_and_losses_are_closed_forms():
    scores = torch.randn(3, 4)
    classes = ["a-x", "a-y", "b", "c-x-z"]
    (first, one), (second, two), (third, three) = score_levels(scores, classes)
    assert (first, second, third) == (["a", "b", "c"], ["a-x", "a-y", "b", "c-x"], classes)
    chances = scores.softmax(-1)
    torch.testing.assert_close(one[:, 0].exp(), chances[:, :2].sum(-1))
    torch.testing.assert_close(two.exp(), chances)
    torch.testing.assert_close(three.exp(), chances)
    words = ManualVerbalizer(["<!>g", "<!>b"], LETTERS, normalize=False)
    pair, wanted = scores[:, :2], torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    yes = pair.sigmoid()
    expected = -(wanted * yes.log() + (1 - wanted) * (1 - yes).log()).mean(-1)
    torch.testing.assert_close(class_loss(pair, wanted, words), expected)
    share = torch.tensor([0.0, 1.0, 0.25])
    logs = pair.log_softmax(-1)
    expected = -((1 - share) * logs[:, 0] + share * logs[:, 1])
    torch.testing.assert_close(class_loss(pair, share, words), expected)
    words.normalize = True
    with pytest.raises(ConfigError, match="normalize=False"):
        class_loss(pair, wanted, words)
    with pytest.raises(ShapeError, match="two classes"):
        class_loss(scores, share, words)


def test_a_prefix_alone_is_trained():
    model, _ = build("gpt2")
    template = PrefixTemplate(TEXT, LETTERS, model, length=3)
    words = ManualVerbalizer(["good", "bad"], LETTERS, join="mean")
    classifier = PromptClassifier(model, template, words, frozen=True)
    batch = classifier.collate([classifier.ask(one) for one in EXAMPLES], [0, 1, 1])
    classifier(**batch).loss.backward()
    trained = {id(parameter) for parameter in template.soft_parameters}
    assert len(trained) == len(list(template.delta.parameters())) > 0
    assert all((p.grad is not None) == (id(p) in trained) for p in model.parameters())
