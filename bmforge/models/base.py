"""Base class of all model families: build, initialize, load and save, on any layout.

Building, loading and initializing are separate: ``from_config(cfg, device="meta")``, then
`parallel.parallelize`, then `load_weights_` or `init_weights_`, which process only this rank's
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, ShapeError
from bmforge.models.changes import Change, apply_change_
from bmforge.models.config import ModelConfig
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import FileReads
from bmforge.models.hooks import ModelHooks
from bmforge.models.init import SkipInit, init_weights_, materialize_
from bmforge.models.load import load_weights_
from bmforge.models.pack import load_quantized
from bmforge.models.resolve import resolve_model
from bmforge.models.rules import LayoutRules, TensorParallelRule, default_tensor_parallel_rules
from bmforge.models.save import write_model
from bmforge.models.stack import check_ids, find_heads, given_inputs
from bmforge.models.tensor_matching import resolve_tie
from bmforge.models.traits import Traits
from bmforge.models.vocabulary import resize_vocabulary_
from bmforge.models.weight_names import WeightNames
from bmforge.nn.packing import QuantSpec
from bmforge.nn.prompt import count_ids, look_up
from bmforge.provenance import Provenance, read_provenance
from bmforge.records import find_parallel_record
from bmforge.shards import is_distributed
from bmforge.surgery import persistent_tensors

__all__ = ["Model"]


class Model(WeightNames, ModelHooks, nn.Module):
    """Base class of all model families.

    A family sets `config_class`, `weight_rules` (the map of weight names) and, if its checkpoints
    exist with and without a prefix, `hf_prefix`.

    Attributes:
        family_traits: properties of the family, such as its attention pattern; `traits` adds
            properties that depend on the config, such as whether the head generates text.
        hf_prefix: prefix of the base model's parameter names in Hugging Face checkpoints.
        hf_old_names: pairs (suffix of a Hugging Face parameter name, its suffix in older
            checkpoints).
        tied_head: names of the two parameters that `tie_word_embeddings` ties: the head's
            weight and the embedding.
        shifts_labels: True if position t predicts label t + 1, so that the model shifts labels.
        fixed_width: reason why the hidden size cannot be pruned; "" if it can.
        stage_inputs: activations from the previous pipeline stage; empty on the first stage.
        provenance: license and training data of the model, if known.
    """

    config_class: ClassVar[type[ModelConfig]]
    family_traits: ClassVar[Traits]
    hf_prefix: ClassVar[str] = ""
    hf_old_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    tied_head: ClassVar[tuple[str, str]] = ("lm_head.weight", "embed.weight")
    shifts_labels: ClassVar[bool] = True
    fixed_width: ClassVar[str] = ""
    stage_inputs: tuple[Tensor, ...] = ()
    provenance: Provenance = Provenance()

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: Any = config

    @property
    def traits(self) -> Traits:
        """Properties of the family, plus those that depend on this model's config and head."""
        return replace(self.family_traits.of(self.config), position_limit=self.position_limit)

    @property
    def position_limit(self) -> int | None:
        """Maximum input length in tokens; None if there is no limit."""
        return self.family_traits.of(self.config).position_limit

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Self:
        """Build a model and initialize its weights.

        Args:
            config: config of the family.
            device: device of the weights; ``"meta"`` builds the model without weights.
            dtype: dtype of the parameters.
            seed: random seed of the initialization.
        """
        if not isinstance(config, cls.config_class):
            raise ConfigError(
                f"{cls.__name__} needs a config of the type {cls.config_class.__name__}, not "
                f"{type(config).__name__}. Use the model class of the config."
            )
        model = cls.describe(config, dtype)
        with torch.device("meta"), SkipInit():
            for change in config.changes:
                apply_change_(model, change)
        if torch.device(device).type != "meta":
            materialize_(model, device)
            init_weights_(model, seed)
        return model

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        head: str | None = None,
        new_head: bool = False,
        num_labels: int | None = None,
        allow_unknown: tuple[str, ...] = (),
        quantize: str | QuantSpec | None = None,
        tie_word_embeddings: bool | None = None,
    ) -> Self:
        """Load a Hugging Face checkpoint from a directory, the cache or the hub.

        Args:
            name: directory, hub id, or a short name in the config's `hub_ids`.
            dtype: dtype of the parameters, independent of the dtype in the file.
            device: device of the model.
            head: name in the config's `heads` (default: the head in config.json).
            new_head: initialize the head's weights if the checkpoint has none.
            num_labels: number of classes of a new classifier.
            allow_unknown: names of unknown config fields to ignore.
            quantize: quantization scheme (`nn.packing.PRESETS`); weights are quantized while
                loading, so that the full-precision model is never in memory. "keep" loads the
                integer weights of a GGUF, GPTQ or AWQ checkpoint unchanged.
            tie_word_embeddings: False to load a tied model with a separate head, which starts as a
                copy of the embedding; None to tie or not as the checkpoint does.

        Raises:
            ConfigError: the model is unknown, or its config or the quantization is not supported.
            CheckpointError: weights are missing, unexpected, damaged or have the wrong shape;
                all are listed.
        """
        model, files = cls.describe_pretrained(
            name,
            dtype=dtype,
            head=head,
            num_labels=num_labels,
            allow_unknown=allow_unknown,
            tie_word_embeddings=tie_word_embeddings,
        )
        if quantize is not None:
            provenance = model.provenance
            model = load_quantized(model, files, quantize, device=device, new_head=new_head)
            model.provenance = provenance
            return model.eval()
        load_weights_(model, files, device=device, new_head=new_head)
        return model.eval()

    @classmethod
    def describe_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        head: str | None = None,
        num_labels: int | None = None,
        allow_unknown: tuple[str, ...] = (),
        reads: FileReads | None = None,
        tie_word_embeddings: bool | None = None,
    ) -> tuple[Self, WeightFiles]:
        """Build a checkpoint's model on the meta device; return the model and its weight files.

        `load_weights_` loads the files into the model.

        Args:
            name, dtype, head, num_labels, allow_unknown, tie_word_embeddings: see
                `from_pretrained`.
            reads: reader of the files, or None for the default reader.
        """
        directory = resolve_model(name, cls.config_class.hub_ids)
        config = cls.config_class.from_pretrained(directory, allow_unknown)
        changes = {"head": head, "num_labels": num_labels}
        config = config.replace(**{k: v for k, v in changes.items() if v is not None})
        files = WeightFiles(directory, reads)
        config = cls.complete_from_shapes(config, files.shapes)
        model = cls.from_config(config, device="meta", dtype=dtype)
        settled = resolve_tie(model, files, tie_word_embeddings)
        if settled != config:
            model = cls.from_config(settled, device="meta", dtype=dtype)
        model.provenance = read_provenance(directory)
        return model, files

    @classmethod
    def complete_from_shapes(cls, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Complete a config with values that can only be inferred from the shapes of the weights.

        Families override this if config.json does not tell their published formats apart.

        Args:
            config: config from config.json or a preset.
            shapes: mapping from the name of each tensor in the checkpoint to its shape.
        """
        return config

    def change_(self, change: Change, *, seed: int = 0) -> Self:
        """Apply a `Change` (adapter, quantization, ...) in place and record it in the config.

        Args:
            change: kind, modules and options of the change.
            seed: random seed of the initialization of new tensors.

        Raises:
            ConfigError: the change does not fit the model, or the model is already
                parallelized. The model is then unchanged.
        """
        if any(is_distributed(tensor) for tensor in persistent_tensors(self).values()):
            raise ConfigError(
                f"{type(self).__name__} is already parallelized and cannot be changed. Apply the "
                "change before parallelize()."
            )
        apply_change_(self, change, seed)
        self.config = self.config.replace(changes=(*self.config.changes, change))
        return self

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the vocabulary in place, before `parallelize` and before the optimizer is created.

        The token embedding, a language model's output layer and its bias are resized. Rows that
        exist in both sizes keep their values, and tied weights stay tied.

        Args:
            new_num_tokens: number of tokens (default: the current number).
            pad_to_multiple_of: round the number up to a multiple of this.
            mean_resizing: initialize new rows to the mean of the old ones; False initializes
                them at random, with seed 0.

        Returns:
            the token embedding.

        Raises:
            ConfigError: the model is parallelized, streamed or quantized, has an adapter on a
                resized layer, or has no vocabulary. The model is then unchanged.
        """
        resize_vocabulary_(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
        return self.embed  # type: ignore[return-value]

    def record_part_(
        self,
        kind: str,
        where: Sequence[str],
        options: Mapping[str, Any],
        name: str,
        weight: float = 1.0,
    ) -> None:
        """Record in the model's config that adapters were added, as `change_` does.

        Args:
            kind, where, options, name, weight: fields of the `Change`.
        """
        change = Change(kind, tuple(where), dict(options), name, weight)
        self.config = self.config.replace(changes=(*self.config.changes, change))

    def erase_part_(
        self, kind: str, where: Sequence[str], options: Mapping[str, Any], name: str
    ) -> None:
        """Remove the config's record of adapters that were removed from the model."""
        removed = Change(kind, tuple(where), dict(options), name)
        remaining = tuple(c for c in self.config.changes if replace(c, weight=1.0) != removed)
        self.config = self.config.replace(changes=remaining)

    @property
    def _pipeline(self) -> Any:
        """Runner of the pipeline stages; None without a pipeline."""
        record = find_parallel_record(self)
        return None if record is None else record.pipeline

    def whole(self) -> Model:
        """Return the full model: a copy on the meta device for a pipeline stage, else `self`."""
        record = find_parallel_record(self)
        return self if record is None or record.whole is None else record.whole

    def _stage_rank(self, name: str) -> int:
        """Return the first pipeline rank that has the named parameter; 0 without a pipeline."""
        return 0 if self._pipeline is None else self._pipeline.rank_of(name)

    def _stage_and_members(self, rank: int, world: int) -> tuple[int, int]:
        """Return this process's pipeline rank, and the number of processes per pipeline rank."""
        if self._pipeline is None:
            return 0, world
        return self._pipeline.rank, world // self._pipeline.size

    def layout_rules(self) -> LayoutRules:
        """Return the sharding plan of this family."""
        return LayoutRules(tensor_parallel=self.tensor_parallel_rules())

    def tensor_parallel_rules(self) -> tuple[TensorParallelRule, ...]:
        """Return the tensor-parallel plan of this family."""
        names = [name for name, _ in self.named_modules()]
        heads = dict(find_heads(self))
        usual = next(iter(heads.values()), (self.config.num_heads, self.config.num_kv_heads))
        others = {name: count for name, count in heads.items() if count != usual}
        return default_tensor_parallel_rules(names, usual[0], usual[1], differing=others)

    def embed_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None = None,
        name: str = "inputs_embeds",
    ) -> Tensor:
        """Look up the token embeddings, or return `inputs_embeds`, without scaling them.

        The family later scales them, and adds position and segment embeddings.

        Args:
            input_ids: token ids; ids of at least the vocabulary size select rows of a soft prompt.
            inputs_embeds: embeddings in place of `input_ids`.
            name: name of the embeddings' argument for error messages.

        Shape:
            input_ids: (...); inputs_embeds: (B, T, width of the table); returns (..., width)

        Raises:
            ShapeError: both or neither are passed, or they do not fit the embedding table.
        """
        inputs = given_inputs(input_ids, inputs_embeds, name)
        if inputs_embeds is None:
            check_ids(inputs, count_ids(self.embed))  # type: ignore[arg-type]
            return look_up(self.embed, inputs)  # type: ignore[arg-type]
        width = self.embed.embedding_dim
        if inputs.dim() != 3 or inputs.shape[-1] != width:
            raise ShapeError(
                f"{name} has the shape {tuple(inputs.shape)} (expected: (batch, tokens, {width}), "
                "the shape of the token embeddings)."
            )
        return inputs

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Count the predictions of a batch that contribute to its summed loss.

        Shape:
            batch: `labels` (B, T), (B,) or, for multi-label classification, (B, L); or
                `start_positions` (B,)
        """
        labels = batch.get("labels")
        if labels is None:
            return batch["start_positions"].shape[0]
        if labels.is_floating_point():
            return labels.shape[0]
        if self.config.head == "language_model" and self.shifts_labels:
            labels = labels[:, 1:]
        return int((labels != IGNORE_INDEX).sum())

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        max_file_bytes: int = 4 << 30,
        dtype: torch.dtype | Callable[[str], torch.dtype] | None = None,
    ) -> None:
        """Write ``config.json`` and ``model.safetensors`` with Hugging Face names.

        With a parallel layout, all ranks must call this. Changes to the model (such as adapters)
        are written under names that transformers ignores.

        Args:
            directory: directory to write, created if missing.
            overwrite: replace existing weights.
            max_file_bytes: size above which the weights are split over several files.
            dtype: dtype of the written float tensors, or a function from tensor name to dtype
                (default: the model's).

        Raises:
            CheckpointError: the directory already contains weights and `overwrite` is off.
        """
        write_model(self, Path(directory), overwrite, max_file_bytes, dtype=dtype)
