"""Verbalizers, automatic words and few-shot draws against OpenPrompt's own numbers."""

from __future__ import annotations

import math

import pytest
import torch
from golden_prompts import CASES, open_golden

from bmforge.errors import ConfigError
from bmforge.tune.prompt import (
    KnowledgeableVerbalizer,
    ManualVerbalizer,
    OneToOneVerbalizer,
    PTRVerbalizer,
    draw_few,
    find_label_tokens,
)

RECORDED = CASES["verbalizer"]
LOGITS = torch.tensor(RECORDED["logits"])
PRIOR = torch.tensor(RECORDED["calibration_logits"])[None]


def cases(kind):
    return [case for case in RECORDED["cases"] if case["kind"] == kind]


def close(actual, expected):
    torch.testing.assert_close(actual.detach(), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_golden("bert", tmp_path_factory.mktemp("words"))


@pytest.mark.parametrize("case", cases("manual"), ids=str)
def test_words_chosen_by_hand(case, tokenizer):
    normalize = case.get("post_log_softmax", True)
    ours = ManualVerbalizer(case["label_words"], tokenizer, case["multi_token"], normalize)
    if "ids" in case:
        assert ours.ids.tolist() == case["ids"]
    if case["calibrated"]:
        ours.calibrate_(PRIOR)
    close(ours(LOGITS), case["output"])


@pytest.mark.parametrize("case", cases("knowledgeable"), ids=str)
def test_words_of_a_knowledge_base(case, tokenizer):
    ours = KnowledgeableVerbalizer(
        case["label_words"], tokenizer, case["max_token_split"], case["candidate_frac"],
        case["pred_temp"],
    )  # fmt: skip
    if case["calibrated"]:
        ours.calibrate_(PRIOR)
    assert ours.words == [[w.strip() for w in row] for row in case["kept_words"]]
    ours.weights.data = torch.tensor(case["weights"])
    close(ours.train(case["mode"] == "train")(LOGITS), case["output"])


@pytest.mark.parametrize("case", cases("automatic"), ids=str)
def test_words_that_are_found(case):
    ours = find_label_tokens(
        torch.tensor(RECORDED["automatic_logits"]), torch.tensor(RECORDED["automatic_labels"]),
        words_per_class=case["words_per_class"], num_candidates=case["num_candidates"],
        score=case["score"], balance=case["balance"],
    )  # fmt: skip
    assert ours == case["chosen_ids"]


def test_words_at_several_masks_and_one_word_a_class(tokenizer):
    (case,) = cases("ptr")
    logits = torch.tensor(case["logits"])
    close(PTRVerbalizer(case["label_words"], tokenizer)(logits), case["output"])
    both = PTRVerbalizer(case["label_words"], tokenizer, per_mask=True)
    close(both(logits), case["output_with_labels"])
    (case,) = cases("one2one")
    ours = OneToOneVerbalizer(case["label_words"], tokenizer, join=case["multi_token"])
    close(ours(LOGITS), case["output"])
    with pytest.raises(ConfigError, match="several words"):
        OneToOneVerbalizer([["good", "great"], ["bad"]], tokenizer)


def test_closed_forms(tokenizer):
    ours = ManualVerbalizer(["bad", "good"], tokenizer)
    expected = LOGITS[:, ours.ids.flatten()].log_softmax(-1)
    torch.testing.assert_close(ours(LOGITS), expected)
    ours.calibrate_(torch.zeros(3, LOGITS.shape[1]))
    torch.testing.assert_close(ours(LOGITS), expected)
    ours.calibrate_(LOGITS[:1])
    torch.testing.assert_close(ours(LOGITS[:1]), torch.full((1, 2), math.log(0.5)))


def test_words_that_tell_nothing_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="class 0 and in class 1"):
        ManualVerbalizer([["good"], ["bad", "good"]], tokenizer)
    with pytest.raises(ConfigError, match="cannot encode"):
        ManualVerbalizer(["good", "☃"], tokenizer)
    with pytest.raises(ConfigError, match="no label words: 1"):
        ManualVerbalizer([["good"], []], tokenizer)
    with pytest.raises(ConfigError, match="at least one text"):
        ManualVerbalizer(["good", "bad"], tokenizer).calibrate_(PRIOR[:0])
    with pytest.raises(ConfigError, match=r"drop_ratio=1\.0"):
        KnowledgeableVerbalizer(["good", "bad"], tokenizer, drop_ratio=1.0).calibrate_(PRIOR)


@pytest.mark.parametrize("case", CASES["sampler"]["cases"], ids=str)
def test_few_examples_are_the_ones_the_original_draws(case):
    each = case.get("num_examples_per_label", 0)
    counts = {"per_label": each, "total": case.get("num_examples_total", 0)}
    labels, dev = CASES["sampler"]["labels"], case.get("also_sample_dev", False)
    found = draw_few(labels, **counts, seed=case["seed"], with_dev=dev, allow_fewer=True)
    assert list(found)[: len(case["guids"])] == case["guids"]
    if each == 50:
        with pytest.raises(ConfigError, match="per_label=50"):
            draw_few(labels, **counts, seed=case["seed"])
