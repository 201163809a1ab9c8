"""Text generation with the prompt format and defaults of each model family's original code.

CPM-Ant's prompt is ``<s>`` and the text without unknown tokens. Its continuation does not begin
with an EOS token or a line break. It is generated with 3 beams, or sampled at temperature 0.9 with
top-p 0.9. CPM-1 samples at temperature 0.9. EVA answers one utterance, CPM-2 writes the
continuation of a text as one masked span, and CPM-Bee fills the answer of a document. All other
models continue the text.

Source: ``cpm_live/generation/ant.py`` and ``text_generation.py`` of OpenBMB/CPM-Live (branch
cpm-ant), ``generate_samples.py`` of TsinghuaAI/CPM-1-Generate, ``src/eva_interactive.py`` of
thu-coai/EVA, and the README of OpenBMB/CPM-Bee.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError, DataError
from bmforge.infer.decoder import Decoder
from bmforge.infer.end_tokens import find_end_tokens, find_hidden_tokens
from bmforge.infer.engine.text_stream import TextStream
from bmforge.infer.generation import check_prompt, complete_config, generate, run_decoder
from bmforge.infer.openbmb.chat import join_history
from bmforge.infer.openbmb.documents import fill_each
from bmforge.infer.openbmb.hypotheses import search_hypotheses
from bmforge.infer.options import GenerationConfig
from bmforge.models.causal_lm import CausalLM
from bmforge.surgery import eval_mode
from bmforge.tokenizers import CPM2Tokenizer, CPMBeeTokenizer

__all__ = [
    "answer_document",
    "encode_cpm_ant_prompt",
    "read_span",
    "start_cpm_ant",
    "write_text",
    "write_texts",
]

_CONTINUE = "往后写约100字"  # CPM-Bee prompt: continue in about 100 characters
# Default options by training objective or tokenizer of a model family.
_SEARCHING: dict[str, dict[str, Any]] = {"hidden tokens": {"num_beams": 3}}
_DRAWING: dict[str, dict[str, Any]] = {
    "hidden tokens": {"temperature": 0.9, "top_p": 0.9},
    "CPM1Tokenizer": {"temperature": 0.9},
}
_DRAWS = ("CPM1Tokenizer",)


def write_text(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """Return a prompt with its continuation, or for EVA, CPM-2 and CPM-Bee the answer alone.

    Args:
        model: model that generates text.
        tokenizer: the model's tokenizer.
        prompt: text; names of CPM-Bee's special tokens in the text are read as ordinary text.
        options: fields of `GenerationConfig`; the defaults are those of the family's original
            code or, without one, of the model's generation_config.json.

    Raises:
        ConfigError: an option does not apply, or the prompt has no tokens.
        DataError: the text is longer than CPM-Bee's window.
        ShapeError: the prompt has ids outside the model's vocabulary.
    """
    return write_texts(model, tokenizer, prompt, **options)[0]


def write_texts(model: Any, tokenizer: Any, prompt: str, **options: Any) -> list[str]:
    """Return ``num_return_sequences`` texts for a prompt; see `write_text`."""
    traits = model.traits
    if traits.objective == "documents":
        return [answer_document(model, tokenizer, prompt, options)]
    is_span = isinstance(tokenizer, CPM2Tokenizer) and traits.is_encoder_decoder
    has_form = is_span or traits.objective == "hidden tokens"
    ids = tokenizer.encode(prompt) if has_form else tokenizer.encode_prompt(prompt)
    if not ids or not prompt:
        raise ConfigError("the prompt is empty. Pass --prompt TEXT, or pipe a text to the command.")
    options = _complete(options, (traits.objective, traits.tokenizer))
    if options.get("eos_token_id") is None:
        options["eos_token_id"] = find_end_tokens(model.config, tokenizer)
    if has_form and options.get("stop_strings"):
        raise ConfigError(
            f"stop_strings={options['stop_strings']!r} is not supported for a "
            f"{type(model).__name__}. Leave it out, or use Engine.submit."
        )
    if traits.objective == "hidden tokens":
        return [_continue_cpm_ant(model, tokenizer, ids, options)]
    if is_span:
        return [_write_span(model, tokenizer, ids, options)]
    config = GenerationConfig(**options)
    shown = "" if traits.is_encoder_decoder else _show(tokenizer, ids)
    return [shown + text for text in continue_ids(model, tokenizer, ids, config)]


def continue_ids(
    model: Any,
    tokenizer: Any,
    ids: Sequence[int],
    config: GenerationConfig,
    on_text: Callable[[str], None] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Return the text of each continuation, up to its first stop string.

    Args:
        model: model that generates text.
        tokenizer: the model's tokenizer.
        ids: token ids of the prompt, or of the encoder's input.
        config: generation options.
        on_text: called with each chunk of the first continuation's text.
        inputs: further inputs of the model for the prompt, as in `generate`.

    Raises:
        ConfigError: an option does not apply.
        ShapeError: the prompt has ids outside the model's vocabulary.
    """
    stops, config = config.stop_strings, config.replace(stop_strings=())
    if stops and config.num_beams > 1:
        raise ConfigError(
            f"num_beams={config.num_beams} and stop_strings cannot be used together, because "
            "beam search selects its text only at the end. Leave one of them out."
        )
    if config.eos_token_id is None:
        config = config.replace(eos_token_id=find_end_tokens(model.config, tokenizer))
    is_apart = model.traits.is_encoder_decoder
    marks = [*config.eos_tokens, *find_hidden_tokens(tokenizer)]
    before = () if is_apart else ids
    reader = _RowTexts(tokenizer, stops, marks, before, config.eos_tokens, on_text)
    rows = torch.tensor([ids], device=next(model.parameters()).device)
    stop = reader.read if stops or on_text is not None else None
    out = generate(model, rows, torch.ones_like(rows), config, stop=stop, inputs=inputs)
    if stop is None:
        for tokens in out[:, 1 if is_apart else len(ids) :].T:
            reader.read(tokens)
    return reader.finish()


