"""A head width is saved and read again, or refused when the config is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tiny_models import TINY

from bmforge.errors import ConfigError
from bmforge.models.families import FAMILIES

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 32,
    "num_dense": 1,
}


def tiny_config(name: str) -> Any:
    """Return a small config of a family."""
    kind = FAMILIES[name].config_class
    known = next((config for config in TINY.values() if type(config) is kind), None)
    if known is not None:
        return known
    fields = {field.name for field in dataclasses.fields(kind)}
    sizes = {key: value for key, value in _SIZES.items() if key in fields}
    kv_heads = {"num_kv_heads": 4} if "num_kv_heads" in fields else {}
    padding = {"pad_token_id": 0} if "pad_token_id" in fields else {}
    head = {"head_dim": 8} if "head_dim" in kind.hf_names else {}
    return kind(**sizes, **kv_heads, **padding, **head)


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_head_width_is_kept_or_refused(name: str, width: int) -> None:
    config = tiny_config(name)
    try:
        other = config.replace(head_dim=width)
    except ConfigError as error:
        assert "head_dim" in str(error)  # noqa: PT017
        return
    again = type(config).from_hf(other.to_hf())
    assert again.head_dim == width
