"""Exports a model with its tokenizer as one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bmforge.gguf_header import is_gguf
from bmforge.logging import get_logger
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig
from bmforge.models.config_file import GENERATION_FILE
from bmforge.models.formats.convert import find_companions, find_dtype
from bmforge.models.formats.gguf_config import SAMPLING_KEYS
from bmforge.models.formats.gguf_write import GgufType, check_target, write_gguf
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.hub import AutoModel, find_model
from bmforge.tokenizers import AutoTokenizer, Tokenizer
from bmforge.tokenizers.chat_template import find_template
from bmforge.tokenizers.gguf_write import describe_tokenizer

__all__ = ["export_gguf"]


def export_gguf(
    model: Model | str | Path,
    path: str | Path,
    kind: GgufType = "q8_0",
    *,
    tokenizer: Tokenizer | None = None,
    allow_unknown: tuple[str, ...] = (),
    overwrite: bool = False,
) -> Path:
    """Write a model as a GGUF file for llama.cpp and compatible runtimes.

    Supported families: Llama, Qwen2, Qwen3, their MoE models, Mixtral, MiniCPM, Granite, Cohere 1
    and 2, Gemma 1 to 3, OLMo 2 and 3, SmolLM3, GLM-4 0414, GPT-2, GPT-J, T5, and BERT without head.

    Args:
        model: bmforge model, or the directory, GGUF file, hub id or short name of a model.
        path: output file, which must end in ``.gguf``.
        kind: tensor type of the matrices: "f32", "f16", "bf16", "q8_0" or "q4_0".
        tokenizer: tokenizer to include; if None, the model directory's tokenizer, if any.
        allow_unknown: names of unknown config fields to ignore.
        overwrite: replace an existing file.

    Returns:
        path of the output file

    Raises:
        CheckpointError: the file exists, the source is damaged, or values do not fit the tensor
            type.
        ConfigError: the source does not exist, or GGUF cannot represent the model or tokenizer.
        MissingDependencyError: `gguf` is not installed.
    """
    check_target(Path(path), kind, overwrite)
    template = None
    if not isinstance(model, Model):
        source = find_model(model)
        dtype = torch.float32 if is_gguf(source) else find_dtype(WeightFiles(source))
        model = AutoModel.from_pretrained(source, dtype=dtype, allow_unknown=allow_unknown)
        if tokenizer is None and (
            is_gguf(source) or set(find_companions(source)) - {GENERATION_FILE}
        ):
            tokenizer = AutoTokenizer.from_pretrained(source)
            template = find_template(source)
    tokens: dict[str, Any] | None = None
    if tokenizer is not None:
        tokens = describe_tokenizer(tokenizer, model.config.vocab_size, template)
        tokens |= _describe_generation(model.config, tokenizer.eos_id)
    else:
        get_logger().warning(
            "the GGUF file %s has no tokenizer, so it can be used only with token ids.", path
        )
    return write_gguf(model, path, kind, tokens=tokens, overwrite=overwrite)


def _describe_generation(config: ModelConfig, eos_id: int | None) -> dict[str, Any]:
    """Return the metadata keys for EOS tokens and sampling options."""
    published = config.generation_defaults
    ids: list[int] = []
    for source in (published, config.raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    others = [id for id in dict.fromkeys(ids) if id != eos_id and 0 <= id < config.vocab_size]
    if len(others) > 2:
        get_logger().warning(
            "a GGUF file stores at most three end-of-sequence tokens, so these token ids of the "
            "model are left out: %s.",
            others[2:],
        )
    roles = zip(("eot", "eom"), others, strict=False)
    keys: dict[str, Any] = {f"tokenizer.ggml.{role}_token_id": id for role, id in roles}
    if published.get("do_sample"):
        for key, name in SAMPLING_KEYS.items():
            if isinstance(published.get(name), int | float):
                value = published[name]
                keys[f"general.sampling.{key}"] = int(value) if key == "top_k" else float(value)
    return keys
