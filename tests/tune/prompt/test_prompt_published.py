"""Every task's own templates on every kind of model: what is cut, and what never is."""

from __future__ import annotations

import random

import pytest
from prompt_layouts import KINDS

from bmforge.data.tasks import TASKS, TaskExample
from bmforge.errors import ConfigError
from bmforge.testing.character_tokenizer import character_tokenizer_for
from bmforge.testing.prompt_suite import prompted_config
from bmforge.tune.prompt import Template
from bmforge.tune.prompt.published_templates import find_published, read_published
from bmforge.tune.prompt.truncate import CUTS

FIELDS = {
    "BoolQ": ("passage", "question"),
    "CB": ("premise", "hypothesis"),
    "COPA": ("premise", "question"),
    "RTE": ("premise", "hypothesis"),
    "WiC": ("sentence1", "sentence2", "word"),
    "WSC": ("text", "span1_text", "span2_text", "span1_index", "span2_index"),
    "MultiRC": ("passage", "question", "answer"),
    "ReCoRD": ("passage", "query"),
    "ag_news": ("title", "text"),
    "eprstmt": ("sentence",),
    "ChnSentiCorp": ("text_a",),
    "csldcp": ("content",),
    "dbpedia": ("title", "content"),
    "yahoo_answers": ("title", "question", "answer"),
    "amazon_polarity": ("title", "text"),
    "imdb": ("text",),
    "SST-2": ("sentence",),
    "MNLI": ("sentence1", "sentence2"),
    "SNLI": ("sentence1", "sentence2"),
    "TACRED": ("text", "subj_text", "obj_text", "subj_type", "obj_type"),
    "Few-NERD": ("sentence", "entity"),
    "LAMA": ("before", "after", "subject", "relation"),
    "WebNLG": ("triples", "category"),
}
EACH = 200


def draw(task, generator):
    """An example whose texts are random letters."""

    def text():
        return "".join(generator.choices("abc def", k=generator.choice((1, 9, 60, 300))))

    fields = {name: text() for name in FIELDS[task]}
    choices = (text(), text()) if task in ("COPA", "ReCoRD", "LAMA") else ()
    return TaskExample(fields, 0, 0, choices)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", FIELDS)
def test_the_laws_of_truncation(task, kind):
    family, config = KINDS[kind]
    generator = random.Random(task + kind)
    examples = [draw(task, generator) for _ in range(EACH)]
    for text in find_published(TASKS[task], examples[0]).templates:
        model = family.from_config(prompted_config(config), device="meta")
        tokenizer = character_tokenizer_for(model)
        if kind == "gpt2" and text.startswith('{"mask"}'):
            continue  # nothing stands before the mask
        blanks = f"<extra_id_{text.count('mask') - 1}>"
        if kind == "t5" and tokenizer.token_to_id(blanks) is None:
            with pytest.raises(ConfigError, match=f"no mask token {blanks}"):
                Template(text, tokenizer, model, behind="leave out")
            continue
        template = Template(text, tokenizer, model, behind="leave out")
        for number, example in enumerate(examples):
            whole = len(template.encode(example, 10**6))
            fixed = whole - _count_cuttable(template, example)
            for longest in (32, 128, 512):
                cut = CUTS[number % 3]
                if fixed > longest:
                    with pytest.raises(ConfigError, match="row 3 does not fit"):
                        template.encode(example, longest, cut, "row 3")
                    continue
                found = template.encode(example, longest, cut)
                assert len(found) == min(whole, longest)
                assert found.num_cut == max(0, whole - longest)
                _check_mask(template, found, tokenizer)


def _count_cuttable(template, example):
    """Tokens of what may be cut, of the pieces that the model reads."""
    total = 0
    for piece in template.wrap(example):
        if piece.kind == "mask" and not template.prompt_format.reads_after_mask:
            break
        total += len(template._read(piece)) if piece.shortenable else 0
    return total


def _check_mask(template, found, tokenizer):
    """The mask is where it is said to be."""
    form = template.prompt_format.form
    assert len(found.mask_at) == template.num_masks
    if template.num_masks > 1:
        assert form != "row" or {found.input_ids[p] for p in found.mask_at} == {tokenizer.mask_id}
        return
    (place,) = found.mask_at
    if form == "apart":
        assert found.input_ids.count(template.blanks[0]) == 1
    elif form == "row" and template.prompt_format.shows_mask:
        assert found.input_ids[place] == tokenizer.mask_id
    elif form == "row":
        assert place == len(found) - 1
    elif form == "behind":
        assert found.input_ids[place] == tokenizer.role_id("sop")
        assert found.input_ids.count(tokenizer.mask_id) == 1
    elif form == "hidden":
        assert found.columns["context"][place + 1] == 0
        assert sum(found.columns["context"]) == len(found) - 1
    else:
        assert found.input_ids[place] == tokenizer.bos_id
        assert found.columns["context"][place] == 0


def test_every_class_has_words():
    assert set(read_published()) <= set(TASKS)
    for name, published in read_published().items():
        masks = {text.count('{"mask"}') for text in published.templates}
        if not published.words:
            assert masks == {1}, name
            continue
        assert len(published.words) == len(TASKS[name].label_names), name
        if masks == {1}:
            assert len(set(sum(published.words, ()))) == sum(map(len, published.words)), name
        else:
            assert {len(row) for row in published.words} == masks, name
            assert len(set(published.words)) == len(published.words), name
