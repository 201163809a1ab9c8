"""`Engine`: runs a model within a memory budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from bmforge.device import find_devices, is_host
from bmforge.errors import ConfigError
from bmforge.host_tuning import read_tuning, return_freed_memory
from bmforge.infer.conversation import ChatSession, LockedConversation, open_chat_session
from bmforge.infer.engine.budget import EngineConfig, plan_memory
from bmforge.infer.engine.draft import check_draft, open_draft
from bmforge.infer.engine.encode import classify, embed, fill_mask, name_inputs, read_rows
from bmforge.infer.engine.encodings import Encoding
from bmforge.infer.engine.limit import check_method, check_module, check_size, check_tokenizer
from bmforge.infer.engine.memory_plan import MemoryPlan
from bmforge.infer.engine.model_lock import ModelLock
from bmforge.infer.engine.packed_directory import quantize_source
from bmforge.infer.engine.request import Handle, Request, RequestsStatus
from bmforge.infer.engine.requests import Requests, open_requests
from bmforge.infer.engine.score import score_pairs
from bmforge.infer.engine.span_filling import fill_blanks
from bmforge.infer.engine.stream import continue_prompts, stream_text
from bmforge.infer.engine.tasks import SteppedTask
from bmforge.infer.engine.weights import place_, read_weights_
from bmforge.infer.generation import generate
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.logging import get_logger
from bmforge.memory.direct_read import DirectReader
from bmforge.memory.streamed_experts import ExpertStreamer
from bmforge.memory.streaming import Streamer
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.models.quantize import quantize_
from bmforge.nn.packing import QuantSpec
from bmforge.settings import ChatSessionConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.delta.selection import DeltaChoice, check_names, choosing_deltas

__all__ = ["Engine"]


class Engine:
    """Runs a model within a memory budget: generation, embeddings, scores and conversations.

    Blocks that do not fit are streamed from host memory or disk in every pass; results equal those
    of the model without a budget, up to rounding. Calls run one at a time; submitted requests are
    batched. ``delta=`` names the adapters of a call; () means the base model, None the active ones.

    Args:
        model: directory, hub id or short name of a model; or a module with repeated blocks,
            which is placed in memory as planned and remains the same object.
        device_budget_bytes: budget of every device for weights, streaming buffers, KV cache and
            activations (default: the free memory).
        host_budget_bytes: budget of host memory if the device is an accelerator (default: half
            of the free memory).
        quantize: quantization scheme of the weights (`nn.packing.PRESETS`). Quantized weights
            of a directory are written to a temporary directory in `EngineConfig.spill_directory`;
            `quantize_directory` keeps them.
        dtype: dtype of the weights (default: fp32, or the module's).
        devices: indices or names of devices, filled with blocks one after the other; "cpu" is
            allowed (default: one device).
        tokenizer: tokenizer (default: the model directory's).
        config: limits of the engine.
        options: arguments of `Model.from_pretrained`, such as `head` or `allow_unknown`.

    Attributes:
        plan: placement of the blocks; printed as a table.
        model: the module, in eval mode. Parameters loaded from a directory do not require
            gradients.

    Raises:
        ConfigError: a budget is too small (the message names the smallest sufficient one,
            before weights are read) or out of range, or the model is parallelized over processes.
        CheckpointError: the weights do not fit the model, or are damaged.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device_budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        quantize: str | QuantSpec | None = None,
        dtype: torch.dtype | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        self.config, self._tokenizer = config or EngineConfig(), tokenizer
        self._making, self._is_closed = threading.Lock(), False
        self._hold, self._given = ModelLock(), ExitStack()
        self._requests: Requests | None = None
        self._directory: Path | None = None
        self._streamers: Sequence[Streamer | ExpertStreamer] = ()
        places = find_devices(devices)
        self.device = places[0]
        is_limited = device_budget_bytes is not None and any(map(is_host, places))
        if is_limited and "memory" in read_tuning():
            return_freed_memory()
        self._draft, spelled, beside = open_draft(self.config, device_budget_bytes, self.device)
        plan = partial(
            plan_memory,
            devices=places,
            config=replace(self.config, adapter_bytes=self.config.adapter_bytes + beside),
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
        )
        try:
            prepare: Any = self._take if isinstance(model, nn.Module) else self._open
            self.model, place_weights = prepare(model, plan, quantize, dtype, options)
            if self._draft is not None:
                vocabulary = self.tokenizer.get_vocab() if spelled and self._directory else None
                check_draft(self.model, self._draft, vocabulary, spelled)
            self.plan = plan(self.model)
            self._call_rows = self.config.call_rows_of(self.model)
            self._streamers, give_back = place_weights(plan=self.plan)
            self._given.callback(give_back)
        except BaseException:
            self._given.close()
            raise
        self._guard = None
        # A full accelerator has memory for the planned tensors only.
        is_full = self.plan.moved_bytes and not is_host(self.device)
        if device_budget_bytes is not None or is_full or self.plan.others:
            limit = self._call_rows, self.config.tokens_of(self.model)
            self._guard = self.model.register_forward_pre_hook(
                partial(check_size, limit), with_kwargs=True
            )
            self._given.callback(self._guard.remove)
        get_logger().info("engine: %s", self.plan.line())

    def _open(
        self,
        name: str | Path,
        plan: Callable[[nn.Module], MemoryPlan],
        quantize: str | QuantSpec | None,
        dtype: torch.dtype | None,
        options: Mapping[str, Any],
    ) -> tuple[Any, Callable[..., Any]]:
        """Create the model in `name` on the meta device; return it and its loading function."""
        self._directory = source = find_model(name)
        if quantize is not None:
            folder = self.config.spill_directory
            source = quantize_source(source, quantize, plan, folder, self._given, options)
        empty_model, files = AutoModel.describe_pretrained(
            source, dtype=dtype or torch.float32, reads=DirectReader(), **options
        )
        return empty_model.eval().requires_grad_(False), partial(read_weights_, empty_model, files)

    def _take(
        self,
        model: nn.Module,
        plan: Callable[[nn.Module], MemoryPlan],
        quantize: str | QuantSpec | None,
        dtype: torch.dtype | None,
        options: Mapping[str, Any],
    ) -> tuple[Any, Callable[..., Any]]:
        """Prepare a module in memory; return it, and the function that places its weights."""
        check_module(model, self.config, options)
        model = model.eval() if dtype is None else model.eval().to(dtype)
        if quantize is not None:
            quantize_(model, quantize)
        return model, partial(place_, model, directory=self.config.spill_directory)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model.

        Raises:
            ConfigError: there is no tokenizer, or it belongs to another model.
        """
        if self._tokenizer is None:
            if self._directory is None:
                raise ConfigError("text needs a tokenizer. Create Engine(model, tokenizer=...).")
            self._tokenizer = AutoTokenizer.from_pretrained(self._directory)
        check_tokenizer(self.model, self._tokenizer)
        return self._tokenizer

    def generate(self, prompts: Any, *, delta: DeltaChoice = None, **options: Any) -> Any:
        """Continue one or several prompts.

        Args:
            prompts: a string or a list of strings, in the prompt format of the model family
                (`write_text`); a list of token ids or of such lists; or a tensor (B, T) as in
                `bmforge.infer.generate`.
            options: fields of `GenerationConfig`; for token ids also `attention_mask` and
                `on_token`.

        Returns:
            prompts with their continuations, of the same type as `prompts`. With
            `num_return_sequences` above 1, each text or list of ids becomes a list of several.

        Raises:
            ConfigError: there is no prompt or an empty one, there are more sequences or tokens than
                planned, or an option does not apply.
            ShapeError: ids are outside of the vocabulary.
        """
        with self.turn("generate", delta=delta) as model:
            if isinstance(prompts, Tensor):
                return generate(model, prompts.to(self.device), **options)
            return continue_prompts(model, lambda: self.tokenizer, prompts, **options)

    def stream(self, prompt: str, *, delta: DeltaChoice = None, **options: Any) -> Iterator[str]:
        """Yield the continuation of a prompt in chunks, as it is generated.

        Options and errors are those of `generate`, without beam search.
        """
        with self.turn("stream", delta=delta) as model:
            yield from stream_text(model, self.tokenizer, prompt, **options)

    def submit(self, request: Request) -> Handle:
        """Queue a request and return its handle at once; a background thread batches requests.

        May be called from any thread. While requests run, other methods can be used only inside
        `call`.

        Args:
            request: prompt and generation options.

        Raises:
            ConfigError: the request does not fit the model or the engine, the queue is full, or the
                engine is closed or has failed.
            ShapeError: ids are outside of the vocabulary.
        """
        self._check("submit", writes=True)
        return self._queue().submit(request)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps of the batch loop, and return its result.

        The function may call all other methods of the engine: ``engine.call(lambda:
        engine.embed(texts))``. May be called from any thread.
        """
        self._check("call", writes=False)
        return self._queue().call(function)

    def weights_changed(self) -> int:
        """Drop all cached keys and values after the weights changed; return the new version.

        An idle engine detects changes itself when a request starts; a running engine does not.
        """
        self._check("weights_changed", writes=True)
        return self._queue().weights_changed()

    @property
    def weights_version(self) -> int:
        """Number of detected changes of the weights; included in every `Completion`."""
        return 0 if self._requests is None else self._requests.weights_version

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the thread of batched requests; None while it runs."""
        return None if self._requests is None else self._requests.failure

    def requests_status(self) -> RequestsStatus:
        """Return the numbers of running and waiting requests and of used pages."""
        self._check("requests_status", writes=False)
        return self._queue().status()

    def _queue(self) -> Requests:
        """Return the batch loop, which the first request creates."""
        with self._making:
            if self._requests is None:
                has_texts = self._tokenizer is not None or self._directory is not None
                self._requests = open_requests(
                    self.model,
                    (lambda: self.tokenizer) if has_texts else None,
                    self.config,
                    is_limited=self._guard is not None,
                    turn=self._hold.shared,
                    draft=self._draft,
                    is_shared=self._directory is None,
                )
            return self._requests

    def submit_embed(
        self, inputs: Any, *, deadline_s: float | None = None, **options: Any
    ) -> Future[Tensor]:
        """Queue an `embed` request and return its future; see `submit` for threads and errors.

        Args:
            inputs: texts, lists of token ids of any lengths, or a tensor.
            deadline_s: deadline in seconds, after which the future raises `TimeoutError`.
            options: `pooling`, `normalize` and `delta` of `embed`.
        """
        self._check("submit_embed", writes=False)
        rows = read_rows(self.model, self._ids(inputs))
        deltas = check_names(self.model, options.pop("delta", None))
        return self._queue().add(Encoding(rows, deadline_s=deadline_s, deltas=deltas, **options))

    def submit_documents(
        self, documents: Any, *, deadline_s: float | None = None, **options: Any
    ) -> Future[Any]:
        """Queue a `fill_documents` request and return its future; see `submit_embed`."""
        self._check("submit_documents", writes=True)
        deltas = check_names(self.model, options.pop("delta", None))
        arguments = {"batch_size": min(8, self._call_rows), **options}
        fill = partial(fill_documents, self.model, self.tokenizer, documents, **arguments)
        return self._queue().add(SteppedTask(self.model, fill, deadline_s, deltas))

    def submit_task(self, make: Callable[[Any], SteppedTask]) -> Future[Any]:
        """Queue a task, created by calling `make` with the model, and return the task's future."""
        self._check("submit_task", writes=False)
        return self._queue().add(make(self.model))

    def embed(self, inputs: Any, *, delta: DeltaChoice = None, **options: Any) -> Tensor:
        """Return an embedding of every input, (B, D); see `encode.embed`."""
        with self.turn("embed", writes=False, delta=delta) as model:
            return embed(model, self._ids(inputs), max_rows=self._call_rows, **options)

    def fill_mask(self, texts: Any, *, top: int = 5, delta: DeltaChoice = None) -> Any:
        """Return the most likely tokens for every mask token of texts; see `encode.fill_mask`."""
        with self.turn("fill_mask", writes=False, delta=delta) as model:
            return fill_mask(model, self.tokenizer, texts, top=top)

    def classify(self, inputs: Any, *, delta: DeltaChoice = None) -> Tensor:
        """Return the class probabilities of inputs; see `encode.classify`."""
        with self.turn("classify", writes=False, delta=delta) as model:
            return classify(model, self._ids(inputs), max_rows=self._call_rows)

    def score(self, pairs: Sequence[tuple[str, str]], *, delta: DeltaChoice = None) -> list[float]:
        """Return the mean loss of the text of each (prompt, text) pair, in nats per token."""
        with self.turn("score", delta=delta) as model:
            return score_pairs(model, self.tokenizer, pairs)

    def fill_documents(
        self, documents: Sequence[Any], *, delta: DeltaChoice = None, **options: Any
    ) -> Any:
        """Fill CPM-Bee documents; see `bmforge.infer.openbmb.documents.fill_documents`."""
        with self.turn("fill_documents", delta=delta) as model:
            arguments = {"batch_size": min(8, self._call_rows), **options}
            return fill_documents(model, self.tokenizer, documents, **arguments)

    def fill_blanks(self, text: str, *, delta: DeltaChoice = None, **options: Any) -> list[str]:
        """Return the generated text for every ``<span>``; see `span_filling.fill_blanks`."""
        with self.turn("fill_blanks", delta=delta) as model:
            return fill_blanks(model, self.tokenizer, text, **options)

    def chat(self, *, delta: DeltaChoice = None, **options: Any) -> ChatSession:
        """Open a chat session; `options` are fields of `ChatSessionConfig`."""
        with self.turn("chat", delta=delta) as model:
            limit = None if self._guard is None else self.config.tokens_of(model)
            config, directory = ChatSessionConfig(**options), self._directory
            session = open_chat_session(
                model, self.tokenizer, config, directory=directory, limit=limit
            )
        return LockedConversation(session, lambda: self.turn("reply", delta=delta))

    def close(self) -> None:
        """Release threads, files and streaming slots; a module's weights stay on their devices."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._given:  # release even if the wait for the thread is interrupted
            if self._requests is not None:
                self._requests.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    def _ids(self, inputs: Any) -> Any:
        return name_inputs(inputs, lambda: self.tokenizer, self.device)

    @contextmanager
    def turn(self, what: str, writes: bool = True, delta: DeltaChoice = None) -> Iterator[Any]:
        """Context manager: lock the model for the method `what`; activate the adapters of `delta`.

        Raises:
            ConfigError: the engine is closed or busy, or the model does not support the method.
                If `writes` is True, the method needs a language-model head.
        """
        self._check(what, writes)
        with self._hold.alone(what, self._requests):
            if self._requests is not None and self._guard is not None:
                self._requests.release()
            with choosing_deltas(self.model, check_names(self.model, delta)):
                yield self.model

    def _check(self, what: str, writes: bool) -> None:
        """Raise `ConfigError` if the engine is closed or the model does not support `what`."""
        if self._is_closed:
            raise ConfigError(f"{what} was called on a closed engine. Create a new engine.")
        check_method(self.model, what, writes)
