"""Conversations with EVA; the prompt of each answer is the recent history.

Source: ``src/eva_interactive.py`` and ``src/eva_datasets.py`` of thu-coai/EVA. Its hand-written
rules (antonyms, fixed answers) and its ranking of several answers by a BERT are not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.decoder import Seq2SeqDecoder
from bmforge.infer.generation import run_decoder
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import find_repeats
from bmforge.models.seq2seq import Seq2Seq
from bmforge.surgery import eval_mode
from bmforge.tokenizers.cpm2 import EVATokenizer

__all__ = ["Chat", "ChatConfig", "join_history"]


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Generation options for EVA; the defaults are those of EVA's original code.

    Args:
        window: maximum history length in tokens.
        no_repeat_ngram: length in tokens of n-grams that may occur only once per answer; 0 for
            no limit.
        max_new_tokens: maximum answer length in tokens.
        min_new_tokens: minimum answer length in tokens.
        num_beams: number of beams; above 1, beam search replaces sampling.
        temperature: sampling temperature.
        top_p: total probability of the most likely tokens to sample from.
        repetition_penalty: factor above 1 that makes generated tokens less likely.
        length_penalty: exponent of the length in beam scores.
        seed: random seed of sampling; None means torch's global generator.
    """

    window: int = 128
    no_repeat_ngram: int = 3
    max_new_tokens: int = 128
    min_new_tokens: int = 2
    num_beams: int = 1
    temperature: float = 0.7
    top_p: float = 0.9
    repetition_penalty: float = 1.2
    length_penalty: float = 1.8
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range."""
        if self.window < 3 or self.no_repeat_ngram < 0:
            raise ConfigError(
                f"ChatConfig is out of range: window={self.window} (allowed: at least 3), "
                f"no_repeat_ngram={self.no_repeat_ngram} (allowed: at least 0)."
            )

    def options(self, end: int, padding: int) -> GenerationConfig:
        """Return the corresponding `GenerationConfig`, for beam search or sampling."""
        kind: dict[str, Any] = {"num_beams": self.num_beams, "length_penalty": self.length_penalty}
        if self.num_beams == 1:
            drawn = ("temperature", "top_p", "seed")
            kind = {"do_sample": True, **{name: getattr(self, name) for name in drawn}}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            repetition_penalty=self.repetition_penalty,
            eos_token_id=end,
            pad_token_id=padding,
            **kind,
        )


def join_history(
    utterances: Sequence[Sequence[int]], end: int, answer: int, window: int
) -> list[int]:
    """Return the encoder's input: the last utterances that fit, then the answer's sentinel.

    Args:
        utterances: token ids of each utterance, oldest first.
        end: id that follows every utterance.
        answer: sentinel id of the answer.
        window: maximum number of returned ids; old utterances are dropped, and a single longer
            utterance is truncated on the left.
    """
    ids = [answer]
    for utterance in reversed(utterances):
        room = window - len(ids) - 1
        if len(utterance) > room:
            last = utterance[len(utterance) - room :] if len(ids) == 1 else ()
            return [*last, end, *ids] if last else ids
        ids = [*utterance, end, *ids]
    return ids


class Chat:
    """Conversation with EVA.

    Args:
        model: EVA, or another encoder-decoder trained on the same format.
        tokenizer: the model's tokenizer.
        config: generation options.

    Attributes:
        history: utterances of user and model, oldest first.

    Raises:
        ConfigError: the tokenizer belongs to another model.
    """

    def __init__(
        self, model: Seq2Seq, tokenizer: EVATokenizer, config: ChatConfig | None = None
    ) -> None:
        if not model.traits.is_encoder_decoder or not isinstance(tokenizer, EVATokenizer):
            raise ConfigError(
                f"a {type(model).__name__} with a {type(tokenizer).__name__} does not support "
                "this chat (needed: an EVA model with its tokenizer)."
            )
        if len(tokenizer) > model.config.vocab_size:
            raise ConfigError(
                f"tokenizer and model do not match: the tokenizer has {len(tokenizer)} tokens, "
                f"but the model has vocab_size={model.config.vocab_size}. Load both from the "
                "same directory."
            )
        self.model, self.tokenizer = model, tokenizer
        self.config = config or ChatConfig()
        self.history: list[str] = []
        self._options = self.config.options(tokenizer.sep_id, model.config.pad_token_id)

    def reply(self, text: str) -> str:
        """Send a message and return the answer; both are appended to the history.

        Raises:
            ConfigError: the message is empty.
        """
        if not text.strip():
            raise ConfigError(f"the message is empty: text={text!r}. Pass a non-empty string.")
        source = self._read([*self.history, text])
        device = next(self.model.parameters()).device
        ids = torch.tensor([source], device=device)
        start = torch.full_like(ids[:, :1], self.model.config.decoder_start_token_id)
        with eval_mode(self.model), torch.no_grad():
            decoder = _NoRepeatDecoder(self.model, ids, self._options, self.config.no_repeat_ngram)
            nothing = torch.zeros_like(start[:, 0])
            out = run_decoder(decoder, start, nothing, self._options)[0, 1:].tolist()
        end = self.tokenizer.sep_id
        answer = self.tokenizer.decode_written(out[: out.index(end)] if end in out else out)
        self.history += [text, answer]
        return answer

    def clear(self) -> None:
        """Clear the history."""
        self.history.clear()

    def _read(self, utterances: Sequence[str]) -> list[int]:
        """Return the encoder's input for the next answer."""
        tokenizer = self.tokenizer
        encoded = [tokenizer.encode(text) for text in utterances]
        blank = tokenizer.sentinel_id(0)
        return join_history(encoded, tokenizer.sep_id, blank, self.config.window)


class _NoRepeatDecoder(Seq2SeqDecoder):
    """Decoder that forbids tokens that would repeat an n-gram of their sequence.

    The start token belongs to the sequence; n-gram length 0 allows all tokens.
    """

    def __init__(
        self, model: Seq2Seq, source: Tensor, options: GenerationConfig, ngram: int
    ) -> None:
        super().__init__(model, source, None, 1 + options.max_new_tokens)
        self._ngram = ngram
        self._written: list[list[int]] = [[] for _ in range(source.shape[0])]

    def run(self, tokens: Tensor) -> Tensor:
        """Return the base class's logits with -inf for tokens that would repeat an n-gram."""
        scores = super().run(tokens)
        for row, ids in enumerate(tokens.tolist()):
            self._written[row] += ids
            scores[row, find_repeats(self._written[row], self._ngram)] = -torch.inf
        return scores

    def reorder(self, rows: Tensor) -> None:
        """Reorder the sequences of the batch and their token histories."""
        super().reorder(rows)
        self._written = [list(self._written[row]) for row in rows.tolist()]
