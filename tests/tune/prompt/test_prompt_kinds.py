"""Templates by their published names are a `Template` with the options that say the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from golden_prompts import fresh_model, open_golden

from bmforge.errors import ConfigError
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.testing.template_suite import open_tiny
from bmforge.tokenizers import Tokenizer
from bmforge.tune.delta import list_deltas
from bmforge.tune.prompt import PrefixTemplate, PTRTemplate, PTuning, SoftTemplate, Template

SIZE, TEXT = 157, '{"placeholder":"text_a"} {"mask"}'
SOFT = '{"placeholder":"text_a"} {"soft"} {"soft"} {"mask"}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_golden("bert", tmp_path_factory.mktemp("kinds") / "bert")


@pytest.mark.parametrize(
    ("kind", "text", "told", "options"),
    [
        (SoftTemplate, TEXT, {}, {"front": 20}),
        (SoftTemplate, SOFT, {"num_tokens": 3}, {"front": 3}),
        (PTuning, SOFT, {}, {"encoder": "lstm"}),
        (PTuning, SOFT, {"encoder": "mlp"}, {"encoder": "mlp"}),
    ],
)
def test_named_templates_say_an_option(
    kind: Any, text: str, told: Any, options: Any, tokenizer: Tokenizer
) -> None:
    model = fresh_model("bert", SIZE)
    other = copy.deepcopy(model)
    found, plain = kind(text, tokenizer, model, **told), Template(text, tokenizer, other, **options)
    example = {"text_a": "a film"}
    assert found.encode(example) == plain.encode(example)
    assert len(found.rows) == len(plain.rows) > 0
    for ours, theirs in zip(found.soft_parameters, plain.soft_parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_a_prefix_is_a_delta() -> None:
    model = open_tiny("masked")
    template = PrefixTemplate(TEXT, CharacterTokenizer(), model, length=4)
    assert list(list_deltas(model)) == ["prefix_template"]
    assert all(parameter.requires_grad for parameter in template.soft_parameters)
    assert sum(p.requires_grad for p in model.parameters()) == len(template.soft_parameters)


def test_rules_need_several_masks(tokenizer: Tokenizer) -> None:
    model = fresh_model("bert", SIZE)
    assert PTRTemplate('{"mask"} of {"mask"}', tokenizer, model).num_masks == 2
    with pytest.raises(ConfigError, match="rules need at least 2"):
        PTRTemplate(TEXT, tokenizer, model)


def test_layers_need_rows_to_make(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no soft token"):
        PTuning(TEXT, tokenizer, fresh_model("bert", SIZE))
