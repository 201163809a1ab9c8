"""Sources of prompts: nothing is read before it is asked for, and losses are the modules' own."""

from __future__ import annotations

import pytest
import torch

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer.generation import generate
from bmforge.models import GLM, GPT2, T5, Bert, BertConfig, GLMConfig, GPT2Config, T5Config
from bmforge.recipes.inputs.examples import ExampleConfig, ExampleLoader
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.tune.prompt import (
    ManualVerbalizer,
    PromptClassifier,
    PromptGenerator,
    PromptRows,
    TargetRows,
    Template,
    prompt_objective,
    target_objective,
)

LETTERS = CharacterTokenizer()
SIZES = {"vocab_size": 43, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.3}
FAMILIES = {
    "gpt2": (GPT2, GPT2Config(**SIZES, max_seq_len=48)),
    "t5": (T5, T5Config(**SIZES, intermediate_size=24, head_dim=8)),
    "glm": (GLM, GLMConfig(**SIZES, max_seq_len=64, sop_token_id=5, mask_token_id=4)),
}
TEXT = '{"placeholder":"text_a"} is {"mask"}'
EXAMPLES = [{"text_a": "a film"}, {"text_a": "not so bad"}, {"text_a": "dull"}]


class Many:
    """A million examples that are made when they are asked for."""

    def __init__(self):
        self.asked = set()

    def __len__(self):
        return 1_000_000

    def __getitem__(self, number):
        self.asked.add(number)
        return {"text_a": f"film {number}"}


def test_a_million_examples_are_not_read_before_their_turn():
    model = Bert.from_config(
        BertConfig(**SIZES, intermediate_size=24, max_seq_len=48, head="masked_lm")
    )
    examples = Many()
    words = ManualVerbalizer(["good", "bad"], LETTERS, join="mean")
    rows = PromptRows(Template(TEXT, LETTERS, model), words, examples, range(1_000_000), 32)
    assert examples.asked == {0, 999_999}  # for the fingerprint
    config = ExampleConfig(paths=("x",), global_batch_size=4, micro_batch_size=2, seq_len=32)
    loader = ExampleLoader(rows, config)
    first, second = next(loader)
    assert len(examples.asked) <= 7
    assert first["labels"].shape == (2, 2)
    again = ExampleLoader(rows, config)
    next(loader)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(again)[0]["input_ids"], next(loader)[0]["input_ids"])
    assert not torch.equal(first["labels"], second["labels"])


def test_the_objective_is_the_mean_of_the_rows_losses():
    model = Bert.from_config(
        BertConfig(**SIZES, intermediate_size=24, max_seq_len=48, head="masked_lm")
    ).eval()
    template = Template(TEXT, LETTERS, model)
    for join in ("mean", "joint"):
        words = ManualVerbalizer(["good", "bad"], LETTERS, join=join)
        rows = PromptRows(template, words, EXAMPLES, [0, 1, -100], 40)
        batch = rows.collate([rows.make(n, ()) for n in range(3)])
        found = prompt_objective(words)(model, batch, 2.0)
        classifier = PromptClassifier(model, template, words)
        asked = [classifier.ask(one) for one in EXAMPLES[:2]]
        torch.testing.assert_close(found, classifier(**classifier.collate(asked, [0, 1])).loss)
        assert model.count_items(batch) == 2
    with pytest.raises(ConfigError, match="3 examples, but 1 labels"):
        PromptRows(template, words, EXAMPLES, [0])


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_learned_as_a_closed_form_and_written(name):
    family, config = FAMILIES[name]
    model = family.from_config(config, dtype=torch.float64).eval()
    template = Template(TEXT, LETTERS, model)
    writer = PromptGenerator(model, template, generate)
    targets = ["good", "fine", "bad"]
    prompts = [writer.encode(e, t) for e, t in zip(EXAMPLES, targets, strict=True)]
    out = writer(**writer.collate(prompts))
    total = 0.0
    for prompt in prompts:  # alone, without padding, from all logits
        batch = writer.collate([prompt])
        places, labels = batch.pop("mask_at")[0], batch.pop("labels")[0]
        logits = model(**batch).logits[0, places].log_softmax(-1)
        total -= logits[torch.arange(len(labels)), labels].sum()
    torch.testing.assert_close(out.loss, total / 3)
    rows = TargetRows(template, EXAMPLES, targets, 40)
    batch = rows.collate([rows.make(n, ()) for n in range(3)])
    items = model.count_items(batch)
    assert items == sum(len(prompt.predicted) for prompt in prompts)
    torch.testing.assert_close(target_objective(model, batch, items) * items, total)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(120):
        loss = writer(**writer.collate(prompts)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert writer.write(EXAMPLES, size=2, max_new_tokens=6) == targets


def test_logits_of_some_places_only():
    model = Bert.from_config(
        BertConfig(**SIZES, intermediate_size=24, max_seq_len=48, head="masked_lm")
    ).eval()
    ids, places = torch.randint(8, 40, (2, 9)), torch.tensor([[1, 4], [8, 0]])
    every = model(ids).logits
    some = model(ids, logits_at=places).logits
    torch.testing.assert_close(some, every[torch.arange(2)[:, None], places])
    with pytest.raises(ShapeError, match="has no effect with labels"):
        model(ids, labels=ids, logits_at=places)
    with pytest.raises(ShapeError, match=r"must have the shape \(B=2, M\)"):
        model(ids, logits_at=places[0])
    causal = GPT2.from_config(FAMILIES["gpt2"][1])
    with pytest.raises(ShapeError, match="without logits_to_keep"):
        causal(ids, logits_at=places, logits_to_keep=1)
    causal = GPT2.from_config(FAMILIES["gpt2"][1].replace(head="none"))
    with pytest.raises(ShapeError, match="the head 'none'"):
        causal(ids, logits_at=places)


def test_models_that_fill_masks_write_no_texts():
    model = Bert.from_config(
        BertConfig(**SIZES, intermediate_size=24, max_seq_len=48, head="masked_lm")
    )
    with pytest.raises(ConfigError, match="format 'masked'"):
        PromptGenerator(model, Template(TEXT, LETTERS, model))
    causal = GPT2.from_config(FAMILIES["gpt2"][1])
    with pytest.raises(ConfigError, match=r"write=bmforge\.infer\.generate"):
        PromptGenerator(causal, Template(TEXT, LETTERS, causal)).write(EXAMPLES)
