"""OpenPrompt's tokenizer wrappers, one per prompting mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from bmforge.compat.openprompt.examples import InputFeatures

__all__ = [
    "CPM2TokenizerWrapper",
    "LMTokenizerWrapper",
    "MLMTokenizerWrapper",
    "T5LMTokenizerWrapper",
    "T5TokenizerWrapper",
    "TokenizerWrapper",
]


class TokenizerWrapper:
    """Tokenizes examples that a template has wrapped.

    Args:
        max_seq_length: maximum prompt length in tokens.
        tokenizer: tokenizer of the model.
        truncate_method: "tail" (removes the end), "head" (the beginning) or "balanced".
        options: further arguments of OpenPrompt's class; accepted and ignored.

    Attributes:
        asking: prompting mode; see `bmforge.tune.prompt.prompt_formats`.
        count_truncated: function that returns the numbers of truncated and of all examples; set by
            the loader.
    """

    asking: ClassVar[str] = ""

    def __init__(
        self,
        max_seq_length: int = 512,
        tokenizer: Any = None,
        truncate_method: str = "tail",
        **options: Any,
    ) -> None:
        self.max_seq_length, self.tokenizer = max_seq_length, tokenizer
        self.truncate_method, self.options = truncate_method, options
        self.count_truncated: Callable[[], tuple[int, int]] = lambda: (0, 0)

    @property
    def truncate_rate(self) -> float:
        """Fraction of the loader's examples that are truncated; 0 without a loader."""
        truncated, total = self.count_truncated()
        return truncated / total if total else 0.0

    def tokenize_one_example(self, wrapped_example: Any, teacher_forcing: bool) -> InputFeatures:
        """Return the token ids of a wrapped example, without padding.

        Args:
            wrapped_example: result of `wrap_one_example`.
            teacher_forcing: True to include the target text.
        """
        core = wrapped_example.template.bind(self.asking)
        answer: list[int] = []
        if teacher_forcing:
            target = wrapped_example.example.tgt_text or ""
            answer = core.tokenizer.encode_plain([target])[0]
        prompt = core.encode(
            wrapped_example.example, self.max_seq_length, self.truncate_method, answer=answer
        )
        loss = [int(position in prompt.mask_at) for position in range(len(prompt))]
        columns = {"input_ids": prompt.input_ids, "attention_mask": [1] * len(prompt)}
        if prompt.decoder_input_ids:
            columns["decoder_input_ids"] = prompt.decoder_input_ids
            loss = [int(n in prompt.mask_at) for n in range(len(prompt.decoder_input_ids))]
        return InputFeatures(**columns, loss_ids=loss)


class MLMTokenizerWrapper(TokenizerWrapper):
    """Wrapper for masked language models."""

    asking = "masked"


class LMTokenizerWrapper(TokenizerWrapper):
    """Wrapper for causal language models."""

    asking = "causal"


class T5TokenizerWrapper(TokenizerWrapper):
    """Wrapper for encoder-decoders that fill in sentinel tokens."""

    asking = "spans"


class T5LMTokenizerWrapper(TokenizerWrapper):
    """Wrapper for encoder-decoders whose decoder continues the text."""

    asking = "prefix spans"


class CPM2TokenizerWrapper(T5TokenizerWrapper):
    """Wrapper for CPM-2."""
