"""Adapter training in any task: `--adapter lora --adapter.rank 8`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.part_kinds import PART_KINDS
from bmforge.nn.uncalled_modules import keep_called
from bmforge.recipes.compression_phases import has_phase
from bmforge.surgery import find_repeated_blocks
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
from bmforge.tune.delta.address import ROUTERS
from bmforge.tune.delta.attached import delta_tensors
from bmforge.value_ranges import check_values

__all__ = [
    "ADAPTER_NAME",
    "ALL_LINEAR",
    "KINDS",
    "AdapterConfig",
    "adapter_defaults",
    "adapter_stays",
    "attach_adapter",
    "default_rate",
    "find_base",
    "log_trained",
    "set_rates",
    "resolve_adapter",
    "with_adapter",
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
ADAPTER_NAME = "default"
ALL_LINEAR = "all-linear"
_RUN_FIELDS = ("kind", "target_modules", "exclude_modules", "modules_to_save", "lr_ratio", "merge")
# Default learning rate for full fine-tuning on chats.
_FULL_RATE = 2e-5
# Learning rates of published recipes: Hu et al. (2021) and Dettmers et al. (2023)
# for LoRA, PEFT's examples for the others.
_RATES = {"ia3": 3e-3, "bitfit": 1e-3, "prefix": 1e-2, "soft-prompt": 3e-2}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapter to train instead of the whole model; None means the default of the adapter type.

    Args:
        kind: kind of adapter: lora, adapter, low-rank, compacter, parallel-adapter, bitfit, ia3,
            prefix or soft-prompt (if None: no adapter; the model itself is trained).
        target_modules: layers that get an adapter: all-linear, generic names (attn.q), suffixes or
            globs (if empty: all-linear for lora, else the default of the adapter type).
        exclude_modules: layers that get no adapter, as name prefixes or in the form of
            `target_modules`.
        modules_to_save: modules that are trained in full and saved with the adapter; a newly
            initialized head is added automatically.
        rank: rank of the low-rank matrices (if None: 8 for lora, 1 for low-rank and compacter).
        alpha: numerator of LoRA's scale, alpha / rank (if None: 16).
        dropout: dropout probability of LoRA's input (if None: 0).
        use_rslora: scale LoRA by alpha / sqrt(rank) instead of alpha / rank.
        use_dora: also train the magnitudes of the weight rows (DoRA); for lora only.
        width: bottleneck width of adapter and parallel-adapter (if None: 24).
        reduction: ratio of the model width to the bottleneck width (if None: 32 for low-rank, 16
            for compacter; adapter and parallel-adapter use `width`).
        division: number of Kronecker products in a weight matrix of compacter (if None: 4).
        activation: activation function in the bottleneck, such as gelu or relu (if None: gelu_new).
        scale: factor on the output of a bottleneck adapter (if None: 1).
        length: number of virtual tokens (if None: 6 for prefix, 100 for soft-prompt).
        inner: hidden size of the MLP that computes a prefix; 0 trains the prefix directly (if None:
            0).
        std: standard deviation of the initial values (if None: 0.02 for prefix, 0.5 for
            soft-prompt).
        lr_ratio: ratio of the learning rate of LoRA's matrix B to that of A, as in LoRA+ (if None:
            1).
        merge: export the model with the adapter merged into its weights instead of the adapter
            alone.
    """

    kind: str | None = None
    target_modules: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    use_rslora: bool = False
    use_dora: bool = False
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
        """Raise `ConfigError` for an unknown kind, or for adapter options without a kind."""
        check_values(self, "adapter.")
        if self.kind is None:
            names = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            if names:
                raise ConfigError(
                    f"adapter.{names[0]} has no effect without adapter.kind. Add --adapter lora."
                )
        elif self.lr_ratio is not None and (self.kind != "lora" or not self.lr_ratio > 0):
            raise ConfigError(
                f"adapter.lr_ratio={self.lr_ratio} is not allowed with "
                f"adapter.kind={self.kind!r} (allowed: numbers above 0, only with "
                "adapter.kind='lora'). Correct the value, or leave it out."
            )

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for the adapter class."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in _RUN_FIELDS]
        values = {name: getattr(self, name) for name in names}
        return {n: v for n, v in values.items() if v is not None and v is not False}


def adapter_defaults(kind: str | None) -> dict[str, Any]:
    """Return the default sizes of an adapter type: the rank of LoRA, the length of a prefix."""
    if kind not in ("lora", "prefix", "soft-prompt"):
        return {}
    return {k: v for k, v in KINDS[kind].defaults.items() if k in ("rank", "length")}


def resolve_adapter(config: Any) -> Any:
    """Return the config of a run with the default sizes of its adapter filled in, for run.toml.

    Raises:
        ConfigError: the adapter has dropout, but the run disables dropout.
    """
    chosen: AdapterConfig = config.adapter
    if chosen.dropout and config.train.disable_dropout:
        raise ConfigError(
            f"adapter.dropout={chosen.dropout} has no effect, because this run disables dropout "
            "(train.disable_dropout=True). Leave adapter.dropout out."
        )
    defaults = adapter_defaults(chosen.kind)
    missing = {name: v for name, v in defaults.items() if getattr(chosen, name) is None}
    if not missing:
        return config
    return dataclasses.replace(config, adapter=dataclasses.replace(chosen, **missing))


