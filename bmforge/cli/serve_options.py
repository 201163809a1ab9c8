"""Options of the command `serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from bmforge.cli.options import Memory, Panel
from bmforge.config import GROUP
from bmforge.serve.settings import (
    AccessConfig,
    BodyLimits,
    ConversationConfig,
    LoadLimits,
    RequestLimits,
    SchemaLimits,
    ServeConfig,
    TimeoutConfig,
)
from bmforge.settings import MemoryOptions

__all__ = ["ServeCommand", "ServeOptions"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeConfig):
    """Options of `bmforge serve`; each option group is a panel in the output of --help."""

    access: Panel[AccessConfig] = field(default_factory=AccessConfig, metadata=GROUP)
    chat: Panel[ConversationConfig] = field(default_factory=ConversationConfig, metadata=GROUP)
    timeouts: Panel[TimeoutConfig] = field(default_factory=TimeoutConfig, metadata=GROUP)
    body: Panel[BodyLimits] = field(default_factory=BodyLimits, metadata=GROUP)
    limits: Panel[RequestLimits] = field(default_factory=RequestLimits, metadata=GROUP)
    schema: Panel[SchemaLimits] = field(default_factory=SchemaLimits, metadata=GROUP)
    load: Panel[LoadLimits] = field(default_factory=LoadLimits, metadata=GROUP)


@dataclass(kw_only=True)
class ServeCommand:
    """Serve a model with an OpenAI-compatible API and a chat page.

    Args:
        model: directory, hub id or short name of a model that includes its tokenizer.
        config: address and limits of the server.
        adapter: adapter directories to attach to the model; DIR=0.5 scales the adapter's output by
            0.5. With NAME=DIR, the adapter is used only by requests whose `model` is NAME; all
            other requests use the base model.
        allow_other_base: accept adapters that were trained on a base model with other weights.
        context: maximum number of tokens of prompt and answer together; --max-model-len is an alias
            (if None: the model's maximum sequence length, or the longest that fits into memory).
        max_num_seqs: maximum number of sequences that are generated concurrently; further requests
            wait.
        speculate: enable speculative decoding with tokens proposed by n-gram lookup.
        draft: draft model for speculative decoding, with the same vocabulary as the model (if None:
            no draft model).
        embedding_model: second model, which serves embeddings and shares the memory budget (if
            None: no embeddings).
        unload_after_s: time in seconds without requests after which the model is unloaded; the next
            request loads it again (if None: never).
        memory: memory limits of the model.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[ServeOptions, tyro.conf.arg(name="")] = field(default_factory=ServeOptions)
    adapter: tuple[str, ...] = ()
    allow_other_base: bool = False
    context: int | None = None
    max_num_seqs: int = 16
    speculate: bool = False
    draft: str | None = None
    embedding_model: str | None = None
    unload_after_s: float | None = None
    memory: Memory = field(default_factory=MemoryOptions)
