"""OpenPrompt's modules: a model, a template and a verbalizer that are called with a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bmforge.compat.openprompt.examples import InputFeatures
from bmforge.infer.generate import generate
from bmforge.tune.prompt import PromptClassifier, PromptGenerator
from bmforge.tune.prompt.call import Answers, ask_model

__all__ = ["PromptForClassification", "PromptForGeneration", "PromptModel"]

# What tells of a batch and is no input of ours, and of the model itself.
_TOLD = ("label", "guid", "tgt_text", "examples", "targets")
_BESIDE = (*_TOLD, "answers", "which")


class PromptModel(nn.Module):
    """A model and a template.

    Args:
        plm: the model, ours or transformers'.
        template: of this package.
        freeze_plm: train only the template and the verbalizer.
        plm_eval_mode: the model's dropout stays off in training.
    """

    def __init__(
        self, plm: Any, template: Any, freeze_plm: bool = False, plm_eval_mode: bool = False
    ) -> None:
        super().__init__()
        self.plm, self.template = plm, template
        self.freeze_plm, self.plm_eval_mode = freeze_plm, plm_eval_mode
        if freeze_plm:
            own = {id(parameter) for parameter in template.parameters()}
            for parameter in plm.parameters():
                parameter.requires_grad_(id(parameter) in own)
        if plm_eval_mode:
            plm.eval()

    def train(self, mode: bool = True) -> PromptModel:
        """As torch's; the model stays as `plm_eval_mode` has it."""
        super().train(mode)
        if self.plm_eval_mode:
            self.plm.eval()
        return self

    def look(self, batch: Mapping[str, Any], hidden: bool = True) -> Answers:
        """Return what the model says at a batch's masks."""
        inputs = {name: value for name, value in batch.items() if name not in _BESIDE}
        found = ask_model(self.plm, inputs, inputs.pop("mask_at"), hidden)
        assert found is not None
        return found

    @property
    def device(self) -> Any:
        """Where the model is."""
        return next(self.plm.parameters()).device


class _Prompted(nn.Module):
    """What both wrappers have of a `PromptModel`."""

    def __init__(self, plm: Any, template: Any, freeze_plm: bool, plm_eval_mode: bool) -> None:
        super().__init__()
        self.prompt_model = PromptModel(plm, template, freeze_plm, plm_eval_mode)

    @property
    def plm(self) -> Any:
        """The model."""
        return self.prompt_model.plm

    @property
    def template(self) -> Any:
        """The template."""
        return self.prompt_model.template

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.prompt_model.device


class PromptForClassification(_Prompted):
    """Returns the classes' scores of a batch.

    Args:
        plm, template, freeze_plm, plm_eval_mode: as of a `PromptModel`.
        verbalizer: of this package.
    """

    def __init__(
        self,
        plm: Any,
        template: Any,
        verbalizer: Any,
        freeze_plm: bool = False,
        plm_eval_mode: bool = False,
    ) -> None:
        super().__init__(plm, template, freeze_plm, plm_eval_mode)
        self.verbalizer = verbalizer

    @property
    def tokenizer(self) -> Any:
        """The template's tokenizer."""
        return self.template.tokenizer

    @property
    def classifier(self) -> PromptClassifier:
        """The same as ours."""
        core = self.template.bind("", self.plm)
        return PromptClassifier(self.plm, core, self.verbalizer.core)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the classes' scores, (B, C)."""
        return self.classifier(**_inputs_of(batch)).class_logits

    def forward_without_verbalize(self, batch: Mapping[str, Any]) -> Tensor:
        """Return what the verbalizer is given: scores of tokens at the mask, or of words."""
        return self.classifier(**_inputs_of(batch)).vocab_logits

    def look(self, batch: Mapping[str, Any]) -> Answers:
        """Return scores of tokens and last hidden states at the one mask."""
        found = self.prompt_model.look(batch)
        assert found.hidden is not None
        return Answers(found.logits[:, 0], found.hidden[:, 0])


class PromptForGeneration(_Prompted):
    """Returns the loss of texts to be written, and writes texts.

    Args:
        plm, template, freeze_plm, plm_eval_mode: as of a `PromptModel`.
        gen_config: what `generate` does where it is not told; a mapping.
        tokenizer: not needed: it is the template's.
    """

    def __init__(
        self,
        plm: Any,
        template: Any,
        freeze_plm: bool = False,
        plm_eval_mode: bool = False,
        gen_config: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(plm, template, freeze_plm, plm_eval_mode)
        self.tokenizer = tokenizer or template.tokenizer
        self.gen_config = dict(gen_config or {})

    @property
    def generator(self) -> PromptGenerator:
        """The same as ours."""
        write = generate if hasattr(self.plm, "traits") else None
        return PromptGenerator(self.plm, self.template.bind("", self.plm), write)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss: of an example the sum of its tokens', then the mean."""
        return self.generator(labels=batch["targets"], **_inputs_of(batch)).loss

    def generate(
        self, batch: InputFeatures, verbose: bool = False, **options: Any
    ) -> tuple[list[list[int]], list[str]]:
        """Return ids and texts that the model writes for a batch's examples, all at a time.

        Args:
            batch: of a `PromptDataLoader`.
            verbose: print what was written.
            options: of `bmforge.infer.generate`, or of transformers' models theirs; `max_length`
                counts new tokens.
        """
        told = {**self.gen_config, **options}
        if "max_length" in told:
            told["max_new_tokens"] = told.pop("max_length")
        told.pop("max_new_tokens", None) if told.get("max_new_tokens") is None else None
        texts = self.generator.write(batch["examples"], len(batch["examples"]), **told)
        if verbose:
            print("\n".join(texts))
        core = self.template.bind("", self.plm)
        return core.tokenizer.encode_plain(texts), texts


def _inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model is given of a batch."""
    return {name: value for name, value in batch.items() if name not in _TOLD}