def default_rate(kind: str, rank: int | None, full_rate: float = _FULL_RATE) -> float:
    """Return the default learning rate for an adapter type: 1e-4 to 2e-4 for LoRA.

    Args:
        kind: a name in `KINDS`.
        rank: rank of LoRA; above 16 the rate is divided by sqrt(rank / 16), but at least 1e-4.
        full_rate: the task's default learning rate for full fine-tuning. If it is below 2e-5, the
            default of `train conversations`, the result is multiplied by full_rate / 2e-5: with
            1e-6 (preferences, rl), the learning rate of LoRA is 1e-5.
    """
    rate = _RATES.get(kind, 1e-4)
    if kind == "lora":
        rate = float(max(1e-4, 2e-4 * min(1.0, (16 / (rank or 8)) ** 0.5)))
    return float(f"{rate * min(1.0, full_rate / _FULL_RATE):.6g}")  # 1e-5, not 9.999e-6


def attach_adapter(model: nn.Module, config: Any) -> Delta | None:
    """Attach the adapter of a run to its model and return the adapter; None without an adapter.

    Args:
        model: base model, not yet parallelized; may be on the meta device.
        config: the run's config.

    Raises:
        ConfigError: the adapter does not fit the model or another option of the run.
    """
    chosen: AdapterConfig = config.adapter
    if chosen.kind is None:
        return None
    if config.freeze_base:
        raise ConfigError(
            "freeze_base=True has no effect with an adapter, which freezes the base model "
            "anyway. Remove freeze_base."
        )
    kind, options = KINDS[chosen.kind], chosen.options()
    option_names = set(PART_KINDS[kind.kind].options.__dataclass_fields__)
    for name in options:
        if name not in option_names:
            raise ConfigError(
                f"adapter.{name}={options[name]!r} has no effect with "
                f"adapter.kind={chosen.kind!r}. Leave it out."
            )
    saved_modules = list(chosen.modules_to_save)
    if config.new_head:
        owners = (n.rpartition(".")[0] for n in config.model.heads[config.model.head].names)
        saved_modules += [name for name in dict.fromkeys(owners) if name not in saved_modules]
    targets = chosen.target_modules or ((ALL_LINEAR,) if kind is Lora else ())
    if targets:
        if kind in (ParallelAdapter, SoftPrompt):
            raise ConfigError(
                f"adapter.target_modules has no effect with adapter.kind={chosen.kind!r}. Leave it "
                "out."
            )
        options["targets"] = _resolve_targets(model, targets, saved_modules)
    return kind(
        model,
        name=ADAPTER_NAME,
        exclude=chosen.exclude_modules,
        modules_to_save=saved_modules,
        seed=config.seed,
        **options,
    )


def _resolve_targets(
    model: nn.Module, targets: tuple[str, ...], excluded: list[str]
) -> tuple[str, ...]:
    """Replace all-linear with the linear layers of the repeated blocks, except MoE routers.

    Modules in `excluded`, which are trained in full, get no adapter.
    """
    if ALL_LINEAR not in targets:
        return targets
    blocks = tuple(f"{name}." for name in find_repeated_blocks(model))
    names = [
        name
        for name, module in model.named_modules()
        if (name.startswith(blocks) or ".layers." in f".{name}")  # models with a single block
        and linear_sizes(module) is not None
        and name not in excluded
        and name.rpartition(".")[2] not in ROUTERS
    ]
    linear = dict.fromkeys(
        ".".join("*" if part.isdecimal() else part for part in name.split("."))
        for name in keep_called(model, names, drops=True)
    )
    return (*(target for target in targets if target != ALL_LINEAR), *linear)


def log_trained(model: nn.Module, config: Any) -> None:
    """Log the adapter type and the number of trained parameters of a run."""
    if config.adapter.kind is None:
        return
    delta = list_deltas(model)[ADAPTER_NAME]
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    layers = dict.fromkeys(name.rpartition(".")[2] for name in delta.places())
    get_logger().info(
        "training %s%s on %s: %d parameters, %.3f%% of the %d of the model; learning rate %g",
        type(delta).__name__,
        f" of rank {delta.options['rank']}" if "rank" in delta.options else "",
        ", ".join(layers),
        trained,
        100 * trained / max(1, frozen),
        frozen,
        config.train.optim.lr,
    )


def find_base(model: nn.Module, config: Any) -> Base | None:
    """Return the frozen base weights that checkpoints omit and a resumed run loads again.

    Returns None if checkpoints must include them: randomly initialized weights are in no file, and
    compression changes frozen weights.

    Args:
        model: unsharded model with the run's adapter.
        config: the run's config.
    """
    if config.adapter.kind is None or config.init_from is None or has_phase(config):
        return None
    own = {name for delta in list_deltas(model).values() for name in delta.names()}
    frozen = (n for n, p in model.named_parameters() if not p.requires_grad and n not in own)
    return Base(config.init_from, tuple(frozen))


def adapter_stays(model: nn.Module) -> Callable[[str, Tensor], bool]:
    """Return a function (name, tensor) -> True for adapter tensors, which are not streamed."""
    names = delta_tensors(model)
    return lambda name, tensor: name in names


def set_rates(train: TrainConfig, adapter: AdapterConfig, model: nn.Module) -> TrainConfig:
    """Add an optimizer group with its own learning rate for LoRA's B matrices (LoRA+).

    Source: Hayou et al., "LoRA+: Efficient low rank adaptation of large models" (2024).
    """
    if adapter.lr_ratio is None:
        return train
    lr = adapter.lr_ratio * train.optim.lr
    names = list_deltas(model)[ADAPTER_NAME].names()
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    own = [OptimGroup(f"**.{ADAPTER_NAME}.{end}", lr) for end in ends if end.endswith("up")]
    optim = dataclasses.replace(train.optim, groups=(*train.optim.groups, *own))
    return dataclasses.replace(train, optim=optim)


def with_adapter(model_class: type[Model], sizes: Any, config: Any) -> Any:
    """Return a model config that includes the run's adapter, for the layout planner."""
    if config.adapter.kind is None:
        return sizes
    model = model_class.from_config(sizes, device="meta")
    attach_adapter(model, config)
    return model.config
