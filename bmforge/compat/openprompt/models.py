"""OpenPrompt's modules, which combine model, template and verbalizer, and take batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.openprompt.examples import InputFeatures
from bmforge.errors import ConfigError
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.infer.generation import generate
from bmforge.surgery import eval_mode
from bmforge.tune.prompt import PromptClassifier, PromptGenerator
from bmforge.tune.prompt.call import PositionOutputs, run_at_answers

__all__ = ["PromptForClassification", "PromptForGeneration", "PromptModel", "calibrate"]

# Batch entries that are not inputs of the model.
_TOLD = ("label", "guid", "tgt_text", "examples", "targets", "max_seq_len")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_BESIDE = (*_TOLD, "answers", "which")


class PromptModel(nn.Module):
    """A language model with a prompt template.

    Args:
        plm: model of bmforge or transformers.
        template: template of this package.
        freeze_plm: train only the template and the verbalizer.
        plm_eval_mode: keep the model's dropout off in training.
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
        """Set the training mode like torch, except for a model with `plm_eval_mode`."""
        super().train(mode)
        if self.plm_eval_mode:
            self.plm.eval()
        return self

    def look(self, batch: Mapping[str, Any], hidden: bool = True) -> PositionOutputs:
        """Run the model; return its logits and hidden states at the mask positions of a batch."""
        inputs = {name: value for name, value in batch.items() if name not in _BESIDE}
        outputs = run_at_answers(self.plm, inputs, inputs.pop("mask_at"), hidden)
        assert outputs is not None
        return outputs

    @property
    def device(self) -> Any:
        """Device of the model."""
        return next(self.plm.parameters()).device


class _Prompted(nn.Module):
    """Base class of `PromptForClassification` and `PromptForGeneration`, with shared attributes."""

    def __init__(self, plm: Any, template: Any, freeze_plm: bool, plm_eval_mode: bool) -> None:
        super().__init__()
        self.prompt_model = PromptModel(plm, template, freeze_plm, plm_eval_mode)

    @property
    def plm(self) -> Any:
        """The language model."""
        return self.prompt_model.plm

    @property
    def template(self) -> Any:
        """The prompt template."""
        return self.prompt_model.template

    @property
    def device(self) -> Any:
        """Device of the model."""
        return self.prompt_model.device


class PromptForClassification(_Prompted):
    """Module that returns class scores for a batch.

    Args:
        plm, template, freeze_plm, plm_eval_mode: as in `PromptModel`.
        verbalizer: verbalizer of this package.
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
        """The equivalent `PromptClassifier` of bmforge."""
        core = self.template.bind("", self.plm)
        return PromptClassifier(self.plm, core, self.verbalizer.core)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the class scores, (B, C)."""
        return self.classifier(**_inputs_of(batch)).class_logits

    def forward_without_verbalize(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the verbalizer's input: logits at the mask, or word scores."""
        return self.classifier(**_inputs_of(batch)).vocab_logits

    def look(self, batch: Mapping[str, Any]) -> PositionOutputs:
        """Run the model; return its logits and last hidden states at the first mask."""
        outputs = self.prompt_model.look(batch)
        assert outputs.hidden is not None
        return PositionOutputs(outputs.logits[:, 0], outputs.hidden[:, 0])


class PromptForGeneration(_Prompted):
    """Module that returns the loss of target texts, and generates texts.

    Args:
        plm, template, freeze_plm, plm_eval_mode: as in `PromptModel`.
        gen_config: default options of `generate`.
        tokenizer: accepted and ignored; the template's tokenizer is used.
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
        """The equivalent `PromptGenerator` of bmforge."""
        write = generate if hasattr(self.plm, "traits") else None
        return PromptGenerator(self.plm, self.template.bind("", self.plm), write)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss: summed over the tokens of an example, averaged over the examples."""
        return self.generator(labels=batch["targets"], **_inputs_of(batch)).loss

    def generate(
        self, batch: InputFeatures, verbose: bool = False, **options: Any
    ) -> tuple[list[list[int]], list[str]]:
        """Generate ids and texts for a batch of examples.

        Args:
            batch: batch of a `PromptDataLoader`.
            verbose: print the texts.
            options: options of `bmforge.infer.generate`, or of transformers for its models;
                `max_length` and `min_length` count new tokens.
        """
        settings = {**self.gen_config, **options}
        for name, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if name in settings:
                settings[new] = settings.pop(name)
        if settings.get("max_new_tokens") is None:
            settings.pop("max_new_tokens", None)
        if hasattr(self.plm, "traits") and not find_end_tokens(self.plm.config, None):
            settings.pop("min_new_tokens", None)  # without an end token it has no effect
        if not settings.get("do_sample", False):
            # The original ignores sampling options in greedy decoding; bmforge would raise an
            # error.
            settings = {name: value for name, value in settings.items() if name not in _SAMPLING}
        texts = self.generator.write(
            batch["examples"], len(batch["examples"]), batch["max_seq_len"], **settings
        )
        if verbose:
            print("\n".join(texts))
        core = self.template.bind("", self.plm)
        return core.tokenizer.encode_plain(texts), texts


@torch.no_grad()
def calibrate(prompt_model: Any, dataloader: Any) -> Tensor:
    """Return the mean logits at the masks over a loader's examples.

    Args:
        prompt_model: a `PromptForClassification`.
        dataloader: loader of examples; their labels are not used.

    Raises:
        ConfigError: the loader is empty.
    """
    device = prompt_model.device
    with eval_mode(prompt_model):
        logits = [prompt_model.forward_without_verbalize(b.to(device)) for b in dataloader]
    if not logits:
        raise ConfigError(
            "calibration needs at least one text, but the support set is empty. Add examples."
        )
    return torch.cat(logits).mean(0)


def _inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Select the model's inputs from a batch."""
    return {name: value for name, value in batch.items() if name not in _TOLD}