class _RowTexts:
    """Incremental detokenizers for a batch of continuations.

    Args:
        tokenizer, stops, hidden, before: arguments of `TextStream`, the same for every
            continuation.
        ends: EOS tokens; all later tokens of a continuation are padding.
        on_text: function called with each chunk of the first continuation's text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        hidden: Sequence[int | None],
        before: Sequence[int],
        ends: Collection[int],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self._make = partial(TextStream, tokenizer, stops, hidden, before)
        self._ends, self._on_text = ends, on_text
        self._streams: list[TextStream] = []
        self._ended: list[bool] = []

    def read(self, tokens: Tensor) -> Tensor:
        """Decode one step's tokens, (R,); return a mask of continuations that must stop, (R,)."""
        while len(self._streams) < len(tokens):
            self._streams.append(self._make())
            self._ended.append(False)
        for row, token in enumerate(tokens.tolist()):
            if not self._ended[row]:
                self._ended[row] = token in self._ends
                self._show(row, self._streams[row].add([token]))
        stopped = [stream.is_stopped for stream in self._streams]
        return torch.tensor(stopped, device=tokens.device)

    def finish(self) -> list[str]:
        """Return the complete texts; call it after the last step."""
        for row, stream in enumerate(self._streams):
            self._show(row, stream.finish())
        return [stream.text for stream in self._streams]

    def _show(self, row: int, piece: str) -> None:
        if row == 0 and piece and self._on_text is not None:
            self._on_text(piece)


