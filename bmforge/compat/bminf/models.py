"""Models of BMInf 1.0 with their names and arguments, implemented with bmforge's engine.

Source: the models of BMInf 1.0.2.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from bmforge.compat.bminf.sampler import LoweredDecoder, LoweredSeq2Seq, draw_options
from bmforge.device import default_device
from bmforge.errors import ConfigError
from bmforge.infer import Engine
from bmforge.infer.decoder import Decoder
from bmforge.infer.generation import complete_config, run_decoder
from bmforge.infer.openbmb.chat import join_history
from bmforge.infer.options import GenerationConfig
from bmforge.models.config import read_config_file
from bmforge.models.hub import AutoModel, find_model
from bmforge.surgery import eval_mode

__all__ = ["CPM1", "CPM2", "EVA"]

Draw = dict[str, Any]  # options of `GenerationConfig`
Penalties = tuple[float, float]  # frequency and presence penalty

_SCHEME = "int8-dynamic"
_SPAN = "<span>"
# Placeholder of the blanks to fill in; a private-use character, which no vocabulary has.
_CHOSEN = "\ue000"
# Sentinel number with which CPM-2.1 was trained to continue a text.
_REST = 189
# CPM-1's word-separator token, which is exempt from the penalties.
_WORD = "\u2581"


def open_engine(
    family: str,
    version: str,
    memory_limit: int | None,
    dynamic_memory: int = 0,
    device_idx: int | None = None,
) -> Engine:
    """Load a model in int8 within memory limits, as BMInf does.

    Args:
        family: required model class.
        version, memory_limit, dynamic_memory, device_idx: arguments of the models, see `_Model`.
    """
    if device_idx not in (None, default_device().index, 0):
        raise ConfigError(
            f"device_idx={device_idx} is not supported, because bmforge uses the first "
            "accelerator that is visible to the process. Select an accelerator with "
            "CUDA_VISIBLE_DEVICES, and leave device_idx out."
        )
    directory = find_model(version.removeprefix("file://"))
    raw = read_config_file(directory)
    family_class = AutoModel.family_of(raw)
    if family_class.__name__ != family:
        raise ConfigError(
            f"{str(directory)!r} contains a {family_class.__name__}, not a {family}. Pass the "
            "version of this model as version=."
        )
    is_packed = bool(raw.get("quantization_config"))
    return Engine(
        directory,
        device_budget_bytes=None if memory_limit is None else memory_limit + dynamic_memory,
        quantize=None if is_packed else _SCHEME,
    )


class _Model:
    """Base class of `CPM1`, `CPM2` and `EVA`.

    Args:
        device_idx: index of the accelerator; only the first accelerator is supported.
        dynamic_memory: limit on all memory except the weights in bytes; only used with
            `memory_limit`.
        memory_limit: limit on the weights in bytes (default: free memory). The sum of the two
            limits is the engine's memory budget.
        version: directory or hub id of the model, with or without ``file://`` (default: the
            name of the last version that BMInf published, as a local directory).

    Raises:
        ConfigError: the model does not exist or is of another family, or a limit is too small.
    """

    family: ClassVar[str]
    latest: ClassVar[str]

    def __init__(
        self,
        device_idx: int | None = None,
        dynamic_memory: int = 512 << 20,
        memory_limit: int | None = None,
        version: str | None = None,
    ) -> None:
        self.engine = open_engine(
            self.family, version or self.latest, memory_limit, dynamic_memory, device_idx
        )

    @property
    def _tokenizer(self) -> Any:
        return self.engine.tokenizer

    def _stops(
        self, stop_tokens: Sequence[str] | None, end_ids: Collection[int]
    ) -> tuple[int, ...]:
        """Return the ids of the tokens that end generation.

        Raises:
            ConfigError: a token is not in the vocabulary.
        """
        ids = {token: self._tokenizer.token_to_id(token) for token in stop_tokens or ()}
        missing = [token for token, id in ids.items() if id is None]
        if missing:
            raise ConfigError(
                f"stop_tokens={missing} are not in the vocabulary of the model. Leave these "
                "tokens out."
            )
        return tuple(dict.fromkeys((*ids.values(), *end_ids)))

    def _write(
        self, model: Any, decoder: Decoder, start: Sequence[int], config: GenerationConfig
    ) -> tuple[str, bool]:
        """Continue the tokens `start`; return the new text, and True if an EOS token ended it."""
        ids = torch.tensor([start], device=self.engine.device)
        nothing = torch.zeros_like(ids[:, 0])
        with eval_mode(model), torch.no_grad():
            out = run_decoder(decoder, ids, nothing, config)[0, len(start) :].tolist()
        has_ended = out[-1] in config.eos_tokens
        return self._tokenizer.decode_written(out[:-1] if has_ended else out), has_ended

    def _answer(
        self,
        model: Any,
        source: Sequence[int],
        start: Sequence[int],
        draw: Draw,
        penalties: Penalties,
    ) -> tuple[str, bool]:
        """Encode `source`, and generate a continuation of the decoder tokens `start`.

        Args:
            draw: sampling options.
            penalties: frequency and presence penalty.
        """
        config = complete_config(model, GenerationConfig(**draw))
        with eval_mode(model), torch.no_grad():
            decoder = LoweredSeq2Seq(
                model,
                torch.tensor([source], device=self.engine.device),
                None,
                len(start) + config.max_new_tokens,
                temperature=config.temperature,
                penalties=penalties,
                never=[self._tokenizer.unk_id],
            )
        return self._write(model, decoder, start, config)


class _TextModel(_Model):
    """Base class of the models that continue texts; subclasses define `_continue`."""

    def generate(
        self,
        input_sentence: str,
        max_tokens: int = 128,
        top_n: int | None = None,
        top_p: float | None = None,
        temperature: float = 0.9,
        frequency_penalty: float = 0,
        presence_penalty: float = 0,
        stop_tokens: Sequence[str] | None = None,
    ) -> tuple[str, bool]:
        """Generate a continuation of a text.

        Args:
            input_sentence: prompt.
            max_tokens: maximum number of new tokens.
            top_n: number of most probable tokens to sample from.
            top_p: cumulative probability of the tokens to sample from.
            temperature: sampling temperature.
            frequency_penalty: score penalty per earlier occurrence of a token.
            presence_penalty: score penalty for tokens that occurred before.
            stop_tokens: further EOS tokens.

        Returns:
            The new text, and True if the text is finished or the maximum sequence length is
            reached.

        Raises:
            ConfigError: the prompt is empty, a stop token is unknown, or an option is out of range.
        """
        draw = draw_options(temperature, top_n, top_p, max_tokens)
        penalties = frequency_penalty, presence_penalty
        with self.engine.turn("generate") as model:
            return self._continue(model, input_sentence, draw, penalties, stop_tokens)

    def _continue(
        self, model: Any, text: str, draw: Draw, penalties: Penalties, stops: Sequence[str] | None
    ) -> tuple[str, bool]:
        raise NotImplementedError(f"{type(self).__name__} does not define _continue().")


class CPM1(_TextModel):
    """CPM-1 model, which continues texts."""

    family, latest = "CPM1", "cpm1-new"

    def _continue(
        self, model: Any, text: str, draw: Draw, penalties: Penalties, stops: Sequence[str] | None
    ) -> tuple[str, bool]:
        tokenizer = self._tokenizer
        ids, limit = tokenizer.encode(text), draw["max_new_tokens"]
        if not ids:
            raise ConfigError("input_sentence is empty. Pass a non-empty string.")
        ends = self._stops(stops, [tokenizer.eos_id])
        room = self.engine.config.tokens_of(model) - len(ids)
        if room < 1:
            return "", True
        draw |= {"max_new_tokens": min(limit, room), "eos_token_id": ends}
        config = complete_config(model, GenerationConfig(**draw))
        decoder = LoweredDecoder(
            model,
            None,
            len(ids) + config.max_new_tokens,
            temperature=draw["temperature"],
            penalties=penalties,
            free=[id for id in [tokenizer.token_to_id(_WORD)] if id is not None],
        )
        text, has_ended = self._write(model, decoder, ids, config)
        return text, has_ended or room <= limit


class CPM2(_TextModel):
    """CPM-2 model, which fills in blanks of a text."""

    family, latest = "CPM2", "cpm2.1-new"

    def fill_blank(
        self,
        input_sentence: str,
        spans_position: Sequence[int] | None = None,
        max_tokens: int = 128,
        top_n: int | None = None,
        top_p: float | None = None,
        temperature: float = 0.9,
        frequency_penalty: float = 0,
        presence_penalty: float = 0,
    ) -> list[dict[str, Any]]:
        """Fill in every ``<span>`` of a text, up to 16.

        Args:
            input_sentence: text with blanks.
            spans_position: positions of the blanks to fill (default: all).
            max_tokens: maximum number of tokens per blank.
            top_n, top_p, temperature, frequency_penalty, presence_penalty: as in `CPM1.generate`.

        Returns:
            a dict with `position` and `text` for each blank, in order.

        Raises:
            ConfigError: the text has no blank or too many, or an option is out of range.
        """
        places = _find_spans(input_sentence, spans_position)
        make = partial(
            LoweredSeq2Seq,
            temperature=temperature,
            penalties=(frequency_penalty, presence_penalty),
            never=[self._tokenizer.unk_id],
        )
        pieces, first = [], 0
        for position in places:
            pieces.append(input_sentence[first:position])
            first = position + len(_SPAN)
        texts = self.engine.fill_blanks(
            _CHOSEN.join([*pieces, input_sentence[first:]]),
            blank=_CHOSEN,
            make_decoder=make,
            **draw_options(temperature, top_n, top_p, max_tokens),
        )
        return [{"position": p, "text": text} for p, text in zip(places, texts, strict=True)]

    def _continue(
        self, model: Any, text: str, draw: Draw, penalties: Penalties, stops: Sequence[str] | None
    ) -> tuple[str, bool]:
        tokenizer = self._tokenizer
        marks = tokenizer.sentinel_ids
        blank = tokenizer.sentinel_id(min(_REST, len(marks) - 1))
        draw |= {"eos_token_id": self._stops(stops, [tokenizer.eos_id, *marks])}
        start = [model.config.decoder_start_token_id, blank]
        return self._answer(model, [*tokenizer.encode(text), blank], start, draw, penalties)


class EVA(_Model):
    """EVA dialogue model, with BMInf's interface."""

    family, latest = "EVA", "eva-int8-new"

    def dialogue(
        self,
        context: Sequence[str],
        max_tokens: int = 128,
        top_n: int | None = 10,
        top_p: float | None = None,
        temperature: float = 0.85,
        frequency_penalty: float = 0,
        presence_penalty: float = 0,
        truncation_length: int | None = 256,
    ) -> tuple[str, bool]:
        """Generate an answer to the last utterance of a dialogue.

        Args:
            context: utterances, oldest first.
            max_tokens, top_n, top_p, temperature, frequency_penalty, presence_penalty: as in
                `CPM1.generate`.
            truncation_length: maximum number of input tokens; older utterances are dropped whole.

        Returns:
            The answer, and True if the answer is finished.

        Raises:
            ConfigError: the context is empty, or an option is out of range.
        """
        if not context or not all(text.strip() for text in context):
            raise ConfigError(
                "context is empty, or contains an empty utterance. Pass a list of non-empty "
                "strings."
            )
        tokenizer = self._tokenizer
        utterances = [tokenizer.encode(text) for text in context]
        window = truncation_length or sum(map(len, utterances)) + len(utterances) + 1
        with self.engine.turn("dialogue") as model:
            source = join_history(utterances, tokenizer.sep_id, tokenizer.sentinel_id(0), window)
            draw = draw_options(
                temperature, top_n, top_p, max_tokens, eos_token_id=tokenizer.sep_id
            )
            start = [model.config.decoder_start_token_id]
            return self._answer(model, source, start, draw, (frequency_penalty, presence_penalty))


def _find_spans(text: str, positions: Sequence[int] | None) -> list[int]:
    """Return the positions of the blanks to fill in.

    Raises:
        ConfigError: there is no blank at one of the `positions`.
    """
    if positions is None:
        return [match.start() for match in re.finditer(_SPAN, text)]
    wrong = [position for position in positions if not text.startswith(_SPAN, position)]
    if wrong:
        raise ConfigError(
            f"spans_position={wrong} must be positions of {_SPAN!r} in the text. Leave "
            "spans_position out to fill all of them."
        )
    return sorted(positions)
