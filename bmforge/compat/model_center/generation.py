"""Text generation with Llama and T5 under ModelCenter's names, with bmforge's decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.compat.model_center.model.base import BaseModel
from bmforge.errors import ConfigError
from bmforge.infer.decoder_factory import start_decoder
from bmforge.infer.generation import run_decoder
from bmforge.infer.options import GenerationConfig
from bmforge.surgery import eval_mode

__all__ = ["LlamaBeamSearch", "LlamaRandomSampling", "T5BeamSearch", "T5RandomSampling"]


class _Generation:
    """Base class that generates continuations of texts.

    Args:
        model: model of `bmforge.compat.model_center.model` with a language-model head; later
            weight changes have no effect.
        tokenizer: transformers tokenizer.
    """

    def __init__(self, model: BaseModel, tokenizer: Any) -> None:
        model.eval()
        self.model, self.tokenizer = model, tokenizer
        self.zoo: Any = model.to_zoo()

    def generate(self, text_list: list[str], **options: Any) -> list[str]:
        """Generate a continuation of each text; the subclasses define the options."""
        window = options.pop("repetition_window", None)
        if window is not None:
            raise ConfigError(
                f"repetition_window={window} is not supported, because the penalty applies to "
                "all generated tokens. Leave it out."
            )
        config = self._configure(**options)
        ids, mask = self._encode(text_list)
        with eval_mode(self.zoo), torch.no_grad():
            decoder, start = start_decoder(self.zoo, ids, mask, config.max_new_tokens + 1)
            start = self._begin(start)
            # The repetition penalty applies to generated tokens only.
            length = start.shape[1]
            rows = run_decoder(decoder, start, torch.full_like(start[:, 0], length), config)
        return [self._finish(row[length:].tolist(), config) for row in rows]

    def _configure(self, **options: Any) -> GenerationConfig:
        """Build the generation config from the options."""
        return GenerationConfig(
            max_new_tokens=options.pop("max_length", 100) + 1,
            min_new_tokens=1,
            eos_token_id=self._end_tokens(),
            pad_token_id=self._end_tokens()[0],
            **options,
        )

    def _finish(self, ids: list[int], config: GenerationConfig) -> str:
        """Decode the generated ids before the first EOS token."""
        ends = [at for at, token in enumerate(ids) if token in config.eos_tokens]
        answer = ids[: ends[0]] if ends else ids[: config.max_new_tokens - 1]
        return str(self.tokenizer.decode(answer))

    def _end_tokens(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end generation."""
        return (self.tokenizer.eos_token_id,)

    def _encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Encode texts as ids and attention mask, padded on the left.

        Shape:
            token ids and attention mask: (B, T)
        """
        rows = [self._tokenize(text) for text in texts]
        width = max(map(len, rows))
        device = next(self.zoo.parameters()).device
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return ids, torch.tensor(mask, device=device)

    def _tokenize(self, text: str) -> list[int]:
        """Return the token ids of one text."""
        return list(self.tokenizer.encode(text))

    def _begin(self, start: Tensor) -> Tensor:
        """Return the ids that the decoder starts from."""
        return start


class LlamaBeamSearch(_Generation):
    """Text generation with Llama, by beam search.

    Options of `generate`: `beam_size`, `max_length` (tokens), `repetition_penalty`.
    """

    def _configure(self, beam_size: int = 3, **options: Any) -> GenerationConfig:
        return super()._configure(num_beams=beam_size, **options)


class LlamaRandomSampling(_Generation):
    """Text generation with Llama, by random sampling.

    Options of `generate`: `top_k` (0: all), `top_p`, `temperature`, `max_length` (tokens),
    `repetition_penalty`.
    """

    def _configure(
        self, top_k: int = 0, top_p: float = 0.9, temperature: float = 0.9, **options: Any
    ) -> GenerationConfig:
        chosen = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
        return super()._configure(do_sample=True, **chosen, **options)


class _T5(_Generation):
    """Base class for T5, which generates text for the first sentinel token of the input.

    The sentinel token is appended to texts that lack it.
    """

    def _end_tokens(self) -> tuple[int, ...]:
        """Return the next sentinel token and the EOS token."""
        return (self._blank(1), self.tokenizer.eos_token_id)

    def _blank(self, number: int) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(f"<extra_id_{number}>"))

    def _tokenize(self, text: str) -> list[int]:
        """Return the token ids of one text with a sentinel and an EOS token."""
        ids = [i for i in self.tokenizer.encode(text) if i != self.tokenizer.eos_token_id]
        blank = [] if self._blank(0) in ids else [self._blank(0)]
        return [*ids, *blank, self.tokenizer.eos_token_id]

    def _begin(self, start: Tensor) -> Tensor:
        """Return the decoder's start token and the sentinel token."""
        return torch.cat((start, torch.full_like(start[:, :1], self._blank(0))), 1)


class T5BeamSearch(_T5, LlamaBeamSearch):
    """Beam search with T5; see `LlamaBeamSearch`."""


class T5RandomSampling(_T5, LlamaRandomSampling):
    """Sampling with T5; see `LlamaRandomSampling`."""
