"""Soft prompts: trained embeddings before the text (for an encoder-decoder, the source text)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError
from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.prompt import has_prompt, prompt_ids
from bmforge.shards import local_box, local_tensor, whole_tensor
from bmforge.tune.delta.attached import deltas_of
from bmforge.tune.delta.delta import Delta

__all__ = ["SoftPrompt", "put_rows_before"]

# Per-token argument -> its value at the prompt's positions.
_OF_TOKENS = {"attention_mask": 1, "token_type_ids": 0, "global_attention_mask": 0, "role_ids": 0}
# Arguments that do not depend on the prompt, or that are changed separately.
_OTHERS = {
    "adapter_names",
    "labels",
    "decoder_input_ids",
    "decoder_attention_mask",
    "past_key_values",
    "use_cache",
    "decoder_role_ids",
    "cache",
    "num_items_in_batch",
    "output_hidden_states",
    "return_dict",
    "num_items",
    "start_positions",
    "end_positions",
    "output_attentions",
    "output_router_logits",
    "encoder_outputs",
    "logits_at",
    "logits_to_keep",
    "encoder_last_hidden_state",
    "decoder_inputs_embeds",
}


class SoftPrompt(Delta):
    """Soft prompt: trained embeddings before every text, with token ids above the vocabulary.

    The model is called as before: the soft prompt's ids are prepended to `input_ids`, and masks and
    labels are extended. Logits include the prompt's positions; the loss does not.

    Args:
        model: bmforge model that reads tokens.
        words: ids of tokens whose embeddings initialize the prompt, repeated as needed; () for a
            random initialization.
        options: `length` and `std`, and the options of every `Delta`.

    Attributes:
        scores: all scores of the search, if `tune_black_box` found the prompt.

    Source: Lester et al., "The power of scale for parameter-efficient prompt tuning" (2021).
    """

    kind = "prompt"
    default_targets = ("embed",)
    defaults = MappingProxyType({"length": 100, "std": 0.5})
    peft_type = "PROMPT_TUNING"
    peft_reads = ("P_TUNING",)
    scores: list[float]

    def __init__(self, model: nn.Module, *, words: Sequence[int] = (), **options: Any) -> None:
        self.words = tuple(words)
        self.scores = []
        if not isinstance(getattr(model, "embed", None), nn.Embedding):
            raise ConfigError(
                f"a {type(model).__name__} has no bmforge token embedding (`embed`), so a soft "
                "prompt cannot be attached. Load the model with bmforge's AutoModel."
            )
        length = options.get("length", self.defaults["length"])
        limit = getattr(model, "position_limit", None)
        if limit is not None and length >= limit:
            raise ConfigError(
                f"length={length} leaves no positions for text, because the model has only {limit} "
                "positions. Use a shorter prompt."
            )
        super().__init__(model, **options)

    @classmethod
    def from_places(cls, model: nn.Module, name: str, options: Mapping[str, Any]) -> Self:
        """Attach the prompt to the token embedding, its only possible target."""
        return cls(model, name=name, **{k: v for k, v in options.items() if k != "targets"})

    def init_(self, seed: int = 0) -> SoftPrompt:
        """Initialize the prompt at random, or from the embeddings of `words`."""
        super().init_(seed)
        table: Any = getattr(self.model, "embed", None)
        prompt: Any = self.held[0].part
        if self.words and not prompt.weight.is_meta and table is not None:
            rows = whole_tensor(table.weight)
            ids = torch.tensor(self.words, device=rows.device)
            ids = ids.repeat(-(-prompt.weight.shape[0] // len(ids)))[: prompt.weight.shape[0]]
            with torch.no_grad():
                local_tensor(prompt.weight).copy_(rows[ids][local_box(prompt.weight).slices])
        return self

    def record_(self, is_there: bool) -> None:
        super().record_(is_there)
        hooks = self.model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is put_prompt_first]:
            del hooks[key]
            self.model._forward_pre_hooks_with_kwargs.pop(key, None)
        if is_there:
            self.model.register_forward_pre_hook(put_prompt_first, with_kwargs=True)


def put_prompt_first(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a model with a soft prompt: prepends the prompt to the inputs.

    Raises:
        ConfigError: a per-token argument has no defined value at the prompt's positions.
    """
    table = model.whole().embed
    prompt = getattr(table, "prompt", None)
    if prompt is None or weight_of(prompt) == 0:
        return None
    if args:
        parameters = signature(type(model).forward).parameters.items()
        names = [n for n, p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:] or ["input_ids"]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        args = args[len(names) :]
    ids = kwargs.get("input_ids")
    cache = kwargs.get("past_key_values", kwargs.get("cache"))
    if ids is None or (cache is not None and cache.length):
        return args, kwargs
    if torch.compiler.is_compiling() and cache is None:
        # A compiled graph cannot branch on the values of ids. Only `generate`, which passes a
        # cache, adds the prompt to the ids itself.
        torch._assert_async((ids < table.num_embeddings).all(), _PUT_TWICE)
    elif has_prompt(table, ids):
        return args, kwargs
    unknown = [k for k, v in kwargs.items() if v is not None and k not in _KNOWN]
    if args or unknown:
        raise ConfigError(
            "a soft prompt does not support the arguments "
            f"{', '.join(unknown) or 'more arguments'}. Leave these arguments out, or prepend the "
            "prompt's ids to input_ids (bmforge.nn.prompt.prompt_ids) and extend these arguments."
        )
    length = prompt.weight.shape[0]
    new = {**kwargs, "input_ids": prompt_ids(table, ids)}
    for name, value in _OF_TOKENS.items():
        tensor = kwargs.get(name)
        if tensor is not None and tensor.shape != ids.shape:
            raise ConfigError(
                f"{name} has the shape {tuple(tensor.shape)} (expected: {tuple(ids.shape)}, the "
                "shape of input_ids)."
            )
        if tensor is not None:
            new[name] = F.pad(tensor, (length, 0), value=value)
    if kwargs.get("logits_at") is not None and not _is_apart(model):
        new["logits_at"] = kwargs["logits_at"] + length
    labels = kwargs.get("labels")
    if labels is not None and labels.shape == ids.shape and not _is_apart(model):
        if model.config.head == "language_model" and model.shifts_labels:
            labels = labels.index_fill(1, labels.new_zeros(1), IGNORE_INDEX)
        new["labels"] = F.pad(labels, (length, 0), value=IGNORE_INDEX)
    return args, new


_KNOWN = {"input_ids", *_OF_TOKENS, *_OTHERS}
_PUT_TWICE = (
    "input_ids contains the ids of the soft prompt (vocab_size and above), but a compiled model "
    "prepends the prompt itself. Remove these ids, or do not compile the whole model."
)


def _is_apart(model: Any) -> bool:
    """Return True if the model is an encoder-decoder, with separate source and target sequences."""
    return bool(model.traits.is_encoder_decoder)


def put_rows_before(
    model: Any, ids: tuple[int, ...], names: tuple[str, ...] | None
) -> tuple[int, ...]:
    """Prepend the ids of the enabled soft prompt, if any, to the token ids of a text.

    Args:
        model: model with or without adapters.
        ids: token ids of a text.
        names: names of the enabled adapters; if None, those that `use_deltas` enabled.
    """
    for name, delta in deltas_of(model).items():
        is_on = bool(delta.weight) if names is None else name in names
        if is_on and isinstance(delta, SoftPrompt) and delta.is_attached():
            table = model.embed
            if all(id < table.num_embeddings for id in ids):
                row = prompt_ids(table, torch.tensor([ids]))
                return tuple(row[0].tolist())
    return ids
