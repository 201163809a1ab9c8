"""Tuning a run's model by a delta: `--delta.kind lora --delta.rank 8`, with every recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest
from bmforge.models import Model
from bmforge.parallel import run_on_first
from bmforge.provenance import write_provenance
from bmforge.recipes.compressing import has_phase
from bmforge.train import OptimGroup, TrainConfig
from bmforge.train.checkpoint import Base
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Delta,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
    list_deltas,
)
from bmforge.tune.delta.held import delta_tensors

__all__ = [
    "KINDS",
    "DeltaConfig",
    "attach_delta",
    "delta_stays",
    "export_delta",
    "find_base",
    "set_rates",
    "with_delta",
]

KINDS: dict[str, type[Delta]] = {
    "lora": Lora,
    "adapter": Adapter,
    "low-rank": LowRankAdapter,
    "compacter": Compacter,
    "parallel-adapter": ParallelAdapter,
    "bitfit": BitFit,
    "ia3": IA3,
    "prefix": Prefix,
    "soft-prompt": SoftPrompt,
}
_NAME = "default"


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A delta that is trained in the place of the model; what is None is as its type has it.

    Args:
        kind: lora, adapter, low-rank, compacter, parallel-adapter, bitfit, ia3, prefix or
            soft-prompt; None trains the model itself.
        targets: what it stands beside: common words (attn.q), endings, globs; () is as usual.
        exclude: beginnings of names, or targets, that are left out.
        train_also: modules that are trained whole and saved with it; a new head is.
        rank: of low-rank matrices.
        alpha: a Lora's numerator of its scale.
        dropout: of what goes into a Lora.
        root_scale: scale by the root of the rank (rsLoRA).
        magnitude: train lengths of rows (DoRA).
        width: of adapters.
        reduction: how many times narrower an adapter is than the model.
        division: number of a Compacter's Kronecker products.
        activation: of adapters.
        scale: of what an adapter adds.
        length: of a prefix or a prompt.
        inner: width of the layers that make a prefix.
        std: of a drawn prefix or prompt.
        lr_ratio: of a Lora, the rate of B over that of A (LoRA+).
        merge: export the model with the delta in its weights; else the delta alone.
    """

    kind: str | None = None
    targets: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    train_also: tuple[str, ...] = ()
    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    root_scale: bool = False
    magnitude: bool = False
    width: int | None = None
    reduction: int | None = None
    division: int | None = None
    activation: str | None = None
    scale: float | None = None
    length: int | None = None
    inner: int | None = None
    std: float | None = None
    lr_ratio: float | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        """Check that there is such a kind, and that nothing is said without one."""
        if self.kind is None:
            said = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            if said:
                raise ConfigError(f"delta.{said[0]} has no effect without delta.kind.")
        elif self.lr_ratio is not None and (self.kind != "lora" or not self.lr_ratio > 0):
            raise ConfigError(
                f"delta.lr_ratio={self.lr_ratio} must be above 0, and is for delta.kind='lora' "
                f"alone, not {self.kind!r}."
            )
        elif self.kind not in KINDS:
            raise ConfigError(
                f"delta.kind={self.kind!r} is unknown.{suggest(self.kind, KINDS)} Kinds: "
                f"{', '.join(KINDS)}."
            )

    def options(self) -> dict[str, Any]:
        """Return what the type is told, of what was said."""
        beside = {"kind", "targets", "exclude", "train_also", "lr_ratio", "merge"}
        fields = (f for f in dataclasses.fields(self) if f.name not in beside)
        return {f.name: v for f in fields if (v := getattr(self, f.name)) not in (None, False)}


def attach_delta(model: nn.Module, config: Any) -> Delta | None:
    """Put a run's delta into its model, on meta or not; None where it has none.

    Args:
        model: not laid out yet.
        config: of the run.

    Raises:
        ConfigError: it does not fit the model, or the run trains something else as well.
    """
    told: DeltaConfig = config.delta
    if told.kind is None:
        return None
    if config.freeze_base:
        raise ConfigError("freeze_base=True has no effect beside a delta: leave it out.")
    kind, options = KINDS[told.kind], told.options()
    also = list(told.train_also)
    if config.new_head:
        owners = (n.rpartition(".")[0] for n in config.model.heads[config.model.head].names)
        also += [name for name in dict.fromkeys(owners) if name not in also]
    if told.targets:
        if kind in (ParallelAdapter, SoftPrompt):
            raise ConfigError(f"delta.targets has no effect with delta.kind={told.kind!r}.")
        options["targets"] = told.targets
    return kind(
        model, name=_NAME, exclude=told.exclude, train_also=also, seed=config.seed, **options
    )


def find_base(model: nn.Module, config: Any) -> Base | None:
    """Return what a delta's run reads anew when it goes on, so that checkpoints leave it out.

    None where they keep it: weights that were drawn are in no file, and what makes a model small
    meanwhile changes weights that nothing trains.

    Args:
        model: whole, with the run's delta.
        config: of the run.
    """
    if config.delta.kind is None or config.init_from is None or has_phase(config):
        return None
    own = {name for delta in list_deltas(model).values() for name in delta.names()}
    frozen = (n for n, p in model.named_parameters() if not p.requires_grad and n not in own)
    return Base(config.init_from, tuple(frozen))


def delta_stays(model: nn.Module) -> Callable[[str, Tensor], bool]:
    """Return what tells of a tensor, by its name, that it is a delta's and stays on the device."""
    names = delta_tensors(model)
    return lambda name, tensor: name in names


def set_rates(train: TrainConfig, told: DeltaConfig, model: nn.Module) -> TrainConfig:
    """Return a loop's settings with the rate that a Lora's B has of its own (LoRA+).

    Source: Hayou et al., "LoRA+: Efficient low rank adaptation of large models" (2024).
    """
    if told.lr_ratio is None:
        return train
    lr = told.lr_ratio * train.optim.lr
    names = list_deltas(model)[_NAME].names()
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    own = [OptimGroup(f"**.{_NAME}.{end}", lr) for end in ends if end.endswith("up")]
    optim = dataclasses.replace(train.optim, groups=(*train.optim.groups, *own))
    return dataclasses.replace(train, optim=optim)


def with_delta(model_class: type[Model], sizes: Any, config: Any) -> Any:
    """Return a model's config with what the run's delta puts into it, for plans."""
    if config.delta.kind is None:
        return sizes
    model = model_class.from_config(sizes, device="meta")
    attach_delta(model, config)
    return model.config


def export_delta(model: Any, config: Any, directory: Path) -> bool:
    """Export a run's delta; tell whether that is all, and no model is to be exported.

    Comm: every process must call it.
    """
    if config.delta.kind is None:
        return False
    delta = list_deltas(model)[_NAME]
    if config.delta.merge:
        delta.merge()
        return False
    known = model.provenance
    data = dict.fromkeys(f"{p.name} ({p.licence})" for p in known.parts if p.kind == "data")
    card = {"base": config.init_from, "command": f"run.toml of {config.run_dir.name}"}
    card |= {"data": ", ".join(data), "license": known.licence}
    delta.save(directory, **{key: value for key, value in card.items() if value})
    run_on_first(lambda: write_provenance(directory, known))
    return True
