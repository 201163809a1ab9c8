"""Prompt-based generation: trains and runs a model that writes text at a template's mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError
from bmforge.tune.prompt.call import run_at_answers
from bmforge.tune.prompt.questions import Question, collate_questions
from bmforge.tune.prompt.template import Encoded, Template

__all__ = ["PromptGenerator", "WriteOutput", "encode_target", "target_loss"]

Batch = dict[str, Tensor]
# Kinds of models that generate token by token after the prompt.
_WRITING = ("causal", "spans", "prefix spans", "dialogues", "blanks")


class WriteOutput(NamedTuple):
    """Output of a `PromptGenerator`.

    Attributes:
        loss: loss summed over each sample's target tokens and averaged over the samples.
        logits: (B, L, V), at the positions that predict the target's tokens.
    """

    loss: Tensor
    logits: Tensor


class PromptGenerator(nn.Module):
    """Language model that writes text at the mask of a template.

    Args:
        model: language model that the template was built for.
        template: template with one mask, where texts are written.
        write: function (model, input_ids, attention_mask, **options) -> ids that the method `write`
            calls, such as `bmforge.infer.generate` (default: the model's method `generate`).
        frozen: True to train only the template's soft tokens.

    Raises:
        ConfigError: the template has several masks, or the model predicts only one token per mask.
    """

    def __init__(
        self,
        model: nn.Module,
        template: Template,
        write: Callable[..., Tensor] | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        if template.num_masks != 1 or not template.prompt_format.is_autoregressive:
            raise ConfigError(
                "generation needs a template with one mask and a model that generates token by "
                f"token, but the template has {template.num_masks} masks and the format "
                f"{template.prompt_format.kind!r}. Use another template or model."
            )
        self.model, self.template, self._write = model, template, write
        self.pad_id = template.tokenizer.pad_id or 0
        if frozen:
            model.requires_grad_(False)
            for parameter in template.soft_parameters:
                parameter.requires_grad_(True)

    def forward(self, mask_at: Tensor, labels: Tensor, **inputs: Tensor) -> WriteOutput:
        """Return the loss of the target texts.

        Args:
            mask_at: positions that predict the targets' tokens.
            labels: target tokens, padded with -100.
            inputs: the other tensors that `collate` returns.

        Shape:
            mask_at, labels: (B, L)
        """
        outputs = run_at_answers(self.model, inputs, mask_at)
        assert outputs is not None, "the stages of a pipeline are trained with an objective"
        return WriteOutput(target_loss(outputs.logits, labels).sum(-1).mean(), outputs.logits)

    def encode(self, example: Any, target: str, **options: Any) -> Encoded:
        """Encode a prompt with its target text, followed by the EOS token if the tokenizer has one.

        Args:
            example, options: arguments of `Template.encode`.
            target: text to be written.
        """
        return encode_target(self.template, example, target, **options)

    def collate(self, prompts: Sequence[Encoded]) -> Batch:
        """Collate prompts with targets into a batch, padded on the right."""
        device = next(self.model.parameters()).device
        columns = collate_questions([Question([prompt], [], []) for prompt in prompts], self.pad_id)
        width = len(columns["mask_at"][0])
        columns["labels"] = [
            [*p.predicted, *[IGNORE_INDEX] * (width - len(p.predicted))] for p in prompts
        ]
        return {name: torch.tensor(values, device=device) for name, values in columns.items()}

    @torch.no_grad()
    def write(
        self, examples: Sequence[Any], size: int = 8, max_seq_len: int = 512, **options: Any
    ) -> list[str]:
        """Generate texts for examples, in batches.

        Args:
            examples: examples in any form that `Template.wrap` accepts.
            size: batch size.
            max_seq_len: maximum length of a prompt in tokens.
            options: options of the `write` function, such as max_new_tokens, num_beams or
                do_sample.

        Raises:
            ConfigError: the model does not generate token by token, or no `write` function is
                available.
        """
        if self.template.prompt_format.kind not in _WRITING:
            raise ConfigError(
                f"a template with the format {self.template.prompt_format.kind!r} does not support "
                "generation. Use write_text of bmforge.infer, or fill_documents of CPM-Bee."
            )
        write = self._write or getattr(type(self.model), "generate", None)
        if write is None:
            raise ConfigError(
                "the PromptGenerator has no function that generates text. Create it with "
                "write=bmforge.infer.generate."
            )
        device = next(self.model.parameters()).device
        texts = []
        for begin in range(0, len(examples), size):
            prompts = [
                self.template.encode(examples[n], max_seq_len, name=f"example {n}")
                for n in range(begin, min(begin + size, len(examples)))
            ]
            ids, mask = self._pad(prompts, device)
            apart = self.template.prompt_format.has_decoder
            written = write(self.model, ids, attention_mask=mask, **options)
            new = written[:, 1 if apart else ids.shape[1] :]
            texts += [self._read(row) for row in new.tolist()]
        return texts

    def _pad(self, prompts: Sequence[Encoded], device: torch.device) -> tuple[Tensor, Tensor]:
        """Pad prompts to equal length, on the left for decoders; return ids and attention masks."""
        width = max(map(len, prompts))
        apart = self.template.prompt_format.has_decoder
        rows, masks = [], []
        for prompt in prompts:
            spare = [self.pad_id] * (width - len(prompt))
            ones, zeros = [1] * len(prompt), [0] * len(spare)
            rows.append([*prompt.input_ids, *spare] if apart else [*spare, *prompt.input_ids])
            masks.append([*ones, *zeros] if apart else [*zeros, *ones])
        return torch.tensor(rows, device=device), torch.tensor(masks, device=device)

    def _read(self, ids: Sequence[int]) -> str:
        """Decode generated ids up to the EOS token; a leading sentinel is removed."""
        tokenizer = self.template.tokenizer
        ends = set(find_ends(self.template)) | {tokenizer.pad_id}
        written: list[int] = []
        for id in ids:
            if id in self.template.blanks and not written:
                continue
            if id in ends:
                break
            written.append(id)
        return tokenizer.decode_written(written).strip()


def find_ends(template: Template) -> list[int]:
    """Return a list with the id of the token that ends a target, or [] if there is none.

    It is the EOS token; for GLM, the end-of-piece token.
    """
    roles = ("eop", "eos") if template.prompt_format.kind == "blanks" else ("eos",)
    ids = (template.tokenizer.role_id(role) for role in roles)
    return [id for id in ids if id is not None][:1]


def encode_target(template: Template, example: Any, target: str, **options: Any) -> Encoded:
    """Encode a prompt with its target text, followed by the EOS token if the tokenizer has one.

    Raises:
        ConfigError: the target is empty.
    """
    first = next(piece for piece in template.pieces if piece.kind == "mask")
    spaced = " " if first.spaced and not template.prompt_format.has_decoder else ""
    ids = template.tokenizer.encode_plain([spaced + target])[0]
    ids = [*ids, *find_ends(template)]
    if not ids:
        raise ConfigError(f"the target {target!r} has no tokens. Use a non-empty target.")
    prompt = template.encode(example, answer=ids, **options)
    if template.prompt_format.form == "apart" and not template.prompt_format.start_is_blank:
        # The sentinel before the answer is a target too.
        places, predicted = [0, *prompt.mask_at], [template.blanks[0], *prompt.predicted]
        prompt = dataclasses.replace(prompt, mask_at=places, predicted=predicted)
    return prompt


def target_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every token, (B, L); 0 for labels of -100.

    Shape:
        logits: (B, L, V); labels: (B, L)
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
