"""Tests for verbalizer classes: independent examples, gradients, calibration, saved state.

To test a verbalizer class, inherit `VerbalizerSuite` and define how a verbalizer is created; see
docs/guides/prompts.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.testing.character_tokenizer import CharacterTokenizer
from bmforge.testing.template_suite import open_tiny
from bmforge.testing.tolerance import assert_close
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt import PromptClassifier, Template

__all__ = ["VerbalizerSuite"]

_LETTERS = CharacterTokenizer()
_EXAMPLES: tuple[dict[str, Any], ...] = tuple(
    {"text_a": text, "meta": {"choice1": "yes", "choice2": "no", "choice3": "so"}}
    for text in ("a film", "not a good one", "dull", "we saw it")
)
_TAKES = ("logits", "words", "hidden", "both")


class VerbalizerSuite:
    """Tests of a verbalizer; a subclass defines `make`.

    Attributes:
        kind: kind of the tiny model: "masked", "causal" or "spans".
        examples: four valid examples.
        template: template text with the number of masks that the verbalizer needs.
    """

    kind: ClassVar[str] = "masked"
    examples: ClassVar[Sequence[Mapping[str, Any]]] = _EXAMPLES
    template: ClassVar[str] = '{"placeholder":"text_a"} is {"mask"}'

    def make(self, tokenizer: Tokenizer, model: Any) -> Any:
        """Return a verbalizer with at least two classes, for a model."""
        raise TypeError(
            f"{type(self).__name__} must define `make`, which returns the verbalizer to test."
        )

    def opened(self) -> PromptClassifier:
        """Return a new classifier with the verbalizer."""
        model = open_tiny(self.kind)
        template = Template(self.template, _LETTERS, model)
        verbalizer = self.make(_LETTERS, model).double()
        return PromptClassifier(model, template, verbalizer).eval()

    def test_attributes_of_the_verbalizer(self) -> None:
        """The verbalizer's attributes for input, masks, classes and normalization are correct."""
        verbalizer = self.opened().verbalizer
        assert verbalizer.takes in _TAKES
        assert verbalizer.num_classes >= 2
        assert verbalizer.num_masks >= 1
        assert isinstance(verbalizer.normalize, bool)

    def test_a_score_for_every_class(self) -> None:
        """Scores are finite, have the shape (B, C), and differ between examples."""
        classifier = self.opened()
        scores = classifier.classify(self.examples)
        assert scores.shape == (len(self.examples), classifier.verbalizer.num_classes)
        assert torch.isfinite(scores).all()
        assert not torch.equal(scores[0], scores[1])

    def test_batch_does_not_change_scores(self) -> None:
        """An example's scores do not depend on the other examples in a batch or their order."""
        classifier = self.opened()
        together = classifier.classify(self.examples)
        for row, example in enumerate(self.examples):
            assert_close(classifier.classify([example])[0], together[row])
        assert_close(classifier.classify(self.examples[::-1]), together.flip(0))

    def test_it_learns(self) -> None:
        """The model and the verbalizer's parameters have gradients, and the loss decreases."""
        classifier = self.opened().train()
        classes = classifier.verbalizer.num_classes
        questions = [classifier.ask(example) for example in self.examples]
        labels = [number % classes for number in range(len(questions))]
        batch = classifier.collate(questions, labels)
        trained = [p for p in classifier.parameters() if p.requires_grad]
        optimizer, losses = torch.optim.Adam(trained, lr=1e-3), []
        for _ in range(4):
            optimizer.zero_grad()
            loss = classifier(**batch).loss
            assert loss is not None
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        assert losses[-1] < losses[0]
        assert all(p.grad is not None for p in classifier.verbalizer.parameters())
        assert any(bool(p.grad.any()) for p in classifier.model.parameters() if p.grad is not None)

    def test_wrong_number_of_masks_is_refused(self) -> None:
        """A template with a different number of masks raises an error."""
        classifier = self.opened()
        text = classifier.template.text + '{"mask"}'
        template = Template(text, _LETTERS, open_tiny("masked"))
        with pytest.raises(ConfigError, match="masks"):
            PromptClassifier(classifier.model, template, classifier.verbalizer)

    def test_state_comes_back(self) -> None:
        """If a verbalizer's state is loaded into another one, both have the same scores."""
        first, other = self.opened(), self.opened()
        with torch.no_grad():
            for parameter in first.verbalizer.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
        other.verbalizer.load_state_dict(first.verbalizer.state_dict())
        assert_close(other.classify(self.examples), first.classify(self.examples))

    def test_calibration(self) -> None:
        """Calibration with uniform logits changes nothing; without examples it raises an error."""
        classifier = self.opened()
        verbalizer = classifier.verbalizer
        calibrate = getattr(verbalizer, "calibrate_", None)
        if calibrate is None:
            pytest.skip("it has no calibrate_")
        before = classifier.classify(self.examples)
        logits = self._vocab_logits(classifier)
        with pytest.raises(ConfigError, match="at least one"):
            calibrate(logits[:0])
        calibrate(torch.zeros_like(logits))
        after = classifier.classify(self.examples)
        keeps_shape = after.shape == before.shape and verbalizer.normalize
        if keeps_shape and getattr(verbalizer, "drop_ratio", 0) == 0:
            assert_close(after, before)
        calibrate(logits)
        assert torch.isfinite(classifier.classify(self.examples)).all()

    def _vocab_logits(self, classifier: PromptClassifier) -> Tensor:
        """Return the logits that the verbalizer reads, for the examples."""
        with torch.no_grad():
            questions = [classifier.ask(example) for example in self.examples]
            return classifier(**classifier.collate(questions)).vocab_logits
