"""Adapter for lm-eval: likelihoods of texts, and generation until a stop string.

`TextModel` has texts as inputs and outputs; `open_lm` wraps it as a model of lm-eval
(``lm_eval.api.model.LM``), which all tasks of lm-eval accept. Texts are tokenized as in lm-eval's
own models.

Source: ``lm_eval/api/model.py`` and ``models/huggingface.py`` of EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.data.tasks.rows import Pair
from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.infer.generation import generate
from bmforge.infer.score import Likelihood, roll_windows, score_pairs
from bmforge.models import AutoModel
from bmforge.models.base import Model
from bmforge.models.hub import find_model
from bmforge.parallel import World
from bmforge.tokenizers import AutoTokenizer, Tokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, Message, find_template
from bmforge.tokenizers.sentinels import decode_answer, encode_answers, fill_prompt

__all__ = ["ChatPrompt", "TextModel", "open_lm"]

_LONGEST, _MAX_NEW_TOKENS = 2048, 256
_SCORES = ("causal", "encoder-decoder")
_DRAWN = ("temperature", "top_k", "top_p")


class ChatPrompt(str):
    """Context (prompt) that was rendered by a chat template.

    The template itself writes the BOS token if the model expects one. As in transformers'
    ``apply_chat_template``, the tokenizer therefore adds no second BOS token.
    """

    __slots__ = ()


class TextModel:
    """Model with tokenizer that implements lm-eval's three kinds of requests.

    Args:
        model: decoder or encoder-decoder with its language-model head, in any parallel layout.
        tokenizer: the model's tokenizer.
        template: chat template; None means the default template (``Role: text`` lines).
        max_length: maximum sequence length in tokens (default: the model's, at most 2,048).
        batch_size: number of sequences per forward pass.
        ranks: number of data-parallel ranks, and this process's rank; None for a single process.

    Raises:
        ConfigError: the model cannot score a text.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        max_length: int | None = None,
        batch_size: int = 8,
        ranks: World | None = None,
    ) -> None:
        if model.traits.attention not in _SCORES or not model.traits.can_generate:
            raise ConfigError(
                f"a {type(model).__name__} with the head {model.config.head!r} cannot score "
                "texts (needed: a decoder or an encoder-decoder with a language-model head)."
            )
        self.model, self.tokenizer = model, tokenizer
        self.template = template or ChatTemplate(None, tokenizer)
        self.max_length = max_length or min(model.config.max_seq_len, _LONGEST)
        self.batch_size = batch_size
        self._ranks = ranks or World(0, 1, next(model.parameters()).device)
        self._is_apart = model.traits.is_encoder_decoder

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Return the log-likelihood of each continuation after its context."""
        pairs = [self._encode_pair(*request) for request in requests]
        return self._score([self._cut(pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probabilities of whole texts; each token is predicted once.

        Raises:
            ConfigError: the model is an encoder-decoder, which cannot score a text without a
                source.
        """
        if self._is_apart:
            raise ConfigError(
                "an encoder-decoder cannot compute the likelihood of a text without a prompt. Use "
                "a decoder-only model."
            )
        pairs, owners = [], []
        for number, text in enumerate(texts):
            windows = list(roll_windows(self._encode(text), self._begin(), self.max_length + 1))
            pairs += windows
            owners += [number] * len(windows)
        sums = [0.0] * len(texts)
        for owner, likelihood in zip(owners, self._score(pairs), strict=True):
            sums[owner] += likelihood.log_prob
        return sums

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generate text after each context, up to its first stop string.

        Args:
            requests: pairs of a context and its options: `until` (stop strings), `max_gen_toks`,
                `do_sample`, `temperature`, `top_k`, `top_p`.
        """
        return [self._write(context, options) for context, options in requests]

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> ChatPrompt:
        """Render a conversation as a context of `loglikelihood` and `generate_until`."""
        return ChatPrompt(self.template.render(messages, add_generation_prompt))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def _prefix(self, context: str) -> list[int]:
        """Return the tokens that the tokenizer adds before a text; [] for a chat prompt."""
        return [] if isinstance(context, ChatPrompt) else list(self.tokenizer.prompt_prefix)

    def _begin(self) -> list[int]:
        """Return the token that starts a text: the BOS token or, without one, the EOS token."""
        first = self.tokenizer.bos_id
        first = self.tokenizer.eos_id if first is None else first
        if first is None:
            raise ConfigError(
                "the tokenizer has neither a beginning-of-sequence nor an end-of-sequence "
                "token. Use a tokenizer that has one of these tokens."
            )
        return [first]

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Tokenize context and continuation; spaces between them belong to the continuation."""
        prefix = self._prefix(context)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            continuation = context[-spaces:] + continuation
            context = context[:-spaces]
        if self._is_apart:
            traits = self.model.traits
            read = fill_prompt(context, "", self.tokenizer, self.max_length, traits.sentinel)
            return Pair(
                read, encode_answers([continuation], self.tokenizer, traits.answer_sentinel)[0]
            )
        if not context:
            return Pair(self._begin(), self._encode(continuation))
        before = self._encode(context)
        answer = self._encode(context + continuation)[len(before) :]
        return Pair([*prefix, *before], answer)

    def _cut(self, pair: Pair) -> Pair:
        """Truncate the prompt on the left so that prompt and continuation fit into `max_length`."""
        if not pair.answer or len(pair.answer) > self.max_length:
            raise ConfigError(
                f"a continuation of {len(pair.answer)} tokens cannot be scored (allowed: 1 to "
                f"max_length={self.max_length}). Raise max_length, or leave the task out."
            )
        if self._is_apart:
            return pair
        return Pair(pair.prompt[-(self.max_length + 1 - len(pair.answer)) :], pair.answer)

    def _score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Score pairs in batches of similar length; return the likelihoods in the pairs' order."""
        sizes = [len(pair.prompt) + len(pair.answer) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda n: -sizes[n])
        ordered = [pairs[n] for n in order]
        if not ordered:
            return []
        likelihoods = score_pairs(
            self.model, ordered, self.batch_size, self._ranks, self.max_length
        )
        back = dict(zip(order, likelihoods, strict=True))
        return [back[number] for number in range(len(pairs))]

    def _write(self, context: str, options: Mapping[str, Any]) -> str:
        settings = dict(options)
        marks = settings.pop("until", None) or []
        marks = [marks] if isinstance(marks, str) else [mark for mark in marks if mark]
        most = int(settings.pop("max_gen_toks", _MAX_NEW_TOKENS))
        if not settings.get("do_sample"):
            settings = {name: value for name, value in settings.items() if name not in _DRAWN}
        ids = [*self._prefix(context), *self._encode(context)] or self._begin()
        traits = self.model.traits
        if self._is_apart:
            ids = fill_prompt(context, "", self.tokenizer, self.max_length, traits.sentinel)
        else:
            most = min(most, self.max_length - 1)
            ids = ids[-(self.max_length - most) :]
        written: list[int] = []

        def read() -> str:
            if self._is_apart:
                return decode_answer(written, self.tokenizer, traits.answer_sentinel)
            return self.tokenizer.decode_written(written)

        def collect(tokens: Tensor) -> None:
            written.append(int(tokens[0]))
            text = read() if marks else ""
            if any(mark in text for mark in marks):
                raise _MarkedError

        prompt = torch.tensor([ids], device=self._ranks.device)
        model: Any = self.model
        ends = find_end_tokens(model.config, self.tokenizer)
        # lm-eval's default is greedy decoding, whatever generation_config.json says.
        settings = {"do_sample": False, **settings, "max_new_tokens": most, "eos_token_id": ends}
        with suppress(_MarkedError):
            generate(model, prompt, torch.ones_like(prompt), on_token=collect, **settings)
        del written[next((at for at, id in enumerate(written) if id in ends), len(written)) :]
        text = read()
        return text[: min((text.find(mark) for mark in marks if mark in text), default=len(text))]


