"""Our own templates and verbalizers keep the laws that a third party's are tested by."""

from __future__ import annotations

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.testing.template_suite import TemplateSuite, open_tiny
from bmforge.testing.verbalizer_suite import VerbalizerSuite
from bmforge.tune.prompt import (
    AutomaticVerbalizer,
    GenerationVerbalizer,
    KnowledgeableVerbalizer,
    ManualVerbalizer,
    OneToOneVerbalizer,
    PrefixTemplate,
    PrototypeVerbalizer,
    PTRVerbalizer,
    SoftVerbalizer,
    Template,
)

WORDS = [["<!>g", "<!>fine"], ["<!>bad"]]


class TestPlain(TemplateSuite):
    template_class = Template


class TestSoft(TemplateSuite):
    template_class = Template
    text = '{"soft"}{"placeholder":"text_a"} {"soft":"it was","shortenable":False} {"mask"}'

    def make(self, tokenizer, model):
        return Template(self.text, tokenizer, model, front=2)


class TestShared(TemplateSuite):
    template_class = Template
    text = '{"soft":None,"soft_id":1}{"placeholder":"text_b"} {"soft":None,"soft_id":1}{"mask"}'


class TestMade(TemplateSuite):
    template_class = Template
    text = '{"soft"}{"soft"}{"placeholder":"text_a"} {"soft"} {"mask"}'

    def make(self, tokenizer, model):
        return Template(self.text, tokenizer, model, encoder="lstm")


class TestPrefix(TemplateSuite):
    template_class = PrefixTemplate
    text = '{"soft"}{"placeholder":"text_a"} {"mask"}'


class TestSeveralMasks(TemplateSuite):
    template_class = Template
    kinds = ("masked", "spans")
    text = '{"mask"} of {"placeholder":"text_a"} : {"mask"} and {"placeholder":"text_b"}'


class TestShown(TemplateSuite):
    template_class = Template

    def make(self, tokenizer, model):
        template = Template(self.text, tokenizer, model)
        template.show([{"text_a": "so", "meta": {"by": "di"}}], ["good"])
        return template


class _Uncut(Template):
    """A class that breaks a law: it cuts nothing."""

    def encode(self, example, max_seq_len=512, *given, **options):
        return super().encode(example, 512, *given, **options)


class _Leaking(ManualVerbalizer):
    """A class that breaks a law: a row's score depends on the others."""

    def forward(self, logits):
        return super().forward(logits - logits.mean(0) * torch.arange(logits.shape[1]))


def test_the_suites_find_what_breaks_a_law():
    class Uncut(TemplateSuite):
        template_class = _Uncut

    class Leaking(VerbalizerSuite):
        def make(self, tokenizer, model):
            return _Leaking(WORDS, tokenizer)

    Uncut().test_batch_does_not_change_logits()
    with pytest.raises(AssertionError):
        Uncut().test_cutting("tail")
    with pytest.raises(AssertionError):
        Leaking().test_batch_does_not_change_scores()


@pytest.mark.parametrize("join", ["first", "max", "mean", "joint"])
class TestManual(VerbalizerSuite):
    @pytest.fixture(autouse=True)
    def _join(self, join):
        self.join = join

    def make(self, tokenizer, model):
        return ManualVerbalizer(WORDS, tokenizer, join=self.join)


class TestPlainScores(VerbalizerSuite):
    kind = "causal"

    def make(self, tokenizer, model):
        return ManualVerbalizer(WORDS, tokenizer, normalize=False)


class TestKnowledgeable(VerbalizerSuite):
    def make(self, tokenizer, model):
        return KnowledgeableVerbalizer(WORDS, tokenizer, drop_ratio=0.0, temperature=0.5)


class TestFound(VerbalizerSuite):
    def make(self, tokenizer, model):
        found = AutomaticVerbalizer(3, tokenizer, words_per_class=2)
        logits = torch.randn(9, 43, generator=torch.Generator().manual_seed(1))
        found.fit_(logits, torch.arange(9) % 3)
        return found


class TestOneToOne(VerbalizerSuite):
    kind = "spans"

    def make(self, tokenizer, model):
        return OneToOneVerbalizer(["<!>a", "<!>b", "<!>c"], tokenizer)


@pytest.mark.parametrize("per_mask", [False, True])
class TestRules(VerbalizerSuite):
    template = '{"mask"} is {"placeholder":"text_a"} {"mask"}'

    @pytest.fixture(autouse=True)
    def _per_mask(self, per_mask):
        self.per_mask = per_mask

    def make(self, tokenizer, model):
        words = [["<!>a", "<!>x"], ["<!>a", "<!>y"], ["<!>b", "<!>x"]]
        return PTRVerbalizer(words, tokenizer, self.per_mask)


@pytest.mark.parametrize("kind", ["masked", "causal", "spans"])
class TestRowsOfAHead(VerbalizerSuite):
    @pytest.fixture(autouse=True)
    def _kind(self, kind):
        self.kind = kind

    def make(self, tokenizer, model):
        return SoftVerbalizer(["<!>g", "<!>b"], tokenizer, model)


class TestPoints(VerbalizerSuite):
    def make(self, tokenizer, model):
        return PrototypeVerbalizer(3, 16, size=8)


class TestPointsAndWords(VerbalizerSuite):
    def make(self, tokenizer, model):
        words = ManualVerbalizer(["<!>a", "<!>b", "<!>c"], tokenizer)
        return PrototypeVerbalizer(3, 16, size=8, words=words)


@pytest.mark.parametrize("kind", ["causal", "spans"])
class TestTexts(VerbalizerSuite):
    @pytest.fixture(autouse=True)
    def _kind(self, kind):
        self.kind = kind

    def make(self, tokenizer, model):
        rules = [f'{{"meta":"choice{n}"}}' for n in (1, 2, 3)]
        return GenerationVerbalizer(rules, tokenizer, rule=True)


def test_a_suite_says_what_is_left_to_define():
    with pytest.raises(TypeError, match="must define `make`"):
        VerbalizerSuite().test_batch_does_not_change_scores()
    with pytest.raises(ConfigError):
        ManualVerbalizer([], CharacterTokenizer())
    assert open_tiny("masked").config.vocab_size == CharacterTokenizer().vocab_size
