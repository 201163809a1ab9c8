"""What every family inherits: build, initialise, load and save, on any layout.

Building, loading and initialising are separate: ``from_config(cfg, device="meta")``, then
`parallel.parallelize`, then `load_weights_` or `init_weights_`, which touch only this process's
part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, ShapeError
from bmforge.models.changes import Change, apply_change_, changed_modules
from bmforge.models.config import ModelConfig
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import FileReads
from bmforge.models.init import NoDrawing, init_weights_, materialize_
from bmforge.models.load import load_weights_
from bmforge.models.match import settle_tie
from bmforge.models.pack import load_quantized
from bmforge.models.resolve import resolve_model
from bmforge.models.rules import LayoutRules, TensorCut, default_cuts
from bmforge.models.save import write_model
from bmforge.models.split import split_modules, split_rules
from bmforge.models.stack import check_ids, expert_names, find_heads, given_inputs
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, expand_rules
from bmforge.nn.packing import QuantSpec
from bmforge.nn.prompt import count_ids, look_up
from bmforge.nn.quantized import PackedStore
from bmforge.provenance import Provenance, read_provenance
from bmforge.records import laid_out
from bmforge.surgery import persistent_tensors

__all__ = ["Model"]


class Model(nn.Module):
    """Base of the families.

    A family sets `config_class`, `weight_rules` (the name map) and, where its checkpoints come with
    and without one, `hf_prefix`.

    Attributes:
        family_traits: what others must know of the family; `traits` adds what the config says.
        hf_prefix: what stands before the body's published names.
        hf_unused: globs of published weights that none of our heads uses (a next-sentence head).
        hf_old_names: (ending of a published name, what older checkpoints have in its place).
        tied_head: the parameter that `tie_word_embeddings` makes one with the embedding.
        shifts_labels: the language-model head predicts the label after each position.
        fixed_width: why the hidden states cannot become narrower; "" where they can.
        arrived: what the stage before carried on, where a pipeline cuts the model.
        provenance: its licence and what it was made of, as far as known.
    """

    config_class: ClassVar[type[ModelConfig]]
    family_traits: ClassVar[Traits]
    hf_prefix: ClassVar[str] = ""
    hf_unused: ClassVar[tuple[str, ...]] = ()
    hf_old_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    tied_head: ClassVar[tuple[str, str]] = ("lm_head.weight", "embed.weight")
    shifts_labels: ClassVar[bool] = True
    fixed_width: ClassVar[str] = ""
    arrived: tuple[Tensor, ...] = ()
    provenance: Provenance = Provenance()

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: Any = config

    @property
    def traits(self) -> Traits:
        """How this model is used: what its family reads and writes, with the head that it has."""
        return replace(self.family_traits.of(self.config), position_limit=self.position_limit)

    @property
    def position_limit(self) -> int | None:
        """The longest input in tokens; None where positions go on."""
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
        """Build a model and draw its weights.

        Args:
            config: the family's config.
            device: where it lives; ``"meta"`` only describes it and draws nothing.
            dtype: of the parameters.
            seed: of the weights.
        """
        if not isinstance(config, cls.config_class):
            raise ConfigError(
                f"{cls.__name__} needs a {cls.config_class.__name__}, not {type(config).__name__}."
            )
        with torch.device("meta"), NoDrawing():
            model = cls(config)
            for change in config.changes:
                apply_change_(model, change)
        model.to(dtype)
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
    ) -> Self:
        """Open a Hugging Face checkpoint: a directory, or a hub id found in the cache or on the
        hub.

        Args:
            name: directory, hub id, or a short name in the config's `hub_ids`.
            dtype: of the parameters, whatever the file's is.
            device: where the model lives.
            head: another head than the one in config.json; a name in the config's `heads`.
            new_head: draw the head's weights where the checkpoint has none.
            num_labels: classes of a new classifier.
            allow_unknown: config fields to accept unread.
            quantize: a scheme (`nn.packing.PRESETS`); weights are packed as they are read, and
                never in memory all at once. "keep" keeps the integers of a GGUF file, of GPTQ or
                of AWQ as they are.

        Raises:
            ConfigError: no such model, or its config is not understood, or it cannot be quantised.
            CheckpointError: weights missing, unexpected, wrongly shaped or damaged; all listed.
        """
        model, files = cls.describe_pretrained(
            name, dtype=dtype, head=head, num_labels=num_labels, allow_unknown=allow_unknown
        )
        if quantize is not None:
            known = model.provenance
            model = load_quantized(model, files, quantize, device=device, new_head=new_head)
            model.provenance = known
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
    ) -> tuple[Self, WeightFiles]:
        """Return a Hugging Face checkpoint's model on meta, and its files, for `load_weights_`.

        Args:
            name, dtype, head, num_labels, allow_unknown: as in `from_pretrained`.
            reads: how the files are read; None takes the usual way.
        """
        directory = resolve_model(name, cls.config_class.hub_ids)
        config = cls.config_class.from_pretrained(directory, allow_unknown)
        changes = {"head": head, "num_labels": num_labels}
        config = config.replace(**{k: v for k, v in changes.items() if v is not None})
        files = WeightFiles(directory, reads)
        config = cls.settle_config(config, files.shapes)
        model = cls.from_config(config, device="meta", dtype=dtype)
        settled = settle_tie(model, files)
        if settled != config:
            model = cls.from_config(settled, device="meta", dtype=dtype)
        model.provenance = read_provenance(directory)
        return model, files

    @classmethod
    def settle_config(cls, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Return a config with what it does not say and the weights do.

        A family that was published in several forms under one kind of config overrides this.

        Args:
            config: as config.json, or a preset, has it.
            shapes: published name -> shape of every stored tensor.
        """
        return config

    def change_(self, change: Change, *, seed: int = 0) -> Self:
        """Change the model in place and let its config remember it.

        Args:
            change: what to do where; see `Change`.
            seed: of new tensors, which are drawn as their part says.

        Raises:
            ConfigError: the change does not fit the model, which is as it was then; or the model
                is laid out already.
        """
        if any(isinstance(tensor, DTensor) for tensor in persistent_tensors(self).values()):
            raise ConfigError(
                f"{type(self).__name__} is laid out over processes: change it before parallelize."
            )
        apply_change_(self, change, seed)
        self.config = self.config.replace(changes=(*self.config.changes, change))
        return self

    def remember_part_(
        self, kind: str, where: Sequence[str], options: Mapping[str, Any], name: str
    ) -> None:
        """Let the config say what has been put into the model, as a `Change` would.

        Args:
            kind, where, options, name: of the change.
        """
        change = Change(kind, tuple(where), dict(options), name)
        self.config = self.config.replace(changes=(*self.config.changes, change))

    def forget_part_(
        self, kind: str, where: Sequence[str], options: Mapping[str, Any], name: str
    ) -> None:
        """Let the config no longer say what has been taken out of the model."""
        gone = Change(kind, tuple(where), dict(options), name)
        left = tuple(change for change in self.config.changes if change != gone)
        self.config = self.config.replace(changes=left)

    def weight_rules(self) -> list[WeightRule]:
        """Return the name map of this family's body, with `{i}` for the layer number."""
        raise TypeError(f"{type(self).__name__} defines no weight_rules")

    @property
    def _pipeline(self) -> Any:
        """What runs the stages, where a layout has made a pipeline of the model."""
        record = laid_out(self)
        return None if record is None else record.pipeline

    def whole(self) -> Model:
        """Return a description of the whole model where this is a part of it in a pipeline."""
        record = laid_out(self)
        return self if record is None or record.whole is None else record.whole

    def _stage_rank(self, name: str) -> int:
        """Return which rank of the pipeline has a parameter; 0 without one."""
        return 0 if self._pipeline is None else self._pipeline.rank_of(name)

    def _stage_and_members(self, rank: int, world: int) -> tuple[int, int]:
        """Return this process's rank of the pipeline, and how many processes have that one."""
        if self._pipeline is None:
            return 0, world
        return self._pipeline.rank, world // self._pipeline.size

    def layout_rules(self) -> LayoutRules:
        """Return where layouts cut this family."""
        return LayoutRules(tensor_parallel=self.tensor_cuts())

    def tensor_cuts(self) -> tuple[TensorCut, ...]:
        """Return how tensor parallelism cuts this family."""
        names = [name for name, _ in self.named_modules()]
        heads = dict(find_heads(self))
        usual = next(iter(heads.values()), (self.config.num_heads, self.config.num_kv_heads))
        others = {name: count for name, count in heads.items() if count != usual}
        return default_cuts(names, usual[0], usual[1], differing=others)

    def init_std(self, name: str) -> float:
        """Return the standard deviation a parameter is drawn with."""
        return self.config.init_std

    def embed_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None = None,
        name: str = "inputs_embeds",
    ) -> Tensor:
        """Return the tokens' embeddings, looked up or given, as they come out of the table.

        What a family adds to them (positions, segments) and multiplies them with comes after.

        Args:
            input_ids: token ids; from the table's rows on those of its prompt (`nn.prompt`).
            inputs_embeds: what the table would have returned for ids that are not there.
            name: what messages call these.

        Shape:
            input_ids: any; inputs_embeds: (B, T, width of the table); returns (..., width)

        Raises:
            ShapeError: both or neither are given, or ids or embeddings that do not fit the table.
        """
        given = given_inputs(input_ids, inputs_embeds, name)
        if inputs_embeds is None:
            check_ids(given, count_ids(self.embed))  # type: ignore[arg-type]
            return look_up(self.embed, given)  # type: ignore[arg-type]
        width = self.embed.embedding_dim
        if given.dim() != 3 or given.shape[-1] != width:
            raise ShapeError(
                f"{name} is {tuple(given.shape)}; it must be (rows, tokens, {width}), as the token "
                "embedding returns it."
            )
        return given

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Return how many predictions a batch asks for: what its summed loss is a sum of.

        Shape:
            batch: `labels` (B, T), (B,) or, for several classes at once, (B, L); or
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

    def tied_copies(self) -> dict[str, str]:
        """Return their names of tensors that checkpoints hold twice: the copy -> the original."""
        return {}

    def all_rules(self) -> list[WeightRule]:
        """Return the rules of body and head, under the names that this head's checkpoints use."""
        head = self.config.heads[self.config.head]
        rules = self.weight_rules()
        if head.prefix is not None:
            rules = [
                replace(rule, theirs=head.prefix + rule.theirs.removeprefix(self.hf_prefix))
                if rule.theirs.startswith(self.hf_prefix)
                else rule
                for rule in rules
            ]
        return rules + [WeightRule(ours, theirs) for ours, theirs in head.names.items()]

    def active_rules(self) -> list[WeightRule]:
        """Return the expanded rules of the tensors this model holds (a tied one comes once)."""
        return self.expand(self.all_rules())

    def expand(self, rules: Sequence[WeightRule]) -> list[WeightRule]:
        """Return rules with numbers put in, for every tensor; changed ones have our names."""
        shapes = {name: tuple(tensor.shape) for name, tensor in persistent_tensors(self).items()}
        own = self._own_names()
        if not any(".mlp.experts." in rule.ours for rule in rules):
            own |= expert_names(self)
        for name, module in split_modules(self):
            own |= {f"{name}.{key}" for key, _ in module.named_parameters()}
        return expand_rules(rules, shapes, own, split_rules(self, rules))

    def _own_names(self) -> set[str]:
        """Return the names of tensors that published checkpoints have no place for."""
        changed = changed_modules(self)
        found = set()
        for name in persistent_tensors(self):
            owner, _, key = name.rpartition(".")
            # The bias of a packed layer is as published; int8 rows were saved with theirs.
            is_kept = key == "bias" and isinstance(changed.get(owner), PackedStore)
            if owner in changed and not is_kept:
                found.add(name)
        return found

    def rules_for(self, names: Collection[str]) -> list[WeightRule]:
        """Return the rules by which a checkpoint that holds these names is read.

        They are the `active_rules` but for a family that was published in several forms.
        """
        return self.active_rules()

    def save_pretrained(
        self, directory: str | Path, *, overwrite: bool = False, max_file_bytes: int = 4 << 30
    ) -> None:
        """Write ``config.json`` and ``model.safetensors`` under Hugging Face names.

        On a layout every process must call this; each file is gathered on one process, tensor by
        tensor, and written there. What was changed in the model (`change_`) lies beside the rest
        under our names, which transformers does not read; one line says so.

        Args:
            directory: made when it does not exist.
            overwrite: replace weights that are already there.
            max_file_bytes: size above which the weights are divided over several files.

        Raises:
            CheckpointError: the directory already holds weights and `overwrite` is off.
        """
        write_model(self, Path(directory), overwrite, max_file_bytes)
