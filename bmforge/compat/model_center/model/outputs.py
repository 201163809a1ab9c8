"""Outputs of ModelCenter's models, readable by position and by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = [
    "BaseModelOutput", "BaseModelOutputWithPooling", "Later", "ModelOutput", "Seq2SeqModelOutput",
]  # fmt: skip


class Later:
    """Lazy value, computed on first access with the gradient mode of the original call.

    Args:
        make: function that computes the value, or raises an error with the reason.
        is_available: False if `make` always raises an error; positional access then returns None.
    """

    def __init__(self, make: Callable[[], Tensor], is_available: bool = True) -> None:
        self.make, self.is_available, self.has_gradients = (
            make,
            is_available,
            torch.is_grad_enabled(),
        )

    def __call__(self) -> Tensor:
        """Compute and return the value."""
        with torch.set_grad_enabled(self.has_gradients):
            return self.make()


class ModelOutput:
    """Base class of outputs: values by attribute, by `out["name"]`, and by position.

    Fields that were not requested are None; positions include them.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        values_by_name = {**dict(zip(self.fields, values, strict=False)), **named}
        unknown = [name for name in values_by_name if name not in self.fields]
        if unknown or len(values) > len(self.fields):
            raise TypeError(f"{type(self).__name__} has only the fields {', '.join(self.fields)}.")
        self.__dict__["_values"] = {name: values_by_name.get(name) for name in self.fields}

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}.")
        if isinstance(values[name], Later):
            values[name] = values[name]()
        return values[name]

    def _peek(self, name: str) -> Any:
        value = self._values[name]
        is_void = isinstance(value, Later) and not value.is_available
        return None if is_void else getattr(self, name)

    def __iter__(self) -> Iterator[Any]:
        return (self._peek(name) for name in self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return tuple(self._peek(name) for name in self.fields[key])
        if isinstance(key, int):
            return self._peek(self.fields[key])
        if key not in self.fields:
            raise KeyError(f"{type(self).__name__} has no field {key!r}.")
        return getattr(self, key)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields that are not None."""
        void = (
            v is None or (isinstance(v, Later) and not v.is_available)
            for v in self._values.values()
        )
        return tuple(name for name, is_void in zip(self.fields, void, strict=True) if not is_void)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values that are not None."""
        return tuple(getattr(self, name) for name in self.keys())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.keys())})"


class BaseModelOutput(ModelOutput):
    """Output of a decoder.

    Shape:
        last_hidden_state: (B, T, D)
        logits: (B, T, V), or (B, T, cls_head); computed when read
        hidden_states: num_layers + 1 tensors (B, T, D), if requested
    """

    fields = ("last_hidden_state", "past_key_values", "logits", "hidden_states", "attentions")


class BaseModelOutputWithPooling(ModelOutput):
    """Output of an encoder, with the fields of `BaseModelOutput` and a pooler output.

    Shape:
        pooler_output: (B, D)
    """

    fields = (
        *("last_hidden_state", "pooler_output", "past_key_values"),
        *("logits", "hidden_states", "attentions"),
    )


class Seq2SeqModelOutput(ModelOutput):
    """Output of an encoder-decoder: the fields of `BaseModelOutput` and the encoder's states.

    Shape:
        encoder_last_hidden_state: (B, S, D)
    """

    fields = (
        *("last_hidden_state", "encoder_last_hidden_state", "past_key_values", "logits"),
        *("encoder_hidden_states", "decoder_hidden_states", "decoder_attentions"),
        *("cross_attentions", "encoder_attentions"),
    )
