"""Base class of OpenDelta's delta models, which attach a bmforge adapter to a backbone.

The backbone is modified in place. As in OpenDelta, it stays trainable until `freeze_module`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bmforge.compat.bmtrain.module import make_distributed_
from bmforge.compat.opendelta.backbone import (
    drop_hooks_,
    existing_targets,
    find_trained,
    is_delta,
    keep_trained,
    old_tensors,
    read_card,
    rename_loaded_,
    rename_saved_,
    take_parts_,
)
from bmforge.compat.opendelta.delta_configs import BaseDeltaConfig
from bmforge.compat.opendelta.inspect import Visualization, ask_targets
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.parallel import run_on_first
from bmforge.tune.delta import list_deltas, load_delta
from bmforge.tune.delta.address import excludes_of, known_names, matches_target
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.opendelta_format import OLD_WEIGHTS_NAME, old_type_of, opendelta_type

__all__ = ["DeltaBase"]

# OpenDelta modifies neither language-model heads nor the norm after the embedding.
_HEADS = ("lm_head", "mlm_head", "cls.predictions")
_EMBED_NORMS = ("embed_norm", "embeddings.LayerNorm")


class DeltaBase(nn.Module):
    """A delta model, whose constructor modifies the backbone.

    Args:
        backbone_model: any model; it is modified in place.
        modified_modules: target modules (default: the targets of the type). Targets that match
            no module are ignored with a warning, if at least one target matches.
        exclude_modules: name prefixes or targets of modules to skip (default: language-model heads,
            if `modified_modules` is None).
        unfrozen_modules: parameters that `freeze_module` leaves trainable; "deltas" means the
            parameters of all delta models.
        common_structure: accepted and ignored; common module names are always supported.
        interactive_modify: True, or a port number in OpenDelta, to print the module tree and ask
            for the targets on the terminal.
        backend: "hf" or "bmt"; accepted and ignored; the backbone determines it.
        options: options of the delta type; see its config.

    Attributes:
        delta: the bmforge adapter.
        config: a `BaseDeltaConfig`.
    """

    delta_type: ClassVar[str] = ""
    config_class: ClassVar[type[BaseDeltaConfig]] = BaseDeltaConfig

    def __init__(
        self,
        backbone_model: nn.Module,
        modified_modules: Sequence[str] | None = None,
        exclude_modules: Sequence[str] | None = None,
        unfrozen_modules: Sequence[str] | None = None,
        interactive_modify: bool | int = False,
        common_structure: bool | None = None,
        backend: str = "hf",
        **options: Any,
    ) -> None:
        if interactive_modify:
            modified_modules = ask_targets(backbone_model)
        config = self.config_class(
            exclude_modules=exclude_modules,
            unfrozen_modules=unfrozen_modules,
            common_structure=common_structure,
            backend=backend,
            **({} if modified_modules is None else {"modified_modules": modified_modules}),
            **options,
        )
        trainable_before = {name: p.requires_grad for name, p in backbone_model.named_parameters()}
        take_parts_(backbone_model)
        inner = self._backbone_of(backbone_model)
        kind, delta_options = opendelta_type(config.to_dict(), inner)
        delta_options |= self._more(config)
        delta_options["exclude"] = tuple(config.exclude_modules or ())
        if config.modified_modules is None:
            delta_options["exclude"] = (*(delta_options["exclude"] or _HEADS), *_EMBED_NORMS)
        delta_options["exclude"] = excludes_of(known_names(inner), delta_options["exclude"])
        if delta_options.get("targets"):
            delta_options["targets"] = existing_targets(inner, delta_options["targets"])
        delta = kind(inner, name=self._name(backbone_model), **delta_options)
        self._hold_(backbone_model, delta, config, trainable_before)

    def _hold_(
        self,
        backbone: nn.Module,
        delta: AttachedDelta,
        config: BaseDeltaConfig,
        trainable_before: Mapping[str, bool],
    ) -> None:
        nn.Module.__init__(self)
        # Not registered as submodules, so that `parameters` has only those of the delta.
        self.__dict__["backbone_model"], self.__dict__["delta"] = backbone, delta
        self.config = config
        if config.unfrozen_modules is None:
            config.unfrozen_modules = ["deltas"]
        self.unfrozen_modules = list(config.unfrozen_modules or ())
        self.modified_modules = config.modified_modules
        self.delta_modules = nn.ModuleList(attached.part for attached in delta.held)
        backbone.register_load_state_dict_pre_hook(rename_loaded_)
        backbone.register_state_dict_post_hook(rename_saved_)
        if getattr(backbone, "takes_parts", False):
            for part in self.delta_modules:
                make_distributed_(part)
        for name, parameter in backbone.named_parameters():
            if name in trainable_before:
                parameter.requires_grad_(trainable_before[name])

    def _name(self, backbone: nn.Module) -> str:
        """Return an unused adapter name for the backbone."""
        taken = {**list_deltas(backbone), **list_deltas(self._backbone_of(backbone))}
        count = 0
        while (name := f"{self.delta_type}{f'_{count}' if count else ''}") in taken:
            count += 1
        return name

    def _more(self, config: Any) -> dict[str, Any]:
        """Return further options of the adapter that are not in OpenDelta's config."""
        return {}

    @classmethod
    def _backbone_of(cls, backbone: nn.Module) -> nn.Module:
        """Return the module of a backbone to which the adapter is attached."""
        return backbone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: the backbone must be called instead."""
        raise ConfigError("a delta model has no forward(). Call the backbone model instead.")

    @classmethod
    def from_config(
        cls, config: BaseDeltaConfig | dict[str, Any], backbone_model: nn.Module, **kwargs: Any
    ) -> Self:
        """Add a delta model with the fields of a config to a backbone; `kwargs` override fields."""
        fields = config if isinstance(config, dict) else config.to_dict()
        matched = cls.config_class.from_dict({**fields, **kwargs}).to_dict()
        beside = ("delta_type", "backbone_class", "backbone_checkpoint_name", "backbone_hash")
        return cls(backbone_model, **{n: v for n, v in matched.items() if n not in beside})

    @classmethod
    def from_finetuned(
        cls,
        finetuned_delta_path: str | Path,
        backbone_model: nn.Module,
        delta_config: BaseDeltaConfig | None = None,
        *,
        cache_dir: str | Path | None = None,
        check_hash: bool = True,
        **others: Any,
    ) -> Self:
        """Add a saved delta model to a backbone, and set the backbone to evaluation mode.

        Args:
            finetuned_delta_path: directory written by OpenDelta, PEFT or bmforge.
            backbone_model: any model; it is modified in place.
            delta_config: accepted and ignored; the config is read from the directory.
            cache_dir: parent of the directory.
            check_hash: raise an error if the backbone is not the one that the delta was trained
                with (not recorded in OpenDelta's files).
            others: download options without effect here.
        """
        directory = Path(cache_dir or ".") / finetuned_delta_path
        trainable_before = {name: p.requires_grad for name, p in backbone_model.named_parameters()}
        take_parts_(backbone_model)
        instance = cls.__new__(cls)
        name = instance._name(backbone_model)
        delta = load_delta(
            cls._backbone_of(backbone_model), directory, name=name, allow_other_base=not check_hash
        )
        if old_type_of(type(delta)) != cls.delta_type:
            delta.remove()
            raise ConfigError(
                f"{str(directory)!r} contains a {type(delta).__name__}, which is not a "
                f"{cls.__name__}. Use AutoDeltaModel.from_finetuned, which loads any type."
            )
        has_config = (directory / "config.json").exists()
        config = cls.config_class.from_finetuned(directory) if has_config else cls.config_class()
        instance._hold_(backbone_model, delta, delta_config or config, trainable_before)
        backbone_model.eval()
        return instance

    def save_finetuned(
        self,
        finetuned_delta_path: str | Path = "./delta_checkpoints/",
        save_config: bool = True,
        push_to_dc: bool = False,
        center_args: Any = None,
        **others: Any,
    ) -> None:
        """Write the delta, and other trained parameters, to a directory.

        PEFT's two files are written, and OpenDelta's two if its format can represent the delta.

        Args:
            finetuned_delta_path: directory; created if missing.
            save_config: also write OpenDelta's `config.json` and `pytorch_model.bin`.
            push_to_dc: not supported; DeltaCenter no longer exists.
            center_args: fields of the model card: `name`, `train_tasks`, `test_performance`,
                `license`.
            others: DeltaCenter options without effect.
        """
        if push_to_dc:
            raise ConfigError(
                "push_to_dc=True is not supported, because DeltaCenter no longer exists. Leave "
                "push_to_dc out, and upload the directory yourself."
            )
        self.delta.save(finetuned_delta_path, **read_card(center_args))
        if save_config:
            backbone = self.backbone_model
            self.config.backbone_class = type(backbone).__name__
            name = getattr(getattr(backbone, "config", None), "_name_or_path", None)
            self.config.backbone_checkpoint_name = Path(name).name if name else None
            tensors = old_tensors(backbone, self.delta)
            run_on_first(lambda: self._write_old(Path(finetuned_delta_path), tensors))

    def _write_old(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        self.config.save_finetuned(directory)
        if tensors:
            torch.save(dict(tensors), directory / OLD_WEIGHTS_NAME)
        else:
            (directory / OLD_WEIGHTS_NAME).unlink(missing_ok=True)

    def create_config_from_model(self) -> None:
        """Do nothing, since `config` exists from the start."""

    def freeze_module(
        self,
        module: nn.Module | None = None,
        exclude: Sequence[str] | None = None,
        set_state_dict: bool = True,
        prefix: str = "",
    ) -> None:
        """Freeze a module except for the named parameters, which are saved with the delta.

        Args:
            module: the backbone, or a model that contains it (default: the backbone).
            exclude: parameters that stay trainable: "deltas", suffixes of module or parameter
                names, or `[r]` and a regular expression (default: `unfrozen_modules`). Named
                parameters are unfrozen, except for deltas frozen before; `delta.requires_grad_()`
                unfreezes those.
            set_state_dict: see `set_active_state_dict`.
            prefix: accepted and ignored.
        """
        root = self.backbone_model if module is None else module
        names = self.unfrozen_modules if exclude is None else list(exclude)
        trained, meant = find_trained(root, [name for name in names if name != "deltas"])
        if root is self.backbone_model and self.delta.model is root:
            self.delta.set_modules_to_save_(meant)
        for name, parameter in root.named_parameters():
            if is_delta(root, name):
                parameter.requires_grad_("deltas" in names and parameter.requires_grad)
            else:
                parameter.requires_grad_(name in trained)
        if set_state_dict:
            self.set_active_state_dict(root)

    def set_active_state_dict(self, module: nn.Module) -> None:
        """Limit the `state_dict` of a module to trained parameters."""
        drop_hooks_(module)
        module.register_state_dict_post_hook(keep_trained)

    def attach(self, module: nn.Module | None = None, reset_state_dict: bool = True) -> None:
        """Attach a detached adapter again, and limit `state_dict` to trained parameters."""
        self._check_backbone(module)
        if not self.delta.is_attached() or self.delta.weight == 0:
            self.delta.attach()
        if reset_state_dict:
            self.set_active_state_dict(self.backbone_model)

    def detach(self, module: nn.Module | None = None, reset_state_dict: bool = True) -> None:
        """Remove the adapter from the backbone; by default, `state_dict` is complete again."""
        self._check_backbone(module)
        self.delta.detach()
        if reset_state_dict:
            drop_hooks_(self.backbone_model)

    def _check_backbone(self, module: nn.Module | None) -> None:
        if module is not None and self.backbone_model not in module.modules():
            raise ConfigError(
                "the module does not contain the backbone to which this delta is attached. "
                "Pass the module that contains it."
            )

    def log(
        self,
        module: nn.Module | None = None,
        delta_ratio: bool = True,
        trainable_ratio: bool = True,
        visualization: bool = True,
        cuda_memory: bool = True,
    ) -> None:
        """Print the module tree, the fraction of trained parameters, and the device memory."""
        root = self.backbone_model if module is None else module
        if visualization:
            Visualization(root).structure_graph()
        total = self.num_total_parameters(root)
        if trainable_ratio:
            get_logger().info(
                "Trainable Ratio: %f%%", 100 * self.num_trainable_parameters(root) / total
            )
        if delta_ratio:
            get_logger().info(
                "Delta Parameter Ratio: %f%%", 100 * self.num_delta_parameters(root) / total
            )
        if cuda_memory and torch.accelerator.is_available():
            used = torch.accelerator.memory_allocated() / 2**30
            get_logger().info("Static Memory %.2f GB", used)

    def trainable_parameters_names(self, module: nn.Module | None = None) -> list[str]:
        """Return the names of a module's trainable parameters (default: the backbone's)."""
        root = self.backbone_model if module is None else module
        return [name for name, p in root.named_parameters() if p.requires_grad]

    def frozen_parameters_names(self, module: nn.Module | None = None) -> list[str]:
        """Return the names of a module's frozen parameters (default: the backbone's)."""
        root = self.backbone_model if module is None else module
        return [name for name, p in root.named_parameters() if not p.requires_grad]

    def trainable_parameters(self, module: nn.Module | None = None) -> list[nn.Parameter]:
        """Return a module's trainable parameters (default: the delta's)."""
        root = self if module is None else module
        return [p for p in root.parameters() if p.requires_grad]

    def num_trainable_parameters(self, module: nn.Module | None = None) -> int:
        """Count a module's trainable parameters (default: the delta's)."""
        return sum(p.numel() for p in self.trainable_parameters(module))

    def num_total_parameters(self, module: nn.Module | None = None) -> int:
        """Count a module's parameters (default: the delta's)."""
        return sum(p.numel() for p in (self if module is None else module).parameters())

    def num_frozen_parameters(self, module: nn.Module | None = None) -> int:
        """Count a module's frozen parameters (default: the delta's)."""
        return self.num_total_parameters(module) - self.num_trainable_parameters(module)

    def num_delta_parameters(self, module: nn.Module | None = None) -> int:
        """Count the parameters of all adapters in a module (default: the backbone)."""
        root = self.backbone_model if module is None else module
        named = root.named_parameters()
        return sum(p.numel() for name, p in named if is_delta(root, name))

    def find_key(self, key: str, target_list: Sequence[str]) -> bool:
        """Return True if a module name matches one of the targets."""
        return any(matches_target(key, target) for target in target_list)

    def find_module(self, root_module: nn.Module, key: str) -> tuple[nn.Module, str, nn.Module]:
        """Return the parent of a module, the module's name in its parent, and the module."""
        owner, _, name = key.rpartition(".")
        return root_module.get_submodule(owner), name, root_module.get_submodule(key)
