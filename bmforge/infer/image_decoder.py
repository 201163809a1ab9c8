"""Decoder for vision-language models of transformers, whose prompts contain images.

Each step's inputs are prepared by the model's own methods for generation, as in transformers'
`generate`: they know the positions of image tokens (M-RoPE) and the inputs that only the first
step needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.decoder import Decoder
from bmforge.models.transformers.calls import ForeignCache, cache_argument
from bmforge.models.transformers.model import TransformersModel
from bmforge.models.transformers.structure import accepted_arguments
from bmforge.tune.delta import find_delta, list_deltas

__all__ = ["ImageDecoder"]


class ImageDecoder(Decoder):
    """Decodes a batch of sequences whose prompts may contain images.

    Args:
        model: vision-language model that computes the logits.
        mask: 1 for tokens, 0 for padding on the left; None if there is no padding.
        inputs: inputs of the model for the images of all prompts, such as `pixel_values`.
        adapter_names: adapter name of each sequence; see `Decoder`.

    Shape:
        mask: (B, prompt length)
    """

    def __init__(
        self,
        model: TransformersModel,
        mask: Tensor | None,
        inputs: Mapping[str, Tensor],
        adapter_names: Sequence[str | None] | None = None,
    ) -> None:
        self.model, self.adapter_names = model, adapter_names  # type: ignore[assignment]
        self.cache = self._past = ForeignCache()  # type: ignore[assignment]
        self._cache_name = cache_argument(model.foreign)
        if not self._cache_name:
            raise ConfigError(
                f"a {type(model.foreign).__name__} has no KV cache, so it cannot generate text "
                "from images. Use a vision-language model with a KV cache."
            )
        if inputs and len(set(adapter_names or ())) > 1:
            _check_adapters(model)
        weight = next(p for p in model.parameters() if p.is_floating_point())
        # Arguments of the next step, in addition to its tokens and the cache.
        self._state: dict[str, Any] = {
            name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        self._state["attention_mask"] = mask
        self._rows = 0

    def run(self, tokens: Tensor) -> Tensor:
        """Run the model on the prompt or the last tokens; return the next token's logits.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        foreign = self.model.foreign
        is_first = self._past.past is None
        if is_first:
            self._add_positions(tokens)
        arguments = foreign.prepare_inputs_for_generation(
            tokens,
            is_first_iteration=is_first,
            use_cache=True,
            **{self._cache_name: self._past.past},
            **self._state,
        )
        arguments.pop(self._cache_name, None)
        own = {"cache": self.cache, "logits_to_keep": 1, **self._chosen()}
        out = self.model(**{**arguments, **own})
        if is_first:
            self._drop_images(tokens)
        self._state = foreign._update_model_kwargs_for_generation({}, self._state, False)
        self._rows = tokens.shape[0]
        return out.logits[:, -1].float()

    def _add_positions(self, tokens: Tensor) -> None:
        """Compute the position ids of the prompts, from which later steps continue.

        If no position ids are passed, the model uses the offset of its last prompts, which may be
        those of another decoder.
        """
        foreign = self.model.foreign
        if "position_ids" in accepted_arguments(foreign)[0]:
            arguments = dict(self._state)
            if arguments["attention_mask"] is None:
                arguments["attention_mask"] = torch.ones_like(tokens)
            positions = foreign._prepare_position_ids_for_generation(tokens, arguments)
            self._state["position_ids"] = positions

    def _drop_images(self, tokens: Tensor) -> None:
        """Keep only the model inputs that have a value for every token, not those of images."""
        self._state = {
            name: value
            for name, value in self._state.items()
            if name == "position_ids" or (value is not None and value.shape[:2] == tokens.shape)
        }

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i of the batch with a copy of the old sequence ``rows[i]``."""
        self.cache.reorder(rows)
        self._reorder_choice(rows)
        for name, value in self._state.items():
            dim = value.dim() - 2 if name == "position_ids" else 0
            if value.shape[dim] == self._rows:
                self._state[name] = value.index_select(dim, rows)
        self._rows = len(rows)


def _check_adapters(model: TransformersModel) -> None:
    """Raise `ConfigError` if an adapter changes modules outside of the text decoder.

    Such an adapter cannot be selected per prompt: the batch dimension of a vision tower counts
    images or patches, not prompts.
    """
    stack = model.structure.stacks[0]
    for name in list_deltas(model):
        owners = find_delta(model, name).places()
        outside = [owner for owner in owners if not owner.startswith(f"{stack}.")]
        if outside:
            raise ConfigError(
                f"the adapter {name!r} changes {outside[0]} outside of the decoder, so prompts "
                "with images cannot use different adapters in one batch. Send the prompts of "
                "each adapter in a separate batch."
            )