class _MarkedError(Exception):
    """Raised to end generation when a stop string is complete."""


def open_lm(name: str | Path | TextModel, **options: Any) -> Any:
    """Return a model for lm-eval, for example for ``simple_evaluate(model=open_lm("run/export"))``.

    Args:
        name: directory or hub id of a model with its tokenizer, or a `TextModel`.
        options: arguments of `TextModel`, if `name` is a directory or hub id.

    Raises:
        MissingDependencyError: lm-eval is not installed.
        ConfigError: the model does not exist, or cannot score a text.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise MissingDependencyError("lm-eval", "lm-eval", "lm-eval's tasks") from error

    class Harness(LM):
        """`TextModel` with lm-eval's interface."""

        def __init__(self, inner: TextModel, name: str) -> None:
            super().__init__()
            self.inner, self._name = inner, name

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            results = self.inner.loglikelihood([request.args for request in requests])
            return self._keep(
                "loglikelihood", requests, [tuple(likelihood) for likelihood in results]
            )

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            results = self.inner.loglikelihood_rolling([request.args[0] for request in requests])
            return self._keep("loglikelihood_rolling", requests, results)

        def generate_until(self, requests: list[Any]) -> list[str]:
            results = self.inner.generate_until([request.args for request in requests])
            return self._keep("generate_until", requests, results)

        def _keep(self, kind: str, requests: list[Any], answers: list[Any]) -> list[Any]:
            for request, answer in zip(requests, answers, strict=True):
                self.cache_hook.add_partial(kind, request.args, answer)
            return answers

        def apply_chat_template(
            self, chat_history: list[Message], add_generation_prompt: bool = True
        ) -> str:
            return self.inner.render_chat(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return self.inner.template.source if chat_template else ""

        @property
        def tokenizer_name(self) -> str:
            return self._name

    if isinstance(name, TextModel):
        return Harness(name, type(name.tokenizer).__name__)
    directory = find_model(name)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    template = ChatTemplate(find_template(directory), tokenizer)
    inner = TextModel(AutoModel.from_pretrained(directory), tokenizer, template, **options)
    return Harness(inner, str(name).replace("/", "__"))
