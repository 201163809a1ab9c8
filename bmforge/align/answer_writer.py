"""Writes answers with the engine: with the trained model itself, or a copy of sharded weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmforge.errors import ConfigError
from bmforge.infer import Completion, Engine, EngineConfig, GenerationConfig, Request
from bmforge.infer.engine.packed_step import can_pack
from bmforge.infer.engine.request import RequestsConfig
from bmforge.parallel import data_parallel_size, mesh_of
from bmforge.records import laid_out
from bmforge.shards import whole_tensor
from bmforge.surgery import evaluating, persistent_tensors

__all__ = ["AnswerWriter"]


class AnswerWriter:
    """Writes the answers of a rollout with the weights that are trained.

    On one process in fp32 the engine runs the trained module itself. A model that is sharded or
    computes in 16 bits is copied: before each rollout, its weights are gathered tensor by tensor
    into a plain model in place.

    Args:
        model: trained model.
        max_num_seqs: maximum number of answers in a batch.
        max_tokens: maximum length of a prompt with its answer.
        options: generation options of every answer, without the seed.
        make_copy: function that returns a plain model of the same structure with weights; None
            refuses models that need one.

    Raises:
        ConfigError: the model cannot be batched, or needs a copy and there is none.
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
        if _needs_copy(model):
            self._copy = _open_copy(model, make_copy)
        if not can_pack(model):
            raise ConfigError(
                f"rollouts need a decoder-only language model with learned or rotary positions; a "
                f"{type(model).__name__} is not one."
            )
        requests = RequestsConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(128, max_num_seqs),
            total_tokens=max_num_seqs * (max_tokens + 32),  # pages have 16 tokens
            max_queue_size=1 << 20,
        )
        self._is_training = model.training
        self._engine = Engine(
            self._copy or model, config=EngineConfig(requests=requests, max_tokens=max_tokens)
        )
        model.train(self._is_training)

    @property
    def weights_version(self) -> int:
        """Version of the weights of the last rollout."""
        return self._engine.weights_version

    def write(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], count: int
    ) -> list[list[Completion]]:
        """Return `count` answers for each prompt.

        An answer depends on the weights, its prompt, the prompt's seed and its number alone.

        Args:
            prompts: token ids of the prompts.
            seeds: random seed of each prompt.
            count: number of answers per prompt.

        Comm: an all-gather of each sharded weight.
        """
        if self._copy is not None:
            self._fill_copy()
        with evaluating(self._copy or self._model):
            version = self._engine.weights_changed()
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

    @torch.no_grad()
    def _fill_copy(self) -> None:
        """Gather the trained weights into the copy, in place."""
        trained = persistent_tensors(self._model)
        for name, target in persistent_tensors(self._copy).items():
            target.copy_(whole_tensor(trained[name]))

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def _needs_copy(model: Any) -> bool:
    record = laid_out(model)
    is_spread = record is not None and record.mesh is not None and record.mesh.size() > 1
    return is_spread or any(type(p.data) is not torch.Tensor for p in model.parameters())


def _open_copy(model: Any, make_copy: Callable[[], Any] | None) -> Any:
    """Return the plain model that the weights are gathered into.

    Raises:
        ConfigError: the layout is not data parallelism or ZeRO.
    """
    mesh = mesh_of(model)
    if make_copy is None or (mesh is not None and data_parallel_size(mesh) != mesh.size()):
        raise ConfigError(
            "rollouts of a sharded model support data parallelism and layout.zero only. Leave "
            "other parallelism out."
        )
    return make_copy()
