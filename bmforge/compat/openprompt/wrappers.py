"""OpenPrompt's tokenizer wrappers, one per prompting mode.

`TheirTokenizer` adapts a transformers tokenizer to bmforge's interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from bmforge.compat.openprompt.examples import InputFeatures
from bmforge.errors import ConfigError
from bmforge.tokenizers.base import Tokenizer

__all__ = [
    "TheirTokenizer", "wrap_tokenizer", "CPM2TokenizerWrapper", "LMTokenizerWrapper",
    "MLMTokenizerWrapper", "T5LMTokenizerWrapper", "T5TokenizerWrapper", "TokenizerWrapper",
]  # fmt: skip

_ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")


class TheirTokenizer(Tokenizer):
    """Transformers tokenizer with bmforge's interface.

    Args:
        tokenizer: the transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.hf_tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Raise an error, since transformers must load the tokenizer."""
        raise ConfigError(
            "TheirTokenizer cannot load a tokenizer. Load it with transformers, or use "
            "bmforge.tokenizers.AutoTokenizer."
        )

    def _files(self) -> dict[str, bytes]:
        raise ConfigError(
            f"{type(self).__name__} cannot save the transformers tokenizer that it wraps. Call "
            "that tokenizer's save_pretrained."
        )

    def _role_tokens(self) -> Mapping[str, str]:
        tokens = {role: getattr(self.hf_tokenizer, f"{role}_token", None) for role in _ROLES}
        return {role: token for role, token in tokens.items() if token is not None}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return list(self.hf_tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text."""
        return str(self.hf_tokenizer.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""
        return self.get_vocab().get(token)

    def get_vocab(self) -> dict[str, int]:
        """Return the whole vocabulary as a dict from token to id."""
        return dict(self.hf_tokenizer.get_vocab())

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.hf_tokenizer)


def wrap_tokenizer(tokenizer: Any) -> Any:
    """Wrap a tokenizer in bmforge's interface, unless it already has this interface."""
    return tokenizer if isinstance(tokenizer, Tokenizer) else TheirTokenizer(tokenizer)


class TokenizerWrapper:
    """Tokenizes examples that a template has wrapped.

    Args:
        max_seq_length: maximum prompt length in tokens.
        tokenizer: tokenizer of the model.
        truncate_method: "tail", "head" (cuts the beginning) or "balanced".
        options: further arguments of OpenPrompt's class. `decode_from_pad` False lets the decoder
            of an encoder-decoder start with the first mask; the other arguments are accepted and
            ignored.

    Attributes:
        prompt_format: prompting mode; see `bmforge.tune.prompt.prompt_formats`.
        count_truncated: function that returns the numbers of truncated and of all examples; set by
            the loader.
    """

    prompt_format: ClassVar[str] = ""

    def __init__(
        self,
        max_seq_length: int = 512,
        tokenizer: Any = None,
        truncate_method: str = "tail",
        **options: Any,
    ) -> None:
        self.max_seq_length, self.tokenizer = max_seq_length, tokenizer
        self.truncate_method, self.options = truncate_method, options
        self.starts_with_pad = bool(options.get("decode_from_pad", True))
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
        core = wrapped_example.template.bind_wrapper(self)
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


def _define(name: str, prompt_format: str, models: str) -> type[TokenizerWrapper]:
    """Create the wrapper class of a prompt format; `models` describes its models."""
    attributes = {
        "__doc__": f"Wrapper for {models}.",
        "__module__": __name__,
        "prompt_format": prompt_format,
    }
    return type(name, (TokenizerWrapper,), attributes)


MLMTokenizerWrapper = _define("MLMTokenizerWrapper", "masked", "masked language models")
LMTokenizerWrapper = _define("LMTokenizerWrapper", "causal", "causal language models")
T5TokenizerWrapper = _define(
    "T5TokenizerWrapper", "spans", "encoder-decoders that fill in sentinel tokens"
)
T5LMTokenizerWrapper = _define(
    "T5LMTokenizerWrapper", "prefix spans", "encoder-decoders whose decoder continues the text"
)
CPM2TokenizerWrapper = _define("CPM2TokenizerWrapper", "spans", "CPM-2")
