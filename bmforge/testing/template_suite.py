"""Tests for prompt template classes: truncation, equal outputs alone and in a batch, training.

To test a template class, inherit `TemplateSuite` and define how a template is created; see
docs/guides/prompts.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models import GPT2, T5, Bert, BertConfig, GPT2Config, Model, T5Config, init_weights_
from bmforge.nn.prompt import ExtraEmbeddings, count_ids
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.testing.tolerance import assert_close
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt import Encoded, Template
from bmforge.tune.prompt.call import run_at_answers
from bmforge.tune.prompt.questions import Question, collate_questions
from bmforge.tune.prompt.truncate import CUTS

__all__ = ["TINY_MODELS", "TemplateSuite", "open_tiny"]

_SIZES: dict[str, Any] = {"vocab_size": 43, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
TINY_MODELS: Mapping[str, tuple[type[Model], Any]] = {
    "masked": (
        Bert,
        BertConfig(**_SIZES, intermediate_size=24, max_seq_len=96, head="masked_lm", init_std=0.3),
    ),
    "causal": (GPT2, GPT2Config(**_SIZES, max_seq_len=96, init_std=0.3)),
    "spans": (T5, T5Config(**_SIZES, intermediate_size=24, head_dim=8, init_std=1.0)),
}
_LETTERS = CharacterTokenizer()
_EXAMPLES: tuple[dict[str, Any], ...] = (
    {"text_a": "a film", "text_b": "so so", "meta": {"by": "ann"}},
    {"text_a": "not a good one, we thought", "text_b": "dull", "meta": {"by": "bob"}},
    {"text_a": "fine", "text_b": "", "meta": {"by": "cy"}},
)


def open_tiny(kind: str, seed: int = 0) -> Any:
    """Return a tiny float64 model of a kind in `TINY_MODELS`."""
    model_class, config = TINY_MODELS[kind]
    model = model_class.from_config(config, dtype=torch.float64)
    init_weights_(model, seed)
    return model.eval()


class TemplateSuite:
    """Tests of a template; a subclass sets `template_class` or defines `make`.

    Attributes:
        template_class: `Template`, or a subclass.
        text: template text; the masks are at the end, so that every kind of model supports it.
        kinds: kinds of models that the template supports.
        examples: at least two valid examples.
    """

    template_class: ClassVar[type[Template]]
    text: ClassVar[str] = '{"placeholder":"text_a"} {"meta":"by","shortenable":False} is {"mask"}'
    kinds: ClassVar[Sequence[str]] = tuple(TINY_MODELS)
    examples: ClassVar[Sequence[Mapping[str, Any]]] = _EXAMPLES

    def make(self, tokenizer: Tokenizer, model: Any) -> Template:
        """Return a template for a model."""
        return self.template_class(self.text, tokenizer, model)

    def opened(self) -> Iterator[tuple[Any, Template]]:
        """Yield a new model and template for every kind of model."""
        for kind in self.kinds:
            model = open_tiny(kind)
            yield model, self.make(_LETTERS, model)

    def test_wrapped_example(self) -> None:
        """A wrapped example contains the template's masks, and the example is not changed."""
        for _, template in self.opened():
            for example in self.examples:
                before = repr(example)
                pieces = template.wrap(example)
                masks = sum(piece.kind == "mask" for piece in pieces)
                assert masks >= template.num_masks >= 1
                assert pieces == template.wrap(example)
                assert repr(example) == before

    def test_ids_are_valid(self) -> None:
        """All ids are valid, and every mask has one answer position inside the prompt."""
        for model, template in self.opened():
            for example in self.examples:
                prompt = template.encode(example)
                assert max(prompt.input_ids) < count_ids(model.embed)
                assert len(prompt.mask_at) == template.num_masks
                answered = prompt.decoder_input_ids or prompt.input_ids
                assert all(0 <= position < len(answered) for position in prompt.mask_at)
                assert prompt == template.encode(example)

    @pytest.mark.parametrize("cut", CUTS)
    def test_cutting(self, cut: Any) -> None:
        """A truncated prompt has exactly the maximum length and keeps protected tokens."""
        for _, template in self.opened():
            for example in self.examples:
                full = template.encode(example)
                assert full.num_cut == 0
                minimum = _shortest(template, example, cut)
                shortest = template.encode(example, minimum, cut)
                for max_length in range(minimum, len(full) + 2):
                    encoded = template.encode(example, max_length, cut)
                    assert len(encoded) == min(max_length, len(full))
                    assert encoded.num_cut == len(full) - len(encoded)
                    assert _is_inside(shortest.input_ids, encoded.input_ids)
                    assert len(encoded.mask_at) == len(full.mask_at)
                with pytest.raises(ConfigError, match="row 7"):
                    template.encode(example, minimum - 1, cut, "row 7")

    def test_a_missing_field_is_named(self) -> None:
        """A missing field raises an error that names the field."""
        for _, template in self.opened():
            with pytest.raises(ConfigError, match="needs the placeholder"):
                template.wrap({})

    def test_batch_does_not_change_logits(self) -> None:
        """An example's logits do not depend on the other examples of its batch."""
        for model, template in self.opened():
            together = _ask(model, [template.encode(prompted) for prompted in self.examples])
            for row, example in enumerate(self.examples):
                assert_close(together[row], _ask(model, [template.encode(example)])[0])

    def test_what_is_trained(self) -> None:
        """Trained parameters, if any, have gradients, and training them reduces the loss."""
        for model, template in self.opened():
            trained = template.soft_parameters
            own_ids = {id(parameter) for parameter in model.parameters()}
            assert {id(parameter) for parameter in trained} <= own_ids
            if not trained:
                continue
            prompts = [template.encode(example) for example in self.examples]
            optimizer, losses = torch.optim.Adam(trained, lr=1e-3), []
            for _ in range(4):
                optimizer.zero_grad()
                logits = _ask(model, prompts).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)) + 20)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            assert all(p.grad is not None and bool(p.grad.any()) for p in trained)
            assert losses[-1] < losses[0]

    def test_saved_with_the_model(self, tmp_path: Path) -> None:
        """Soft tokens are saved with the model and loaded by a new template."""
        for model, template in self.opened():
            rows = getattr(model.embed, "prompt", None)
            if not isinstance(rows, ExtraEmbeddings):
                continue  # there are no trained parameters, or they must be merged first
            with torch.no_grad():
                rows.weight.add_(0.5)
            prompts = [template.encode(example) for example in self.examples]
            want = _ask(model, prompts)
            folder = tmp_path / type(model).__name__
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder, dtype=torch.float64)
            assert_close(_ask(again, prompts), want, rtol=1e-5, atol=1e-5)


def _shortest(template: Template, example: Any, cut: Any) -> int:
    """Return the smallest maximum length to which the prompt can be truncated."""
    for length in range(1, len(template.encode(example)) + 1):
        try:
            template.encode(example, length, cut)
        except ConfigError:
            continue
        return length
    raise AssertionError("the template's own text does not fit into any max_seq_len.")


def _is_inside(some: Sequence[int], ids: Sequence[int]) -> bool:
    """Return True if `some` is a subsequence of `ids`."""
    iterator = iter(ids)
    return all(id in iterator for id in some)


def _ask(model: Any, prompts: Sequence[Encoded]) -> Tensor:
    """Return the logits (B, M, V) at the masks of the prompts."""
    columns = collate_questions(
        [Question([prompt], [], []) for prompt in prompts], _LETTERS.pad_id or 0
    )
    batch = {name: torch.tensor(values) for name, values in columns.items()}
    answer = run_at_answers(model, batch, batch.pop("mask_at"))
    assert answer is not None
    return answer.logits
