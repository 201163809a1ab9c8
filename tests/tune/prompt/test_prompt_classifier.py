"""Classifying by prompts against OpenPrompt's recorded runs, gradients included."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from golden_prompts import CASES, ROOT, SPIECE, open_golden
from safetensors.torch import save_file

from bmforge.errors import ConfigError
from bmforge.models import GPT2, T5, Bert
from bmforge.tune.prompt import (
    ManualVerbalizer,
    PromptClassifier,
    Template,
    calibrate,
    classify_together,
    fold_rows_,
)

RUNS = np.load(ROOT / "tests/golden/prompt_models.npz")
FAMILIES = {"bert": Bert, "gpt2": GPT2, "t5": T5}
NAMES = ("bert_mixed", "bert_soft", "gpt2_mixed", "gpt2_soft", "t5_mixed",
         "bert_ptuning_lstm", "bert_ptuning_mlp")  # fmt: skip
HEADS = {"bert": "masked_lm", "gpt2": "language_model", "t5": "sequence_to_sequence"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in FAMILIES:
        if name != "t5" or SPIECE.exists():
            open_golden(name, folder / name)
    return folder


def build(name, folders):
    """A recorded run in our classes, the template's tensors put in."""
    family, config = name.split("_")[0], json.loads(str(RUNS[f"{name}/config"]))
    if family == "t5" and not SPIECE.exists():
        pytest.skip("T5's vocabulary is not in this checkout")
    asked = {key: config.pop(key) for key in ("template", "kind", "label_words", "class")}
    prefix = f"{family}/weight:"
    weights = {k.removeprefix(prefix): torch.tensor(RUNS[k]) for k in RUNS if k.startswith(prefix)}
    folder = folders / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [asked["class"]]}))
    save_file(weights, folder / "model.safetensors")
    model = FAMILIES[family].from_pretrained(folder, head=HEADS[family])
    tokenizer = open_golden(family, folders / family)
    soft, made = asked["kind"] == "soft", name.rpartition("_")[2]
    template = Template(
        asked["template"], tokenizer, model, front=4 if soft else 0,
        encoder=made if asked["kind"] == "ptuning" else "",
    )  # fmt: skip
    words = ManualVerbalizer(asked["label_words"], tokenizer)
    classifier = PromptClassifier(model, template, words, frozen=True).eval()
    tensors = trained(name, template)
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(recorded(name, "template", key))
    return classifier, tensors


def trained(name, template):
    """Their name -> our tensor."""
    if "ptuning" not in name:
        theirs = "soft_embeds" if name.endswith("soft") else "soft_embedding.weight"
        return {theirs: template.soft_parameters[0]}
    ours = dict(template._prompt.named_parameters())
    renames = {"inputs": "new_embedding", "lstm": "new_lstm_head", "mlp": "new_mlp_head"}
    return {
        key.replace(key.split(".")[0], renames[key.split(".")[0]], 1): p for key, p in ours.items()
    }


def recorded(name, kind, key):
    tensor = torch.tensor(RUNS[f"{name}/{kind}:{key}"])
    return tensor[1:] if key == "soft_embedding.weight" else tensor  # row 0 stands for no row


def as_recorded(name, classifier):
    """The batch that the original's loader made."""
    given = {k.split(":")[1]: torch.tensor(RUNS[k]) for k in RUNS if k.startswith(f"{name}/input")}
    ids, mask, size = given["input_ids"], given["attention_mask"], classifier.template.vocab_size
    places = given["loss_ids"] == 1
    if "soft_token_ids" in given:
        soft = given["soft_token_ids"]
        ids = torch.where(soft > 0, size + soft - 1, ids)
    front = classifier.template.front
    if front:
        ids = torch.cat(((size + torch.arange(front)).expand(len(ids), -1), ids), 1)
        mask = torch.nn.functional.pad(mask, (front, 0), value=1)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": given["label"]}
    batch["mask_at"] = places.int().argmax(1, keepdim=True) + front
    if "decoder_input_ids" in given:
        batch["decoder_input_ids"] = given["decoder_input_ids"]
    return batch


@pytest.mark.parametrize("name", NAMES)
def test_scores_loss_and_gradients_are_the_recorded_ones(name, folders):
    classifier, tensors = build(name, folders)
    batch = as_recorded(name, classifier)
    out = classifier(**batch)
    out.loss.backward()
    near = {"rtol": 1e-5, "atol": 1e-5}
    expected = recorded(name, "output", "class_logits")
    torch.testing.assert_close(out.class_logits, expected, **near)
    torch.testing.assert_close(out.loss, recorded(name, "output", "loss"), **near)
    at_mask = recorded(name, "output", "vocab_logits_at_mask")
    torch.testing.assert_close(out.vocab_logits[:, :64], at_mask, **near)
    for key, tensor in tensors.items():
        # A causal wrapper of the original drops soft rows without words: no gradient is there.
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        torch.testing.assert_close(grad, recorded(name, "grad", key), **near)
    assert all(p.grad is None for k, p in classifier.model.named_parameters() if "prompt" not in k)


