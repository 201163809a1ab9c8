"""Base class of all adapters: attaches modules to target layers and freezes the base model.

An adapter is a set of modules of one kind (`nn.part_kinds`) with a common name, trained and saved
separately from the base. A type is a class that declares the kind, the default options and the
default targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bmforge.config import config_from_dict
from bmforge.errors import ConfigError, suggest
from bmforge.nn.low_rank import init_magnitudes_
from bmforge.nn.part import AdapterModule, attach_part_, detach_part_, tensor_notes
from bmforge.nn.part_kinds import PART_KINDS
from bmforge.nn.random_init import init_from_note_
from bmforge.nn.token_rows import TOKENS_SLOT, init_trained_rows_
from bmforge.provenance import Provenance
from bmforge.tune.delta.address import find_called, find_target_parameters
from bmforge.tune.delta.attached import (
    AttachedModule,
    deltas_of,
    is_parallelized,
    part_around,
    refuse_parallelized,
)
from bmforge.tune.delta.records import check_patterns, order_changes_
from bmforge.tune.delta.selection import accept_adapter_names_

__all__ = ["AttachedDelta"]


class AttachedDelta:
    """Adapter: modules of one kind, attached to a model's layers under one name.

    The constructor attaches the adapter and freezes all other parameters. If the base's weights are
    fp16, bf16 or integers, the adapter's are fp32, and its inputs and outputs are cast.

    Args:
        model: any `nn.Module`, not yet parallelized; may be on the meta device.
        targets: modules to attach to, see `address` (default: the type's default targets).
        name: name of the adapter and of its modules in the model.
        exclude: name prefixes, or targets, of modules that are skipped.
        modules_to_save: modules, or single parameters, that are trained in full and saved with the
            adapter, such as a new head.
        seed: random seed of the initialization; see `init_deltas_`.
        options: options of the kind; see `nn.part_kinds`.

    Attributes:
        default_targets: generic names of the default targets; those missing in a model are skipped.
        defaults: default values of the options.
        stands_behind: True if the adapter needs the complete output of an attention or MLP; a
            target that is the last projection of such a module is then replaced by the module.
        peft_type: `peft_type` in saved configs: PEFT's name, or one that begins with BMFORGE.
        peft_reads: further PEFT types with equivalent tensors, which are loaded as this type.
        origin: config of the loaded PEFT directory; it is saved again with the adapter.
        extra: other tensors in the loaded directory; they are saved again with the adapter.
        provenance: training data of a loaded adapter, and the licenses of these data.

    Raises:
        ConfigError: the targets or options do not fit the model, which is then unchanged.
    """

    kind: ClassVar[str] = ""
    default_targets: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    stands_behind: ClassVar[bool] = False
    peft_type: ClassVar[str] = ""
    peft_reads: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[str] | str | None = None,
        *,
        name: str = "default",
        exclude: Sequence[str] = (),
        modules_to_save: Sequence[str] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        refuse_parallelized(model, f"Attach a {type(self).__name__}")
        self.model, self.name, self.seed = model, name, seed
        self.targets = (targets,) if isinstance(targets, str) else targets
        self.exclude, self.modules_to_save = tuple(exclude), tuple(modules_to_save or ())
        if name in deltas_of(model):
            raise ConfigError(
                f"the model already has an adapter {name!r}. Choose another name, or remove the "
                "existing one."
            )
        self.options = self._complete_options({**self.defaults, **options})
        self.weight, self.merged = 1.0, False
        self.provenance = Provenance()
        self.origin: dict[str, Any] | None = None
        self.extra: dict[str, Tensor] = {}
        self.held: tuple[AttachedModule, ...] = ()
        self._fully_trained_names = frozenset(find_target_parameters(model, self.modules_to_save))
        names = self._find_target_names()
        check_patterns(self, names)
        self._put_(names)
        deltas_of(model)[name] = self
        accept_adapter_names_(model)
        self.init_(seed)
        self.freeze_()

    @classmethod
    def from_places(cls, model: nn.Module, name: str, options: Mapping[str, Any]) -> Self:
        """Attach an adapter with the options from its directory; some types override this.

        Args:
            model: base model.
            name: name of the adapter.
            options: arguments of the class; `targets` are full module names.
        """
        arguments = dict(options)
        if "targets" in arguments:  # the full name `norm` would match as a generic name
            arguments["targets"] = tuple(f"[r]^{re.escape(n)}$" for n in arguments["targets"])
        return cls(model, name=name, **arguments)

    # Hooks that types override.

    def _complete_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options, completed with defaults; raise an error for unknown ones."""
        option_names = PART_KINDS[self.kind].options.__dataclass_fields__
        for key in options:
            if key not in option_names:
                raise ConfigError(
                    f"{type(self).__name__} has no option {key!r} (supported: "
                    f"{', '.join(option_names)}, targets, name, exclude, modules_to_save and "
                    f"seed).{suggest(key, option_names)}"
                )
        return options

    def _find_target_names(self) -> list[str]:
        """Return the names of the modules to which the adapter will be attached."""
        patterns = self.default_targets if self.targets is None else tuple(self.targets)
        names = find_called(self.model, patterns, self.exclude, self.targets is not None)
        if self.targets is None:
            names = [name for name in names if self._is_usual(self.model.get_submodule(name))]
        if self.stands_behind:
            names = list(dict.fromkeys(part_around(self.model, name) for name in names))
        return names

    def _is_usual(self, module: nn.Module) -> bool:
        """Return True if the adapter type supports a module that a default target matches."""
        return True

    # Methods common to all types.

    def _put_(self, names: Sequence[str]) -> None:
        kind = PART_KINDS[self.kind]
        model = self.model
        before = {id(module) for module in model.modules()}
        is_slot = self.kind in ("prefix", "prompt")
        options = config_from_dict(kind.options, dict(self.options), "options.")
        try:
            kind.apply(model, names, options, "" if is_slot else self.name)
        except ConfigError as error:
            raise ConfigError(
                f"cannot attach the {type(self).__name__} {self.name!r} to {type(model).__name__}: "
                f"{error}"
            ) from None
        attached = []
        for name, module in model.named_modules():
            owner, _, slot = name.rpartition(".")
            if id(module) not in before and id(model.get_submodule(owner)) in before:
                module.is_delta = True  # type: ignore[assignment]
                attached.append(AttachedModule(owner, slot, module))
        self.held = tuple(attached)
        for parameter in self.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        self.record_(True)

    def record_(self, is_there: bool) -> None:
        """Add the adapter's entry to the config of a bmforge model, or delete the entry."""
        if not hasattr(self.model, "record_part_"):
            return
        model: Any = self.model
        name = "" if self.kind in ("prefix", "prompt") else self.name
        where = [
            part.owner for part in self.held if not part.slot.endswith(("_reader", TOKENS_SLOT))
        ]
        if is_there:
            model.record_part_(self.kind, where, dict(self.options), name, float(self.weight))
            order_changes_(model, self.name)
        else:
            model.erase_part_(self.kind, where, dict(self.options), name)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapter's parameters with their names; a shared parameter is yielded once."""
        seen: set[int] = set()
        for owner, slot, part in self.here():
            for key, parameter in part.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{owner}.{slot}.{key}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the adapter's parameters."""
        for _, parameter in self.named_parameters():
            yield parameter

    def names(self) -> list[str]:
        """Return the names of the adapter's tensors in the model's state dict."""
        return [
            f"{owner}.{slot}.{key}"
            for owner, slot, part in self.held
            for key, _ in part.named_parameters()
        ]

    def here(self) -> list[AttachedModule]:
        """Return the adapter modules, attached or detached, on this process's pipeline stage."""
        names = {name for name, _ in self.model.named_modules()}
        return [part for part in self.held if part.owner in names]

    def places(self) -> list[str]:
        """Return the names of the modules to which the adapter is attached."""
        return [part.owner for part in self.held if not part.slot.endswith(TOKENS_SLOT)]

    def init_(self, seed: int = 0) -> Self:
        """Initialize the adapter at random; return the adapter.

        The values of a tensor depend only on the seed and its name, so they are equal on every
        layout.
        """
        for owner, slot, part in self.here():
            for key, note in tensor_notes(part).items():
                tensor = getattr(part, key)
                if not tensor.is_meta:
                    init_from_note_(tensor, f"{owner}.{slot}.{key}", note, 0.0, seed)
            init_magnitudes_(self.model.get_submodule(owner), part)
            init_trained_rows_(self.model.get_submodule(owner), part)
        return self

    def freeze_(self, base: bool = True) -> Self:
        """Make adapters, and the modules that they train in full, trainable; freeze the base.

        Args:
            base: True to freeze the base; False to make the base trainable too.
        """
        trained = {
            id(parameter)
            for delta in deltas_of(self.model).values()
            for parameter in (*delta.parameters(), *delta.fully_trained_parameters().values())
            if delta is self or parameter.requires_grad
        }
        for parameter in self.model.parameters():
            trains = id(parameter) in trained or (not base and parameter.is_floating_point())
            parameter.requires_grad_(trains)
        return self

    def set_modules_to_save_(self, targets: Sequence[str]) -> Self:
        """Set the modules or parameters that are trained in full and saved with the adapter."""
        self._fully_trained_names = frozenset(find_target_parameters(self.model, targets))
        self.modules_to_save = tuple(targets)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Make the adapter's parameters trainable, or freeze them if `requires_grad` is False."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def fully_trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return a dict from name to base parameter trained in full (`modules_to_save`)."""
        named = self.model.named_parameters() if self._fully_trained_names else ()
        return {name: p for name, p in named if name in self._fully_trained_names}

    def is_attached(self) -> bool:
        """Return True if the adapter's modules are attached to the model."""
        return any(
            self.model.get_submodule(owner)._modules.get(slot) is part
            for owner, slot, part in self.here()
        )

    def detach(self) -> Self:
        """Remove the adapter's modules from the model, so that it computes the base's outputs.

        `attach` adds the modules again. On a parallelized model they stay attached with weight 0.
        """
        if not self.is_attached():
            raise ConfigError(f"adapter {self.name!r} is already detached.")
        self._refuse_merged("detach")
        if is_parallelized(self.model):
            self.weigh_(0.0)
            return self
        for owner, slot, part in self.held:
            module = self.model.get_submodule(owner)
            if isinstance(part, AdapterModule):
                detach_part_(module, slot)
            else:
                setattr(module, slot, None)
        self.record_(False)
        return self

    def attach(self) -> Self:
        """Attach a detached adapter again to the same modules."""
        if is_parallelized(self.model):
            self.weigh_(1.0)
            return self
        if self.is_attached():
            raise ConfigError(f"adapter {self.name!r} is already attached.")
        taken = [
            entry.owner
            for entry in self.held
            if getattr(self.model.get_submodule(entry.owner), entry.slot, None) is not None
        ]
        if taken:
            raise ConfigError(f"{taken[0]} has another adapter {self.name!r}. Detach it first.")
        for owner, slot, part in self.held:
            module = self.model.get_submodule(owner)
            if isinstance(part, AdapterModule):
                attach_part_(module, slot, part)
                self._restore_order_(module)
            else:
                setattr(module, slot, part)
        self.record_(True)
        return self

    def _restore_order_(self, module: nn.Module) -> None:
        """Move later adapters after this one, so that adapters apply in order of attachment."""
        names = list(deltas_of(self.model))
        for name in names[names.index(self.name) + 1 :]:
            for slot in (f"{name}_reader", f"{name}{TOKENS_SLOT}", name):
                if isinstance(module._modules.get(slot), AdapterModule):
                    module._modules[slot] = module._modules.pop(slot)

    def remove(self) -> None:
        """Detach the adapter, and delete it from the model's list of adapters."""
        if self.is_attached():
            self.detach()
        deltas_of(self.model).pop(self.name, None)

    def weigh_(self, weight: float) -> Self:
        """Set the factor on the adapter's output; 0 disables the adapter.

        Raises:
            ConfigError: the adapter is a prefix or a soft prompt, and the weight is not 0 or 1.
        """
        self.check_weight(weight)
        if weight == self.weight:
            return self
        self.weight = weight
        for attached in self.held:
            attached.part.adapter_weight = float(weight)
        if self.is_attached():
            self.record_(False)
            self.record_(True)
        return self

    def check_weight(self, weight: float) -> None:
        """Raise `ConfigError` if the adapter does not support this weight now."""
        if self.kind in ("prefix", "prompt") and weight not in (0, 1):
            raise ConfigError(
                f"weight={weight} is not supported by the {type(self).__name__} "
                f"{self.name!r} (allowed: 0 or 1)."
            )
        if self.merged and weight != self.weight:
            raise ConfigError(
                f"adapter {self.name!r} is merged with weight={self.weight}, which "
                f"cannot be changed to {weight}. Call unmerge() first."
            )

    def _refuse_merged(self, what: str) -> None:
        if self.merged:
            raise ConfigError(f"adapter {self.name!r} is merged. Call unmerge() before {what}.")

    def describe(self) -> dict[str, Any]:
        """Return the type, kind and options, as written to the adapter's config file."""
        kind = PART_KINDS[self.kind]
        completed = asdict(config_from_dict(kind.options, dict(self.options), "options."))
        return {"type": type(self).__name__, "kind": self.kind, "options": completed}

    def count_parameters(self) -> int:
        """Return the number of trained parameters, including modules trained in full."""
        return sum(
            p.numel() for p in (*self.parameters(), *self.fully_trained_parameters().values())
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return a dict from name to tensor, including the parameters trained in full."""
        return {**dict(self.named_parameters()), **self.fully_trained_parameters()}

    def __repr__(self) -> str:
        """Show the adapter's name, number of modules, number of parameters, and state."""
        state = "merged" if self.merged else "attached" if self.is_attached() else "detached"
        return (
            f"{type(self).__name__}({self.name!r}, {len(self.held)} modules, "
            f"{self.count_parameters()} parameters, {state})"
        )
