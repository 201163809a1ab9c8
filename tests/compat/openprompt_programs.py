"""Programs of OpenPrompt's README and tutorials with changed imports, on tiny models."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import CrossEntropyLoss

from bmforge.compat.openprompt import (
    PromptDataLoader,
    PromptForClassification,
    PromptForGeneration,
)
from bmforge.compat.openprompt.data_utils import InputExample
from bmforge.compat.openprompt.data_utils.data_sampler import FewShotSampler
from bmforge.compat.openprompt.plms import load_plm
from bmforge.compat.openprompt.prompts import (
    KnowledgeableVerbalizer,
    ManualTemplate,
    ManualVerbalizer,
    MixedTemplate,
    SoftVerbalizer,
)
from bmforge.compat.openprompt.prompts.prefix_tuning_template import PrefixTuningTemplate
from bmforge.compat.openprompt.utils.calibrate import calibrate

CLASSES = ["negative", "positive"]
TEXTS = ["the film was badly made", "a wonderful story", "what a waste", "we loved it"]
LABELS = [0, 1, 0, 1]
WORDS = {"negative": ["bad"], "positive": ["good", "wonderful", "great"]}


def examples() -> list[InputExample]:
    """Return the data set."""
    pairs = zip(TEXTS, LABELS, strict=True)
    return [
        InputExample(guid=n, text_a=text, label=label, tgt_text=CLASSES[label])
        for n, (text, label) in enumerate(pairs)
    ]


def run_readme(kind: str, directory: str) -> list[int]:
    """The README's seven steps: zero-shot sentiment."""
    plm, tokenizer, _, wrapper = load_plm(kind, directory)
    template = ManualTemplate(text='{"placeholder":"text_a"} it was {"mask"}', tokenizer=tokenizer)
    verbalizer = ManualVerbalizer(classes=CLASSES, label_words=WORDS, tokenizer=tokenizer)
    model = PromptForClassification(template=template, plm=plm, verbalizer=verbalizer)
    loader = PromptDataLoader(
        dataset=examples(), tokenizer=tokenizer, template=template, tokenizer_wrapper_class=wrapper
    )
    model.eval()
    found = []
    with torch.no_grad():
        for batch in loader:
            logits = model(batch)
            found.append(int(torch.argmax(logits, dim=-1)))
    return found


def train(model: Any, loader: Any, groups: Any, epochs: int = 30) -> list[float]:
    """The loop of the tutorials."""
    loss_func, losses = CrossEntropyLoss(), []
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    for _ in range(epochs):
        total = 0.0
        for inputs in loader:
            logits = model(inputs)
            loss = loss_func(logits, inputs["label"])
            loss.backward()
            total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    return losses


def run_soft(kind: str, directory: str, soft_words: bool) -> list[float]:
    """A template with soft pieces on a frozen model, and a soft verbalizer where asked for."""
    plm, tokenizer, _, wrapper = load_plm(kind, directory)
    template = MixedTemplate(
        model=plm, tokenizer=tokenizer,
        text='{"placeholder":"text_a"} {"soft":"it was"} {"soft"} {"mask"}',
    )  # fmt: skip
    verbalizer: Any = ManualVerbalizer(tokenizer, num_classes=2, label_words=[["bad"], ["good"]])
    if soft_words:
        verbalizer = SoftVerbalizer(tokenizer, plm, num_classes=2, label_words=[["bad"], ["good"]])
    model = PromptForClassification(
        plm=plm, template=template, verbalizer=verbalizer, freeze_plm=True, plm_eval_mode=True
    )
    loader = PromptDataLoader(
        dataset=examples(), template=template, tokenizer=tokenizer, tokenizer_wrapper_class=wrapper,
        max_seq_length=32, batch_size=2, shuffle=True, truncate_method="head",
    )  # fmt: skip
    named = [(n, p) for n, p in model.template.named_parameters() if "raw_embedding" not in n]
    groups = [{"params": [p for _, p in named]}]
    if soft_words:
        groups.append({"params": verbalizer.group_parameters_1, "lr": 1e-3})
        groups.append({"params": verbalizer.group_parameters_2, "lr": 1e-3})
    return train(model, loader, groups)


def run_calibrated(kind: str, directory: str) -> tuple[torch.Tensor, Any]:
    """The knowledgeable verbalizer with calibration on a support set."""
    plm, tokenizer, _, wrapper = load_plm(kind, directory)
    template = ManualTemplate(tokenizer, '{"placeholder":"text_a"} it was {"mask"}')
    verbalizer = KnowledgeableVerbalizer(
        tokenizer, num_classes=2, label_words=[["bad", "waste"], ["good", "great"]],
        candidate_frac=0.0,
    )  # fmt: skip
    model = PromptForClassification(plm=plm, template=template, verbalizer=verbalizer)
    support = FewShotSampler(num_examples_total=2, also_sample_dev=False)(examples(), seed=1)
    told = {"template": template, "tokenizer": tokenizer, "tokenizer_wrapper_class": wrapper}
    logits = calibrate(model, PromptDataLoader(dataset=support, batch_size=2, **told))
    model.verbalizer.register_calibrate_logits(logits)
    model.eval()
    (batch,) = PromptDataLoader(dataset=examples(), batch_size=4, **told)
    with torch.no_grad():
        return model(batch), model


def run_generation(kind: str, directory: str) -> tuple[list[float], list[str]]:
    """Conditional generation by prefix tuning on a frozen model."""
    plm, tokenizer, _, wrapper = load_plm(kind, directory)
    template = PrefixTuningTemplate(
        model=plm, tokenizer=tokenizer, text='{"placeholder":"text_a"} it was {"mask"}',
        num_token=6, mid_dim=16,
    )  # fmt: skip
    loader = PromptDataLoader(
        dataset=examples(), template=template, tokenizer=tokenizer, tokenizer_wrapper_class=wrapper,
        max_seq_length=32, decoder_max_length=8, batch_size=4, teacher_forcing=True,
        predict_eos_token=True, truncate_method="head",
    )  # fmt: skip
    model = PromptForGeneration(plm=plm, template=template, freeze_plm=True, tokenizer=tokenizer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(60):
        for inputs in loader:
            loss = model(inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    written = []
    for inputs in loader:
        _, sentences = model.generate(inputs, max_length=4)
        written.extend(sentences)
    return losses, written