@pytest.mark.parametrize("name", ["bert_mixed", "bert_soft", "bert_ptuning_mlp", "t5_mixed"])
def test_prompts_are_put_together_as_recorded(name, folders):
    classifier, _ = build(name, folders)
    encoded = [classifier.template.encode(one, 28) for one in CASES["examples"][:2]]
    ours, theirs = classifier.collate(encoded), as_recorded(name, classifier)
    length = ours["input_ids"].shape[1]
    shown = ours["attention_mask"]
    assert torch.equal(shown, theirs["attention_mask"][:, :length])
    assert torch.equal(ours["input_ids"] * shown, theirs["input_ids"][:, :length] * shown)
    assert torch.equal(ours["mask_at"], theirs["mask_at"])


def test_padding_changes_nothing_and_calibration_divides(folders):
    classifier, _ = build("gpt2_soft", folders)
    examples = CASES["examples"][:3]
    together = classifier.classify(examples, size=3)
    alone = classifier.classify(examples, size=1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    calibrate(classifier, [examples[0]])
    chances = classifier.classify([examples[0]]).exp()
    torch.testing.assert_close(chances, torch.full((1, 2), 0.25))  # mean of logs of four words
    with pytest.raises(ConfigError, match="at least one text"):
        calibrate(classifier, [])


def test_a_verbalizer_of_other_masks_is_refused(folders):
    model = build("bert_mixed", folders)[0].model
    del model.embed.prompt
    tokenizer = open_golden("bert", folders / "bert")
    two = Template('{"mask"} {"mask"}', tokenizer, model)
    with pytest.raises(ConfigError, match="has 2 masks"):
        PromptClassifier(model, two, ManualVerbalizer(["good", "bad"], tokenizer))


def test_an_ensemble_is_the_mean_of_its_templates(folders):
    model = build("bert_mixed", folders)[0].model
    del model.embed.prompt
    tokenizer = open_golden("bert", folders / "bert")
    words = ManualVerbalizer(["bad", "good"], tokenizer)
    texts = [
        '{"placeholder":"text_a"} it was {"mask"}',
        'a {"mask"} film : {"placeholder":"text_a"}',
    ]
    both = [PromptClassifier(model, Template(t, tokenizer, model), words) for t in texts]
    examples = CASES["examples"]
    first, second = (one.classify(examples) for one in both)  # one word a class: log-probabilities
    together = classify_together(both, examples)
    torch.testing.assert_close(together.exp(), (first.exp() + second.exp()) / 2)
    by_logits = (first + second).div(2).exp()
    expected = by_logits / by_logits.sum(-1, keepdim=True)
    torch.testing.assert_close(classify_together(both, examples, "logits").exp(), expected)
    with pytest.raises(ConfigError, match="no classifiers"):
        classify_together([], examples)
    three = PromptClassifier(
        model, both[0].template, ManualVerbalizer(["bad", "good", "great"], tokenizer)
    )
    with pytest.raises(ConfigError, match="different numbers of classes: 2, 3"):
        classify_together([both[0], three], examples)


@pytest.mark.parametrize("join", ["first", "max", "mean"])
def test_the_overviews_example_is_a_closed_form_of_the_logits(join, folders):
    model = build("bert_mixed", folders)[0].model
    del model.embed.prompt
    tokenizer = open_golden("bert", folders / "bert")
    template = Template('{"placeholder":"text_a"} 它真的很{"mask"}', tokenizer, model)
    classifier = PromptClassifier(model, template, ManualVerbalizer(["糟", "棒"], tokenizer, join))
    text = "我觉得浪费生命"
    scores = classifier.classify([{"text_a": text}])
    cls, sep, mask = (tokenizer.token_to_id(t) for t in ("[CLS]", "[SEP]", "[MASK]"))
    ids = [cls, *tokenizer.encode(text), *tokenizer.encode("它真的很"), mask, sep]
    logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, -2]
    pair = logits[[tokenizer.token_to_id("糟"), tokenizer.token_to_id("棒")]]
    torch.testing.assert_close(scores[0], pair.log_softmax(-1).detach())


@pytest.mark.parametrize("name", ["bert_mixed", "bert_ptuning_mlp"])
def test_a_saved_model_is_opened_with_its_rows(name, folders, tmp_path):
    classifier, _ = build(name, folders)
    fold_rows_(classifier.model)
    classifier.model.save_pretrained(tmp_path)
    rows = Bert.from_pretrained(tmp_path, head="masked_lm").embed.prompt.weight
    assert torch.equal(rows, classifier.model.embed.prompt.weight)
    assert rows.abs().sum() > 0
