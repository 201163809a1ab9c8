"""`TransformersModel`: runs any transformers architecture as a bmforge `Model`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, ShapeError
from bmforge.models.base import Model
from bmforge.models.changes import changed_modules
from bmforge.models.output import ModelOutput
from bmforge.models.rules import LayoutRules
from bmforge.models.transformers.build import build_module
from bmforge.models.transformers.calls import (
    ForeignCache,
    cache_argument,
    call_arguments,
    count_positions,
    document_mask,
)
from bmforge.models.transformers.config import TransformersConfig, TransformersTraits
from bmforge.models.transformers.loss import LanguageLoss, head_loss, is_seq2seq
from bmforge.models.transformers.names import (
    StoredNames,
    find_stored_names,
    matches_any,
    rename_stored,
)
from bmforge.models.transformers.probe import Behavior, general_names, probe_architecture
from bmforge.models.transformers.stages import run_stage, stage_ends, stage_modules
from bmforge.models.transformers.structure import (
    Structure,
    accepted_arguments,
    find_structure,
    has_whole_groups,
    linear_names,
)
from bmforge.models.transformers.tensor_plan import find_tensor_plan
from bmforge.models.weights import WeightRule
from bmforge.nn.uncalled_modules import find_uncalled
from bmforge.surgery import persistent_tensors

__all__ = ["TransformersModel"]

_SHIFTED = ("language_model", "image_text_to_text")
_WRITERS = (*_SHIFTED, "sequence_to_sequence", "speech_to_text")


class TransformersModel(Model):
    """Model that transformers implements.

    Module and parameter names are those of transformers. This module and the transformers model
    share their dictionaries of children, parameters and buffers, so a layer that is replaced in one
    of them is also replaced in the other.

    Args:
        config: `TransformersConfig` that was read from a directory.
        dtype: dtype of the parameters; tensors that transformers keeps in fp32 remain fp32.
    """

    config_class = TransformersConfig
    family_traits = TransformersTraits("causal", "next token", "rotary")
    traces_memory = False
    keeps_foreign_cache = True

    def __init__(self, config: TransformersConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config)
        built = build_module(config.build_config(), config.head, dtype)
        self.__dict__["foreign"] = built.module
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[shared] = built.module.__dict__[shared]
        self._constructed = built.values
        self.structure: Structure = find_structure(built.module)
        self.stored_names: StoredNames = find_stored_names(built.module)
        self._general = general_names(built.module)
        self._linear = linear_names(built.module, self.structure.stacks)
        self._ties = dict(getattr(built.module, "all_tied_weights_keys", None) or {})

    @cached_property
    def behavior(self) -> Behavior:
        """Behavior of this architecture, as tested on a small copy; see `probe.py`."""
        return probe_architecture(self.config.build_config(), self.config.head)

    @classmethod
    def separates_documents(cls, config: Any) -> bool:
        """Return True if texts packed into one sequence do not influence each other."""
        return bool(probe_architecture(config.build_config(), config.head).packing)

    @classmethod
    def describe(cls, config: Any, dtype: torch.dtype) -> TransformersModel:
        """Build the model of a config on the meta device, without adapters and other changes."""
        model = cls(config, dtype)
        if config.changes:
            # Changes ask for the behavior while they build modules on the meta device without
            # initializing them, where no small copy could be tested.
            _ = model.behavior
        return model

    def train(self, mode: bool = True) -> TransformersModel:
        """Set training or eval mode in this module and in the transformers model."""
        super().train(mode)
        self.foreign.training = mode
        return self

    @property
    def takes_images(self) -> bool:  # type: ignore[override]
        """True if prompts of the model may contain images."""
        writes = self.config.head in _SHIFTED and hasattr(
            self.foreign, "prepare_inputs_for_generation"
        )
        return writes and "pixel_values" in self._arguments

    @property
    def embed(self) -> Any:
        """Token embedding; None for models without token inputs and for later pipeline stages."""
        if not self.structure.embed:
            return None
        owner, _, leaf = self.structure.embed.rpartition(".")
        return self.get_submodule(owner)._modules[leaf]

    @property
    def shifts_labels(self) -> bool:  # type: ignore[override]
        """True if position t predicts label t + 1, so that the model shifts labels.

        The auto class does not suffice to decide this: transformers lists Qwen2-Audio, a decoder
        with speech input, with the encoder-decoders, and Pix2Struct, an encoder-decoder with image
        input, with the decoders.
        """
        head = self.config.head
        return head == "language_model" or (head in _WRITERS and not is_seq2seq(self.foreign))

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of predictions in a batch; see `Model.count_items`."""
        labels = batch.get("labels")
        if labels is not None and self.shifts_labels:
            return int((labels[:, 1:] != IGNORE_INDEX).sum())
        return super().count_items(batch)

    def row_positions(self, ids: Tensor, mask: Tensor | None) -> None:
        """Return None: transformers computes the positions."""
        return

    # --- names and values of the weights

    @property
    def tied_head(self) -> tuple[str, str]:  # type: ignore[override]
        """Names of the weights of the output layer and the embedding."""
        head, embed = self.structure.head, self.structure.embed
        return f"{head or 'lm_head'}.weight", f"{embed or 'embed'}.weight"

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of each tied weight to the name of the weight it shares."""
        return dict(self._ties)

    def all_rules(self) -> list[WeightRule]:
        """Map parameter names of the unmodified model, including tied weights, to stored names."""
        stored = {rule.parameter for rule in self.stored_names.rules}
        ties = [WeightRule(copy, copy) for copy in self._ties if copy not in stored]
        return [*self.stored_names.rules, *ties]

    def active_rules(self) -> list[WeightRule]:
        """Map the names of this model's tensors to the names in its checkpoints."""
        changed = changed_modules(self)
        own = {
            name
            for name in persistent_tensors(self)
            if name.rpartition(".")[0] in changed and name.rpartition(".")[2] != "bias"
        }
        return self.stored_names.of(persistent_tensors(self), own)

    def rules_for(self, names: Collection[str]) -> list[WeightRule]:
        """Return the `WeightRule`s for a checkpoint with these tensor names.

        Old tensor names, which transformers renames while loading, are supported.
        """
        rules = self.active_rules()
        if self.stored_names.opaque:
            kind, opaque = type(self.foreign).__name__, self.stored_names.opaque
            # transformers always saves these names, so saving the checkpoint again does not help.
            raise ConfigError(
                f"{kind} stores {len(opaque)} tensors in a form that bmforge cannot read in "
                f"slices, such as {opaque[0]}. Use transformers for this model."
            )
        missing = {rule.source for rule in rules} - set(names)
        if not missing:
            return rules
        spare = rename_stored(self.foreign, set(names) - {rule.source for rule in rules})
        by_meaning = {meant: name for name, meant in spare.items()}
        meant_by = rename_stored(self.foreign, missing)
        return [
            replace(rule, source=by_meaning[meant_by[rule.source]])
            if rule.source in missing and meant_by[rule.source] in by_meaning
            else rule
            for rule in rules
        ]

    def is_unused(self, name: str) -> bool:
        """Return True for a stored tensor that transformers ignores as well."""
        foreign = self.foreign
        return matches_any(name, foreign._keys_to_ignore_on_load_unexpected) or (
            matches_any(name, foreign._keys_to_ignore_on_load_missing)
        )

    def is_of_head(self, name: str) -> bool:
        """Return True for a tensor outside of the base model (body)."""
        body = self.structure.body
        return bool(body) and not name.startswith(f"{body}.")

    def is_computed(self, name: str) -> bool:
        """Return True for a tensor that transformers computes instead of saving."""
        return name in (self.foreign._keys_to_ignore_on_save or ())

    def initial_value(self, name: str) -> Tensor | None:
        """Return the value that the constructor computed for a tensor; None for random weights."""
        return self._constructed.get(name)

    # --- layouts

    def layout_rules(self) -> LayoutRules:
        """Return the sharding plan; its units for ZeRO and recomputation are the blocks.

        The tensor-parallel plan is derived from transformers' plan. Pipeline stages are ranges of
        the text decoder's blocks; the first stage also has the embedding, the last one the modules
        after the blocks.
        """
        blocks = tuple(f"{stack}.*" for stack in self.structure.stacks)
        tensor_rules, refusal = find_tensor_plan(self)
        split_points = self.behavior.split_points
        called = self.called_linear()
        first, last = stage_ends(self.structure, split_points.after)
        return LayoutRules(
            zero_units=blocks,
            recompute_units=blocks,
            tensor_parallel=() if refusal else tensor_rules,
            tensor_refusal=refusal,
            stacks=() if split_points.refusal else self.structure.stacks[:1],
            pipeline_first=first,
            pipeline_last=last,
            pipeline_refusal=split_points.refusal,
            quantize_targets=tuple(n for n in called if has_whole_groups(self.get_submodule(n))),
        )

    def called_linear(self) -> list[str]:
        """Return the blocks' linear layers whose `weight` is used only by calling the layer."""
        uncalled = {*find_uncalled(self, self._linear), *self.read_outside(self._linear)}
        return [name for name in self._linear if name not in uncalled]

    def read_outside(self, names: Collection[str]) -> list[str]:
        """Return the layers in `names` whose `weight` another module accesses directly."""
        return [name for name in names if self._general.get(name, "") in self.behavior.read]

    def untrained(self, names: Collection[str]) -> list[str]:
        """Return the layers in `names` that get no gradient from the loss."""
        return [name for name in names if self._general.get(name, "") in self.behavior.untrained]

    def uncalled(self, names: Collection[str]) -> list[str]:
        """Return the modules in `names` whose forward is never called."""
        idle = self.behavior.idle
        return [name for name in names if self._general.get(name, "") in idle]

    # --- forward

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        cache: ForeignCache | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Run the model; with labels, return the loss instead of logits.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: as in transformers.
            document_ids: index of each token's document in packed sequences.
            labels: for a language model, target ids, which the model shifts; otherwise as in
                transformers.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            cache: KV cache of earlier tokens.
            output_hidden_states: also return the hidden states of every layer.
            logits_to_keep: number of trailing positions whose logits are returned; None for all.
            inputs: further arguments of the transformers model, such as `pixel_values`.

        Raises:
            ConfigError: the sequences are packed, but the architecture cannot separate documents.
        """
        self._check_ids(input_ids)
        position_ids, attention_mask = self._separate(document_ids, position_ids, attention_mask)
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "output_hidden_states": output_hidden_states or None,
            **inputs,
        }
        if logits_to_keep and labels is None and "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = logits_to_keep

        def run() -> ModelOutput:
            if labels is not None or "start_positions" in inputs:
                return self._compute_loss(arguments, labels, num_items_in_batch)
            return self._predict(arguments, cache)

        return run() if self._pipeline is None else self._run_stage(run, cache)

    def _run_stage(self, run: Callable[[], ModelOutput], cache: ForeignCache | None) -> ModelOutput:
        """Run the blocks of one pipeline stage; see `stages.py`."""
        if cache is not None:
            raise ConfigError(
                "the transformers backend does not support a KV cache on pipeline stages. Leave "
                "cache out."
            )
        modules = stage_modules(
            self.foreign,
            self.whole(),
            self.structure,
            self.behavior.split_points,
            self.get_submodule(self.structure.stacks[0]).span,  # type: ignore[arg-type]
            self.stage_inputs,
        )
        out = run_stage(modules, run)
        return ModelOutput(stage_outputs=(out,)) if isinstance(out, Tensor) else out

    @cached_property
    def _arguments(self) -> frozenset[str]:
        return accepted_arguments(self.foreign)[0]

    def _check_ids(self, ids: Tensor | None) -> None:
        table = self.embed
        if ids is None or ids.is_meta or not isinstance(table, nn.Embedding) or not ids.numel():
            return
        if not ids.is_cpu:  # would wait for the device
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= table.num_embeddings:
            raise ShapeError(
                f"input_ids has ids from {low} to {high} (allowed: 0 to "
                f"{table.num_embeddings - 1}). Use the tokenizer of the model."
            )

    def _separate(
        self, documents: Tensor | None, positions: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the positions and the mask that separate the documents of packed sequences."""
        if documents is None or bool((documents == documents[:, :1]).all()):
            return positions, mask
        kind = self.behavior.packing
        if not kind:
            why = self.behavior.reason or "its layers mix the documents of a packed sequence"
            raise ConfigError(
                f"model_type={self.config.model_type!r} cannot separate the documents of a packed "
                f"sequence ({why}). Set data.reset_at_documents=false, or use one document per "
                "sequence."
            )
        positions = count_positions(documents) if positions is None else positions
        if kind == "positions":
            return positions, None
        dtype = next(p.dtype for p in self.parameters() if p.is_floating_point())
        return positions, document_mask(documents, dtype)

    def _predict(self, arguments: dict[str, Any], cache: ForeignCache | None) -> ModelOutput:
        name = cache_argument(self.foreign) if cache is not None else ""
        if cache is not None and name:
            arguments[name] = cache.past
        out = self.foreign(**call_arguments(self.foreign, arguments, cached=bool(name)))
        if cache is not None:
            cache.past = getattr(out, name, None)
            inputs = ("decoder_input_ids", "input_ids", "inputs_embeds")
            tokens = next(arguments[n] for n in inputs if arguments.get(n) is not None)
            cache.length += tokens.shape[1]
        return ModelOutput(
            logits=getattr(out, "logits", None),
            last_hidden_state=getattr(out, "last_hidden_state", None),
            hidden_states=getattr(out, "hidden_states", None),
            pooler_output=getattr(out, "pooler_output", None),
            start_logits=getattr(out, "start_logits", None),
            end_logits=getattr(out, "end_logits", None),
            encoder_last_hidden_state=getattr(out, "encoder_last_hidden_state", None),
        )

    def _compute_loss(
        self, arguments: dict[str, Any], labels: Tensor | None, num_items: float | Tensor | None
    ) -> ModelOutput:
        if self.shifts_labels and labels is not None:
            loss = LanguageLoss(self.foreign, self.structure, self.behavior)
            return ModelOutput(loss(arguments, labels, num_items))
        return ModelOutput(head_loss(self.foreign, self.config, arguments, labels, num_items))