def _complete(options: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the options with the defaults of the family's original code filled in."""
    searches = options.get("num_beams", 1) > 1
    samples = options.get("do_sample", not searches and any(name in _DRAWS for name in names))
    table = _DRAWING if samples else _SEARCHING
    defaults = {key: value for name in names for key, value in table.get(name, {}).items()}
    if samples or defaults:
        defaults["do_sample"] = samples
    return {**defaults, **options}


def _show(tokenizer: Any, ids: Sequence[int]) -> str:
    marks = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return str(tokenizer.decode_written([id for id in ids if id not in marks]))


def answer_document(
    model: Any, tokenizer: CPMBeeTokenizer, prompt: str, options: dict[str, Any]
) -> str:
    """Return the continuation of a text, generated as the answer of a CPM-Bee document."""
    if not prompt.strip():
        raise ConfigError("the prompt is empty. Pass --prompt TEXT, or pipe a text to the command.")
    document = {"input": tokenizer.escape(prompt), "prompt": _CONTINUE, "<ans>": ""}
    (filled,) = fill_each(model, tokenizer, [document], **options)
    if isinstance(filled, DataError):
        raise filled
    return filled["<ans>"].replace("<<", "<")


def _continue_cpm_ant(
    model: CausalLM, tokenizer: Any, ids: Sequence[int], options: dict[str, Any]
) -> str:
    """Continue a text as CPM-Ant's original code does."""
    config = complete_config(model, GenerationConfig(**options))
    with eval_mode(model), torch.no_grad():
        prompt = encode_cpm_ant_prompt(tokenizer, ids)
        decoder, start = start_cpm_ant(model, tokenizer, prompt, config)
        if config.num_beams > 1:
            return _show(tokenizer, search_hypotheses(decoder, start, config))
        only_written = torch.full_like(start[:, 0], start.shape[1])
        out = run_decoder(decoder, start, only_written, config)
    return _show(tokenizer, out[0].tolist())


def encode_cpm_ant_prompt(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the ids of a CPM-Ant prompt: BOS token first, unknown tokens removed."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [*begin, *(id for id in ids if id != tokenizer.unk_id)]


def start_cpm_ant(
    model: CausalLM, tokenizer: Any, ids: Sequence[int], config: GenerationConfig
) -> tuple[Decoder, Tensor]:
    """Create the decoder for a CPM-Ant prompt; return it with its first input, (1, T)."""
    start = torch.tensor([ids])
    mask = torch.ones_like(start)
    check_prompt(model, start, mask, config)
    banned = [*config.eos_tokens, tokenizer.role_id("newline")]
    start = start.to(next(model.parameters()).device)
    longest = start.shape[1] + config.max_new_tokens
    decoder = _TextDecoder(model, mask.to(start.device), longest, len(tokenizer), banned)
    return decoder, start


class _TextDecoder(Decoder):
    """CPM-Ant decoder that forbids certain first tokens, and ids that the tokenizer lacks.

    CPM-Ant+ uses these ids for its soft prompt.

    Args:
        model: model that computes the logits.
        mask: attention mask, as in `Decoder`.
        max_length: maximum length of a sequence in tokens, including the prompt.
        vocab_size: number of tokens of the tokenizer.
        banned: tokens that may not begin the continuation; None entries are ignored.
    """

    def __init__(
        self,
        model: CausalLM,
        mask: Tensor,
        max_length: int,
        vocab_size: int,
        banned: Sequence[int | None],
    ) -> None:
        super().__init__(model, mask, max_length)
        self._vocab_size = vocab_size
        self._banned = [id for id in banned if id is not None]

    def run(self, tokens: Tensor) -> Tensor:
        """Return the base class's logits with -inf for forbidden tokens."""
        is_first = self.cache.length == 0
        scores = super().run(tokens)
        scores[:, self._vocab_size :] = -torch.inf
        if is_first:
            scores[:, self._banned] = -torch.inf
        return scores


def _write_span(
    model: Any, tokenizer: CPM2Tokenizer, ids: Sequence[int], options: dict[str, Any]
) -> str:
    """Generate the span at the end of a text: EVA's answer or CPM-2's first masked span."""
    source, ends = read_span(model, tokenizer, ids)
    options["eos_token_id"] = (*GenerationConfig(**options).eos_tokens, *ends)
    out = generate(model, torch.tensor([source]), **options)[0, 1:].tolist()
    return _show(tokenizer, [id for id in out if id not in tokenizer.sentinel_ids[:2]])


def read_span(
    model: Any, tokenizer: CPM2Tokenizer, ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the encoder's input for a text, and additional ids that end the answer."""
    blank, end = tokenizer.sentinel_id(0), tokenizer.role_id("sep")
    if model.traits.objective == "dialogues" and end is not None:
        return join_history([ids], end, blank, len(ids) + 2), []
    # A span ends where the next one begins.
    return [*ids, blank], tokenizer.sentinel_ids[1:2]
