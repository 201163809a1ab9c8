"""Generates the answers of rollouts with the inference engine and the current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bmforge.errors import ConfigError
from bmforge.infer import Completion, Engine, EngineConfig, GenerationConfig, Request
from bmforge.infer.engine.native_step import NativeStep
from bmforge.infer.engine.packed_step import can_pack
from bmforge.infer.engine.request import RequestsConfig
from bmforge.parallel import pipeline_of
from bmforge.records import find_parallel_record
from bmforge.shards import whole_tensor
from bmforge.surgery import eval_mode, persistent_tensors

__all__ = ["AnswerWriter"]


class AnswerWriter:
    """Generates the answers of rollouts with the current weights of the trained model.

    On one process in fp32, the engine runs the trained module itself. A model that is sharded or
    computes in 16 bits is copied: before each rollout, its weights are gathered, one tensor at a
    time, into an unsharded model.

    Args:
        model: trained model.
        max_num_seqs: maximum number of answers in a batch.
        max_tokens: maximum length of a prompt with its answer.
        options: generation options of every answer, without the seed.
        make_copy: function that returns an unsharded model of the same structure with allocated
            weights; if None, a model that needs a copy raises an error.

    Raises:
        ConfigError: the model does not support batching, or needs a copy and `make_copy` is None.
    """

    def __init__(
        self,
        model: Any,
        max_num_seqs: int,
        max_tokens: int,
        options: GenerationConfig,
        make_copy: Callable[[], Any] | None = None,
    ) -> None:
        self._model, self._options = model, options
        self._copy = None
        self._owners: dict[str, int] = {}
        if _needs_copy(model):
            if make_copy is None:
                raise ConfigError(
                    "make_copy=None is not supported for a sharded model. Pass a function that "
                    "returns an unsharded copy of the model."
                )
            self._copy = make_copy()
            self._owners = _find_owners(model)
        if not can_pack(self._copy or model):
            raise ConfigError(
                f"rollouts do not support a {type(model).__name__} (supported: decoder-only "
                "language models with learned or rotary positions). Train another model."
            )
        requests = RequestsConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(128, max_num_seqs),
            total_tokens=max_num_seqs * (max_tokens + 32),  # KV blocks have 16 tokens
            max_queue_size=1 << 20,
        )
        self._is_training = model.training
        self._engine = Engine(
            self._copy or model, config=EngineConfig(requests=requests, max_tokens=max_tokens)
        )
        model.train(self._is_training)

    @property
    def runs_natively(self) -> bool:
        """True if native kernels run all blocks; `score` is then bit-identical to sampling."""
        model = self._copy or self._model
        with eval_mode(model):  # native kernels do not support dropout
            return NativeStep().knows(model.layers)

    @property
    def weights_version(self) -> int:
        """Version of the weights that the last rollout used."""
        return self._engine.weights_version

    def write(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], count: int
    ) -> list[list[Completion]]:
        """Generate `count` answers for each prompt.

        An answer depends only on the weights, its prompt, the prompt's seed and the answer's index.

        Args:
            prompts: token ids of the prompts.
            seeds: random seed of each prompt.
            count: number of answers per prompt.

        Comm: an all-gather of each sharded weight.
        """
        with eval_mode(self._copy or self._model):
            version = self._load_weights()
            handles = [
                self._engine.submit(
                    Request(
                        list(prompt), self._options.replace(seed=seed, num_return_sequences=count)
                    )
                )
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            answers = [handle.wait() for handle in handles]
        assert all(a.weights_version == version for group in answers for a in group)
        return answers

    def write_on(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]
    ) -> list[Completion]:
        """Generate one more turn for each prompt, with the weights of the last `write` call.

        Args:
            prompts: token ids of prompts and answers so far.
            seeds: random seed of each turn.
            limits: maximum number of tokens of each turn.
        """
        each = [
            self._options.replace(seed=seed, num_return_sequences=1, max_new_tokens=limit)
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        with eval_mode(self._copy or self._model):
            handles = [
                self._engine.submit(Request(list(prompt), options))
                for prompt, options in zip(prompts, each, strict=True)
            ]
            return [handle.wait()[0] for handle in handles]

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of every token except the first, under the current weights.

        With native kernels the values are bit-identical to those of sampling.

        Args:
            rows: token ids of prompts with their answers.

        Comm: the same as in `write`.
        """
        options = self._options.replace(
            seed=0, num_return_sequences=1, max_new_tokens=1, prompt_logprobs=0
        )
        with eval_mode(self._copy or self._model):
            self._load_weights()
            handles = [self._engine.submit(Request(list(row), options)) for row in rows]
            scored = [handle.wait()[0].prompt_logprobs or () for handle in handles]
        return [[token.logprob for token in tokens if token is not None] for tokens in scored]

    def _load_weights(self) -> int:
        """Make the engine use the current trained weights; return the version of the weights.

        The model must already be in evaluation mode, since the engine also detects mode changes.
        """
        if self._copy is not None:
            self._fill_copy()
        return self._engine.weights_changed()

    @torch.no_grad()
    def _fill_copy(self) -> None:
        """Gather the trained weights into the copy, in place."""
        trained = persistent_tensors(self._model)
        copied = persistent_tensors(self._copy)
        if not self._owners and (missing := copied.keys() - trained.keys()):
            raise RuntimeError(
                f"the rollout copy has tensors that the policy lacks: {missing}. Return a model of "
                "the same structure from make_copy."
            )
        for name, target in copied.items():
            if name in trained:
                target.copy_(whole_tensor(trained[name]))
            if self._owners:
                dist.broadcast(target, self._owners[name])

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


def _needs_copy(model: Any) -> bool:
    record = find_parallel_record(model)
    is_spread = record is not None and record.mesh is not None and record.mesh.size() > 1
    return is_spread or any(type(p.data) is not torch.Tensor for p in model.parameters())


def _find_owners(model: Any) -> dict[str, int]:
    """Return a dict from tensor name to the first rank that has the tensor; {} without a pipeline.

    Comm: an all-gather of the tensors' names.
    """
    if pipeline_of(model) is None:
        return {}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(persistent_tensors(model)))
    owners: dict[str, int] = {}
    for rank, own in enumerate(names):
        for name in own:
            owners.setdefault(name, rank)
    return owners
