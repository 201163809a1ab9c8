"""What every class of templates must do: cut by the laws, ask alike alone and in a batch.

A class of one's own inherits `TemplateSuite` in a test and says how one is made; see
docs/prompts.md.
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
from bmforge.nn.prompt import Prompt, count_ids
from bmforge.testing.letters import LetterTokenizer
from bmforge.testing.tolerance import assert_close
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt import Encoded, Template
from bmforge.tune.prompt.call import ask_model
from bmforge.tune.prompt.questions import Question, lay_questions
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
_LETTERS = LetterTokenizer()
_EXAMPLES: tuple[dict[str, Any], ...] = (
    {"text_a": "a film", "text_b": "so so", "meta": {"by": "ann"}},
    {"text_a": "not a good one, we thought", "text_b": "dull", "meta": {"by": "bob"}},
    {"text_a": "fine", "text_b": "", "meta": {"by": "cy"}},
)


def open_tiny(kind: str, seed: int = 0) -> Any:
    """Return a tiny model in float64 that is asked in one of the ways of `TINY_MODELS`."""
    model_class, config = TINY_MODELS[kind]
    model = model_class.from_config(config, dtype=torch.float64)
    init_weights_(model, seed)
    return model.eval()


class TemplateSuite:
    """Laws of templates; a test class inherits it and defines `template_class`, or `make`.

    Attributes:
        template_class: a `Template`, or a class that inherits it.
        text: that it is made with; its masks stand last, so that every kind of model reads it.
        kinds: ways of asking that it is for.
        examples: at least two that it takes.
    """

    template_class: ClassVar[type[Template]]
    text: ClassVar[str] = '{"placeholder":"text_a"} {"meta":"by","shortenable":False} is {"mask"}'
    kinds: ClassVar[Sequence[str]] = tuple(TINY_MODELS)
    examples: ClassVar[Sequence[Mapping[str, Any]]] = _EXAMPLES

    def make(self, tokenizer: Tokenizer, model: Any) -> Template:
        """Return a template on a model."""
        return self.template_class(self.text, tokenizer, model)

    def opened(self) -> Iterator[tuple[Any, Template]]:
        """Yield a fresh model and template of every kind."""
        for kind in self.kinds:
            model = open_tiny(kind)
            yield model, self.make(_LETTERS, model)

    def test_pieces_are_of_the_example(self) -> None:
        """Pieces have the masks that the template says, and an example is not changed by them."""
        for _, template in self.opened():
            for example in self.examples:
                before = repr(example)
                pieces = template.wrap(example)
                masks = sum(piece.kind == "mask" for piece in pieces)
                assert masks >= template.num_masks >= 1
                assert pieces == template.wrap(example)
                assert repr(example) == before

    def test_ids_are_known_to_the_model(self) -> None:
        """Every id is a token's or a row's; places of answers lie in the prompt, one a mask."""
        for model, template in self.opened():
            for example in self.examples:
                prompt = template.encode(example)
                assert max(prompt.input_ids) < count_ids(model.embed)
                assert len(prompt.mask_at) == template.num_masks
                answered = prompt.decoder_input_ids or prompt.input_ids
                assert all(0 <= place < len(answered) for place in prompt.mask_at)
                assert prompt == template.encode(example)

    @pytest.mark.parametrize("cut", CUTS)
    def test_cutting(self, cut: Any) -> None:
        """A cut prompt has exactly the longest length; what may not be cut is in every one."""
        for _, template in self.opened():
            for example in self.examples:
                whole = template.encode(example)
                assert whole.num_cut == 0
                least = _shortest(template, example, cut)
                kept = template.encode(example, least, cut)
                for longest in range(least, len(whole) + 2):
                    found = template.encode(example, longest, cut)
                    assert len(found) == min(longest, len(whole))
                    assert found.num_cut == len(whole) - len(found)
                    assert _is_inside(kept.input_ids, found.input_ids)
                    assert len(found.mask_at) == len(whole.mask_at)
                with pytest.raises(ConfigError, match="row 7"):
                    template.encode(example, least - 1, cut, "row 7")

    def test_a_missing_field_is_named(self) -> None:
        """An example without what the template asks for is an error, not an empty text."""
        for _, template in self.opened():
            with pytest.raises(ConfigError, match="asks for"):
                template.wrap({})

    def test_alone_and_together(self) -> None:
        """What is said of an example does not depend on the others of its batch."""
        for model, template in self.opened():
            together = _ask(model, [template.encode(one) for one in self.examples])
            for row, example in enumerate(self.examples):
                assert_close(together[row], _ask(model, [template.encode(example)])[0])

    def test_what_is_trained(self) -> None:
        """Trained parts are in the model, get gradients, and learn; a template may have none."""
        for model, template in self.opened():
            trained = template.soft_parameters
            ours = {id(parameter) for parameter in model.parameters()}
            assert {id(parameter) for parameter in trained} <= ours
            if not trained:
                continue
            prompts = [template.encode(one) for one in self.examples]
            optimizer, losses = torch.optim.Adam(trained, lr=1e-3), []
            for _ in range(4):
                optimizer.zero_grad()
                said = _ask(model, prompts).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(said, torch.arange(len(said)) + 20)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            assert all(p.grad is not None and bool(p.grad.any()) for p in trained)
            assert losses[-1] < losses[0]

    def test_saved_with_the_model(self, tmp_path: Path) -> None:
        """Rows are saved with the model, and read back by a template made anew on it."""
        for model, template in self.opened():
            rows = getattr(model.embed, "prompt", None)
            if not isinstance(rows, Prompt):
                continue  # nothing trained, or what is folded first
            with torch.no_grad():
                rows.weight.add_(0.5)
            prompts = [template.encode(one) for one in self.examples]
            want = _ask(model, prompts)
            folder = tmp_path / type(model).__name__
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder, dtype=torch.float64)
            assert_close(_ask(again, prompts), want, rtol=1e-5, atol=1e-5)


def _shortest(template: Template, example: Any, cut: Any) -> int:
    """Return the least length that a prompt fits into."""
    for longest in range(1, len(template.encode(example)) + 1):
        try:
            template.encode(example, longest, cut)
        except ConfigError:
            continue
        return longest
    raise AssertionError("no length is enough for the prompt's own")


def _is_inside(some: Sequence[int], ids: Sequence[int]) -> bool:
    """Tell whether ids hold some others in their order."""
    rest = iter(ids)
    return all(id in rest for id in some)


def _ask(model: Any, prompts: Sequence[Encoded]) -> Tensor:
    """Return what a model says at the masks of prompts: (B, M, V)."""
    columns = lay_questions([Question([one], [], []) for one in prompts], _LETTERS.pad_id or 0)
    batch = {name: torch.tensor(values) for name, values in columns.items()}
    found = ask_model(model, batch, batch.pop("mask_at"))
    assert found is not None
    return found.logits
