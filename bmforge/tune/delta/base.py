"""What every delta does: find its places, put its parts there, freeze, detach, save.

A delta is parts of one kind (`nn.part_kinds`) under one name, which are trained and saved alone. A
type is a class that says which kind, which options and which places where nothing is said.
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
from bmforge.nn.low_rank import settle_magnitude_
from bmforge.nn.part import BesidePart, attach_part_, detach_part_, tensor_notes
from bmforge.nn.part_kinds import PART_KINDS
from bmforge.nn.random_init import draw_tensor_
from bmforge.provenance import Provenance
from bmforge.surgery import match_glob
from bmforge.tune.delta.address import excludes_of, find_called, find_wholes, known_names
from bmforge.tune.delta.held import (
    Held,
    deltas_of,
    is_laid_out,
    part_around,
    refuse_laid_out,
)
from bmforge.tune.delta.selection import accept_adapter_names_

__all__ = ["AttachedDelta", "adapter_types", "init_deltas_"]


class AttachedDelta:
    """Parts of one kind beside modules of a model, under one name; they are put there at once.

    The rest of the model is frozen. A delta is fp32 beside a base of half precision or of integers,
    and casts what comes and goes.

    Args:
        model: any `nn.Module`; on meta or not, not laid out.
        targets: what it stands beside, see `address`; None takes the type's usual places.
        name: of the delta, and of its parts in the model.
        exclude: beginnings of names, or targets, that are left out.
        train_also: modules, or single parameters, that are trained whole and saved with the delta,
            such as a new head.
        seed: of what is drawn; see `init_deltas_`.
        options: of the kind; see `nn.part_kinds`.

    Attributes:
        default_targets: common words for where it stands; those that a model lacks are passed over.
        defaults: of the options.
        stands_behind: its parts need what a module made as a whole, so beside the last projection
            of an attention or MLP of ours they stand beside that one, which makes the same.
        peft_type: `peft_type` of its directories: PEFT's name, or one that begins with BMFORGE.
        peft_reads: further types of PEFT that compute the same once they are saved.
        origin: the config of the file of PEFT's that it came from, and
        extra: tensors there that are none of it; both are written back.
        provenance: what it was made of, of a delta that was loaded.

    Raises:
        ConfigError: targets or options that do not fit the model, which is as it was then.
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
        train_also: Sequence[str] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        refuse_laid_out(model, f"attach a {type(self).__name__}")
        self.model, self.name, self.seed = model, name, seed
        self.targets = (targets,) if isinstance(targets, str) else targets
        self.exclude, self.train_also = tuple(exclude), tuple(train_also)
        if name in deltas_of(model):
            raise ConfigError(
                f"the model already has a delta {name!r}: give this one another name, or remove "
                "that one."
            )
        self.options = self._settle_options({**self.defaults, **options})
        self.weight, self.merged = 1.0, False
        self.provenance = Provenance()
        self.origin: dict[str, Any] | None = None
        self.extra: dict[str, Tensor] = {}
        self.held: tuple[Held, ...] = ()
        self._whole_names = frozenset(find_wholes(model, self.train_also))
        names = self._settle_names()
        self._check_patterns(names)
        self._put_(names)
        deltas_of(model)[name] = self
        accept_adapter_names_(model)
        self.init_(seed)
        self.freeze_()

    @classmethod
    def from_places(cls, model: nn.Module, name: str, options: Mapping[str, Any]) -> Self:
        """Attach an adapter as a directory describes it; overridden by types with more to say.

        Args:
            model: the base.
            name: name of the adapter.
            options: arguments of the class, its targets as whole names of modules.
        """
        told = dict(options)
        if "targets" in told:  # `norm` alone would be the common word
            told["targets"] = tuple(f"[r]^{re.escape(n)}$" for n in told["targets"])
        return cls(model, name=name, **told)

    # What a type may say otherwise.

    def _settle_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options that the kind has."""
        known = PART_KINDS[self.kind].options.__dataclass_fields__
        for key in options:
            if key not in known:
                raise ConfigError(
                    f"{type(self).__name__} has no option {key!r}.{suggest(key, known)} It has "
                    f"{', '.join(known)}; besides targets, name, exclude, train_also and seed."
                )
        return options

    def _settle_names(self) -> list[str]:
        """Return the names of the modules beside which parts come to stand."""
        given = self.default_targets if self.targets is None else tuple(self.targets)
        found = find_called(self.model, given, self.exclude, self.targets is not None)
        if self.targets is None:
            found = [name for name in found if self._is_usual(self.model.get_submodule(name))]
        if self.stands_behind:
            found = list(dict.fromkeys(part_around(self.model, name) for name in found))
        return found

    def _is_usual(self, module: nn.Module) -> bool:
        """Tell whether a module that a common word names can have a part where nothing is said."""
        return True

    # What all do.

    def _check_patterns(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` for a pattern of ranks, alphas or exclude that matches nothing."""
        for option in ("ranks", "alphas"):
            for glob in self.options.get(option) or {}:
                if not any(match_glob(name, glob) for name in names):
                    raise ConfigError(
                        f"{option} has {glob!r}, which matches none of the modules that the "
                        f"{type(self).__name__} is attached to.{suggest(glob, names)} Use a name "
                        "glob such as '**.v_proj'."
                    )
        known = known_names(self.model)
        for one in self.exclude:
            if not excludes_of(known, (one,)):
                raise ConfigError(
                    f"exclude has {one!r}, which matches no module of this "
                    f"{type(self.model).__name__}.{suggest(one, known)} Leave it out."
                )

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
                f"{type(model).__name__} cannot have the {type(self).__name__} {self.name!r}: "
                f"{error}"
            ) from None
        held = []
        for name, module in model.named_modules():
            owner, _, slot = name.rpartition(".")
            if id(module) not in before and id(model.get_submodule(owner)) in before:
                module.is_delta = True  # type: ignore[assignment]
                held.append(Held(owner, slot, module))
        self.held = tuple(held)
        for parameter in self.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        self.record_(True)

    def record_(self, is_there: bool) -> None:
        """Let a model of ours remember the parts in its config, or forget them."""
        if not hasattr(self.model, "remember_part_"):
            return
        model: Any = self.model
        name = "" if self.kind in ("prefix", "prompt") else self.name
        where = [held.owner for held in self.held if not held.slot.endswith("_reader")]
        if is_there:
            model.remember_part_(self.kind, where, dict(self.options), name, float(self.weight))
            self._order_changes_(model)
        else:
            model.forget_part_(self.kind, where, dict(self.options), name)

    def _order_changes_(self, model: Any) -> None:
        """Keep the config's changes in the order in which adapters apply: it matters for some."""
        order = {name: number for number, name in enumerate(deltas_of(model))}
        order.setdefault(self.name, len(order))
        changes = list(model.config.changes)
        places = [n for n, change in enumerate(changes) if change.name in order]
        ordered = sorted((changes[n] for n in places), key=lambda change: order[change.name])
        for n, change in zip(places, ordered, strict=True):
            changes[n] = change
        model.config = model.config.replace(changes=tuple(changes))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of all that its parts have; one that several have comes once."""
        seen: set[int] = set()
        for owner, slot, part in self.here():
            for key, parameter in part.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{owner}.{slot}.{key}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of its parts."""
        for _, parameter in self.named_parameters():
            yield parameter

    def names(self) -> list[str]:
        """Return the names that its parts' tensors have in the model while it is attached."""
        return [
            f"{owner}.{slot}.{key}"
            for owner, slot, part in self.held
            for key, _ in part.named_parameters()
        ]

    def here(self) -> list[Held]:
        """Return what stands, or stood, in the part of the model on this process (a pipeline's)."""
        names = {name for name, _ in self.model.named_modules()}
        return [held for held in self.held if held.owner in names]

    def places(self) -> list[str]:
        """Return the names of the modules beside which its parts stand."""
        return [held.owner for held in self.held]

    def init_(self, seed: int = 0) -> Self:
        """Draw its tensors by their names, with the same result on every layout; return it."""
        for owner, slot, part in self.here():
            for key, note in tensor_notes(part).items():
                tensor = getattr(part, key)
                if not tensor.is_meta:
                    draw_tensor_(tensor, f"{owner}.{slot}.{key}", note, 0.0, seed)
            settle_magnitude_(self.model.get_submodule(owner), part)
        return self

    def freeze_(self, base: bool = True) -> Self:
        """Train nothing of the model but deltas and what they train whole.

        Args:
            base: switch gradients of the base off; else on, for training all of it beside.
        """
        trained = {
            id(parameter)
            for delta in deltas_of(self.model).values()
            for parameter in (*delta.parameters(), *delta.wholes().values())
            if delta is self or parameter.requires_grad
        }
        for parameter in self.model.parameters():
            wanted = id(parameter) in trained or (not base and parameter.is_floating_point())
            parameter.requires_grad_(wanted)
        return self

    def train_also_(self, targets: Sequence[str]) -> Self:
        """Train these modules or parameters whole, and save them with the delta; no others."""
        self._whole_names = frozenset(find_wholes(self.model, targets))
        self.train_also = tuple(targets)
        return self

    def requires_grad_(self, wanted: bool = True) -> Self:
        """Say whether its parts are trained: False leaves it in the model, frozen."""
        for parameter in self.parameters():
            parameter.requires_grad_(wanted)
        return self

    def wholes(self) -> dict[str, nn.Parameter]:
        """Return the parameters, by name, that are trained and saved whole (`train_also`)."""
        named = self.model.named_parameters() if self._whole_names else ()
        return {name: p for name, p in named if name in self._whole_names}

    def is_attached(self) -> bool:
        """Tell whether its parts stand in the model."""
        return any(
            self.model.get_submodule(owner)._modules.get(slot) is part
            for owner, slot, part in self.here()
        )

    def detach(self) -> Self:
        """Take its parts out of the model, which is then what it was; `attach` puts them back.

        Of a model that is laid out they stay where they are, switched off.
        """
        if not self.is_attached():
            raise ConfigError(f"delta {self.name!r} is detached already.")
        self._refuse_merged("detach")
        if is_laid_out(self.model):
            self.weigh_(0.0)
            return self
        for owner, slot, part in self.held:
            module = self.model.get_submodule(owner)
            if isinstance(part, BesidePart):
                detach_part_(module, slot)
            else:
                setattr(module, slot, None)
        self.record_(False)
        return self

    def attach(self) -> Self:
        """Put its parts back where they were."""
        if is_laid_out(self.model):
            self.weigh_(1.0)
            return self
        if self.is_attached():
            raise ConfigError(f"delta {self.name!r} is attached already.")
        taken = [
            held.owner
            for held in self.held
            if getattr(self.model.get_submodule(held.owner), held.slot, None) is not None
        ]
        if taken:
            raise ConfigError(f"{taken[0]} has something else in the place of {self.name!r} now.")
        for owner, slot, part in self.held:
            module = self.model.get_submodule(owner)
            if isinstance(part, BesidePart):
                attach_part_(module, slot, part)
                self._restore_order_(module)
            else:
                setattr(module, slot, part)
        self.record_(True)
        return self

    def _restore_order_(self, module: nn.Module) -> None:
        """Let later adapters of a module apply after this one again: the order matters."""
        names = list(deltas_of(self.model))
        for name in names[names.index(self.name) + 1 :]:
            for slot in (f"{name}_reader", name):
                if isinstance(module._modules.get(slot), BesidePart):
                    module._modules[slot] = module._modules.pop(slot)

    def remove(self) -> None:
        """Detach it, where it is attached, and forget it."""
        if self.is_attached():
            self.detach()
        deltas_of(self.model).pop(self.name, None)

    def weigh_(self, weight: float) -> Self:
        """Give what it changes a factor; 0 switches it off.

        Raises:
            ConfigError: keys and values, or rows, in front of a text cannot be weighed.
        """
        self.check_weight(weight)
        if weight == self.weight:
            return self
        self.weight = weight
        for held in self.held:
            held.part.adapter_weight = float(weight)
        if self.is_attached():
            self.record_(False)
            self.record_(True)
        return self

    def check_weight(self, weight: float) -> None:
        """Raise `ConfigError` if the adapter cannot have this weight now."""
        if self.kind in ("prefix", "prompt") and weight not in (0, 1):
            raise ConfigError(
                f"weight={weight} is not possible for the {type(self).__name__} {self.name!r} (0 "
                "or 1). Enable or disable it."
            )
        if self.merged and weight != self.weight:
            raise ConfigError(
                f"adapter {self.name!r} is merged with weight={self.weight}, which cannot become "
                f"{weight}. Call unmerge() first."
            )

    def _refuse_merged(self, what: str) -> None:
        if self.merged:
            raise ConfigError(f"delta {self.name!r} is merged: call unmerge() before {what}.")

    def describe(self) -> dict[str, Any]:
        """Return what files say of it, but for its tensors."""
        kind = PART_KINDS[self.kind]
        settled = asdict(config_from_dict(kind.options, dict(self.options), "options."))
        return {"type": type(self).__name__, "kind": self.kind, "options": settled}

    def count_parameters(self) -> int:
        """Return how many numbers are trained: of parts, and of what is trained whole."""
        return sum(p.numel() for p in (*self.parameters(), *self.wholes().values()))

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name, and those that are trained whole."""
        return {**dict(self.named_parameters()), **self.wholes()}

    def __repr__(self) -> str:
        """Show what it is and where."""
        state = "merged" if self.merged else "attached" if self.is_attached() else "detached"
        return (
            f"{type(self).__name__}({self.name!r}, {len(self.held)} places, "
            f"{self.count_parameters()} parameters, {state})"
        )


def adapter_types(base: type[AttachedDelta] = AttachedDelta) -> dict[str, type[AttachedDelta]]:
    """Return the adapter types by class name: the subclasses that name a `peft_type`."""
    found: dict[str, type[AttachedDelta]] = {}
    for kind in base.__subclasses__():
        found |= {kind.__name__: kind} if "peft_type" in vars(kind) else {}
        found |= adapter_types(kind)
    return found


def init_deltas_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw the tensors of all deltas of a model, with the same result on every layout.

    Args:
        model: with memory: after `load_weights_` where deltas were attached on meta.
        seed: decides all of them.
    """
    for delta in deltas_of(model).values():
        delta.init_(seed)
    return model
