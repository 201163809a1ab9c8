"""Base class of ModelCenter's models: loading, building, and output heads.

Each class wraps a bmforge model without head (`model`) and keeps the head separately. Logits are
computed only when they are read, so a program with its own head does not compute unused logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.compat.bmtrain import store
from bmforge.compat.bmtrain.runtime import is_initialized
from bmforge.compat.bmtrain.wrapper import BMTrainModelWrapper
from bmforge.compat.model_center.model.config import Config
from bmforge.compat.model_center.model.inputs import CallOptions, TextInputs, one_of
from bmforge.compat.model_center.model.module_names import (
    InputEmbedding,
    OldModules,
    module_names,
    parameter_names,
    rename_loaded_,
    rename_saved_,
)
from bmforge.compat.model_center.model.outputs import BaseModelOutput, Later
from bmforge.errors import ConfigError
from bmforge.infer.cache import KVCache
from bmforge.models import Model, ModelConfig
from bmforge.models.formats.hf_format import read_pickle
from bmforge.models.formats.model_center import is_model_center, load_model_center
from bmforge.models.formats.model_center_config import OLD_FAMILIES
from bmforge.models.hub import FAMILIES
from bmforge.models.resolve import resolve_model
from bmforge.models.stack import given_inputs

__all__ = ["BaseModel", "define_model", "init_model"]

# Names of the head modules in bmforge's models.
_HEADS = ("lm_head", "mlm_head")
# File name of the weights in a ModelCenter checkpoint, and prefixes of these classes' parameters.
_WEIGHTS = "pytorch_model.pt"
_OWN_PARTS = ("model.", "head.", "cls_projection.")


Kind = TypeVar("Kind", bound="BaseModel")


def _is_bmtrain_checkpoint(directory: Path) -> bool:
    """Return True if `bmt.save` wrote the weights, with the parameter names of these classes."""
    return all(name.startswith(_OWN_PARTS) for name in read_pickle(directory / _WEIGHTS))


class BaseModel(nn.Module):
    """Base class of ModelCenter's models.

    Args:
        config: config of the model; random initialization uses torch's seed.

    Attributes:
        model: bmforge model that ends in hidden states.
        head: language-model head; None if the checkpoint has none.
        cls_projection: token classifier with `cls_head` classes, if the config requests it; it
            replaces the language-model head.
    """

    _CONFIG_TYPE: ClassVar[type[Config]] = Config

    def __init__(self, config: Config, model: Model | None = None) -> None:
        super().__init__()
        self.__dict__["_modules"] = OldModules(self._modules)
        self.config = config
        self.model = self._init_model(config) if model is None else model
        self.cls_projection = self._take_classifier() if config.cls_head else None
        self.head = self._take_head()
        if self._has_old_names():
            self.register_load_state_dict_pre_hook(rename_loaded_)
            self.register_state_dict_post_hook(rename_saved_)
        if is_initialized():
            self._distribute()

    def _distribute(self) -> None:
        """Shard the parameters, keeping ties, and convert every layer to a block."""
        parts = nn.ModuleDict(dict(self.named_children()))
        BMTrainModelWrapper(parts)

    @property
    def input_embedding(self) -> InputEmbedding:
        """Token embedding, with ModelCenter's interface."""
        return InputEmbedding(self.model.embed)

    @classmethod
    def _init_model(cls, config: Config) -> Model:
        """Create a randomly initialized bmforge model."""
        return init_model(config, config.native())

    def _take_head(self) -> nn.Module | None:
        """Detach the language-model head from the model, and return the head."""
        name = next((name for name in _HEADS if name in self.model._modules), None)
        head = None if name is None else self.model._modules.pop(name)
        self.model._modules.pop("classifier", None)
        self.model.config = self.model.config.replace(head="none")
        return head

    def _take_classifier(self) -> nn.Linear:
        """Detach the token classifier from the model and return it, or create a new one."""
        count, classifier = self.config.cls_head, self.model._modules.pop("classifier", None)
        if isinstance(classifier, nn.Linear) and classifier.out_features == count:
            return classifier
        has_bias, dtype = self.config.proj_bias, self.config.dtype
        return nn.Linear(self._hidden_width(), count, bias=has_bias, dtype=dtype)

    def _hidden_width(self) -> int:
        config = self.model.config  # OPT may have a smaller `embed_size`
        return int(getattr(config, "embed_size", 0) or config.hidden_size)

    @classmethod
    def from_pretrained(cls, name: str | Path, config: Config | None = None, **fields: Any) -> Self:
        """Load a checkpoint in Hugging Face's or ModelCenter's format, or written by `bmt.save`.

        Args:
            name: directory, or id in the Hugging Face cache or on the hub.
            config: config from which `dtype`, `cls_head` and dropout probabilities are read; the
                dimensions of the model come from the checkpoint.
            fields: config fields to replace.

        Raises:
            ConfigError: the model is not found, or its config is not supported.
            CheckpointError: weights are missing, unexpected, wrongly shaped or damaged; the message
                lists all.
        """
        hub_ids = FAMILIES[cls._CONFIG_TYPE.family].config_class.hub_ids
        directory = resolve_model(name, hub_ids)
        if config is None:
            config = cls._CONFIG_TYPE.from_pretrained(directory)
        for field, value in fields.items():
            setattr(config, field, value)
        family = config.kind()
        if is_model_center(directory) and _is_bmtrain_checkpoint(directory):
            saved = cls(config)
            store.load(saved, directory / _WEIGHTS)
            return saved.train()
        if is_model_center(directory):
            model = cls._open_old(family, directory, config)
        else:
            model = cls._open(family, directory, config)
        return cls(config, _with_dropout(model, config)).train()

    @classmethod
    def _open(cls, family: type[Model], directory: Path, config: Config) -> Model:
        """Load a Hugging Face checkpoint with its language-model head."""
        first = next(iter(family.config_class.heads))
        return family.from_pretrained(directory, dtype=config.dtype, head=first)

    @classmethod
    def _open_old(cls, family: type[Model], directory: Path, config: Config) -> Model:
        """Load a checkpoint in ModelCenter's format."""
        return load_model_center(directory, family=family.__name__, dtype=config.dtype)

    @classmethod
    def from_json_file(cls, json_file: str | Path, **fields: Any) -> Self:
        """Build a randomly initialized model from a config file."""
        return cls(cls._CONFIG_TYPE.from_json_file(json_file, **fields))

    def build_output(
        self, hidden: Tensor, make_output: Callable[[Any], Any], options: CallOptions
    ) -> Any:
        """Build the result of a forward call: a `ModelOutput`, a tuple of values, or the logits.

        Args:
            hidden: last hidden states.
            make_output: function that builds the output from logits, a `Later`, or None.
            options: options of the call.
        """
        if options.return_logits:
            return self.make_logits(hidden)
        logits: Tensor | Later | None = None
        if options.output_logits:
            logits = self.make_logits(hidden)
        elif options.output_logits is None:
            is_available = self.cls_projection is not None or self.head is not None
            logits = Later(lambda: self.make_logits(hidden), is_available)
        out = make_output(logits)
        return out if options.return_dict else tuple(out)

    def build_text_output(self, outputs: Any, text: TextInputs) -> Any:
        """Build the result of a model with one text input; see `build_output`."""
        last, layers = outputs.last_hidden_state, outputs.hidden_states
        return self.build_output(
            last, lambda logits: BaseModelOutput(last, text.cache, logits, layers), text.options
        )

    def make_logits(self, hidden: Tensor) -> Tensor:
        """Return the language-model logits, or the classifier's if the config has `cls_head`.

        Shape:
            hidden: (B, T, D); returns (B, T, V) or (B, T, cls_head)

        Raises:
            ConfigError: the checkpoint has no language-model head.
        """
        if self.cls_projection is not None:
            return self.cls_projection(hidden)
        if self.head is None:
            raise ConfigError(
                f"this {type(self).__name__} has no head for tokens, because its checkpoint has "
                "none. Load a checkpoint that has one, or set cls_head in its config."
            )
        scale = getattr(getattr(self.model, "spec", None), "head_scale", 1.0)
        logits: Tensor = self.head(hidden if scale == 1.0 else hidden * scale)
        decoder = getattr(self.head, "decoder", None)
        return logits if decoder is None else decoder(logits)

    def save_pretrained(
        self, directory: str | Path, *, head: str | None = None, overwrite: bool = False
    ) -> None:
        """Save the model in Hugging Face's format; see `to_zoo` and `Model.save_pretrained`."""
        self.to_zoo(head).save_pretrained(directory, overwrite=overwrite)

    def published_modules(self) -> dict[str, list[str]]:
        """Return a dict from ModelCenter's module names to this model's, for adapter targets."""
        return module_names(self.model, self.config.family, "model.")

    def _has_old_names(self) -> bool:
        """Return True if ModelCenter has published checkpoints of this family."""
        return self.config.family in OLD_FAMILIES

    def published_parameters(self) -> dict[str, str]:
        """Return a dict from this model's parameter names to ModelCenter's."""
        return parameter_names(self) if self._has_old_names() else {}

    def to_zoo(self, head: str | None = None) -> Model:
        """Convert to a bmforge model, which on a single process shares this model's weights.

        Args:
            head: head name of the family (default: the language-model head if there is one).
                With "none", an encoder keeps its pooler.
        """
        config = self.model.config
        first = next(iter(config.heads)) if self.head is not None else "none"
        config = config.replace(head=head or first)
        family = self.config.kind()
        full_model = family.from_config(config, device="meta", dtype=self.config.dtype)
        tensors = _values(self.model)
        name = next((name for name in _HEADS if hasattr(full_model, name)), None)
        if self.head is not None and name is not None:
            tensors |= {f"{name}.{key}": value for key, value in _values(self.head).items()}
        names = dict(full_model.named_parameters(remove_duplicate=False))
        full_model.load_state_dict({k: v for k, v in tensors.items() if k in names}, assign=True)
        head_name, embed = full_model.tied_head
        if config.tie_word_embeddings and head_name in names and embed in names:
            parent, _, key = head_name.rpartition(".")
            setattr(full_model.get_submodule(parent), key, full_model.get_parameter(embed))
        return full_model.train(self.training)

    def _take_text(self, ids: Tensor | None, options: dict[str, Any]) -> TextInputs:
        """Return the text inputs of a call; embeddings have precedence over ids.

        Raises:
            ShapeError: neither ids nor embeddings are given.
            TypeError: an option is unknown.
        """
        chosen = CallOptions.read(options)
        ids, embeds = one_of(ids, chosen.inputs_embeds)
        inputs = given_inputs(ids, embeds)
        width = chosen.past + inputs.shape[1]
        return TextInputs(ids, embeds, inputs, width, self._open_cache(chosen, width), chosen)

    def _run_model(self, text: TextInputs, mask: Tensor | None, **inputs: Any) -> Any:
        """Run the bmforge model."""
        return self.model(
            text.ids,
            mask,
            cache=text.cache,
            output_hidden_states=bool(text.options.output_hidden_states),
            inputs_embeds=text.embeds,
            **inputs,
        )

    def _open_cache(self, options: CallOptions, length: int) -> KVCache | None:
        """Return the KV cache to extend; a new one has space for the longest context."""
        if options.past_key_values is not None or not options.use_cache:
            return options.past_key_values
        config = self.model.config
        return KVCache(config.num_layers, max(config.max_seq_len, length))


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to unsharded parameter of a module."""
    state = module.state_dict(keep_vars=True)
    return module.state_dict() if any(isinstance(v, DTensor) for v in state.values()) else state


def define_model(name: str, base: type[Kind], config: type[Config]) -> type[Kind]:
    """Create the class of a family whose forward is that of `base`."""
    attributes = {"__doc__": f"{name} model.", "__module__": base.__module__}
    return type(name, (base,), {**attributes, "_CONFIG_TYPE": config})


def init_model(config: Config, native: ModelConfig) -> Model:
    """Create a bmforge model, initialized with torch's seed."""
    seed = torch.initial_seed() % (1 << 63)
    return config.kind().from_config(native, dtype=config.dtype, seed=seed)


def _with_dropout(model: Model, config: Config) -> Model:
    """Set the dropout probabilities of a model to those of a config."""
    expected, own = config.native(), model.config
    names = [n for n in ("dropout", "attn_dropout", "embed_dropout") if hasattr(own, n)]
    changes = {n: getattr(expected, n) for n in names if getattr(expected, n) != getattr(own, n)}
    if not changes:
        return model
    fresh = type(model).from_config(own.replace(**changes), device="meta")
    for name, part in model.named_children():
        if name not in fresh._modules:  # a head that was added later
            fresh.add_module(name, part)
    fresh.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return fresh
