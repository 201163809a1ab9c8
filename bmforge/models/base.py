"""What every family inherits: build, initialise, load and save, on any layout.

Building, loading and initialising are separate: ``from_config(cfg, device="meta")``, then
`parallel.parallelize`, then `load_weights_` or `init_weights_`, which touch only this process's
part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import track
from bmforge.models.config import ModelConfig
from bmforge.models.hf_format import WeightFiles, has_weights, plan_files, write_file, write_index
from bmforge.models.init import init_parameter_, materialize_
from bmforge.models.resolve import resolve_model
from bmforge.models.rules import LayoutRules
from bmforge.models.weights import WeightRule, assemble_source, expand_rules, group_by_source
from bmforge.shards import local_box, local_tensor

__all__ = ["Model", "init_weights_", "load_weights_"]

# Buffers that old checkpoints carry and nothing needs.
_DEAD_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".position_ids")
_LISTED = 20


class Model(nn.Module):
    """Base of the families.

    A family sets `config_class`, `weight_rules` (the name map) and, where its checkpoints come with
    and without one, `hf_prefix`.
    """

    config_class: ClassVar[type[ModelConfig]]
    hf_prefix: ClassVar[str] = ""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: Any = config

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
        with torch.device("meta"):
            model = cls(config).to(dtype)
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
        allow_unknown: tuple[str, ...] = (),
    ) -> Self:
        """Open a Hugging Face checkpoint: a directory, or a hub id found in the cache or on the
        hub.

        Args:
            name: directory or hub id.
            dtype: of the parameters, whatever the file's is.
            device: where the model lives.
            allow_unknown: config fields to accept unread.

        Raises:
            ConfigError: no such model, or its config is not understood.
            CheckpointError: weights missing, unexpected, wrongly shaped or damaged; all listed.
        """
        directory = resolve_model(name)
        config = cls.config_class.from_pretrained(directory, allow_unknown)
        model = cls.from_config(config, device="meta", dtype=dtype)
        materialize_(model, device)
        load_weights_(model, directory)
        return model.eval()

    def weight_rules(self) -> list[WeightRule]:
        """Return the name map of this family, with `{i}` for the layer number."""
        raise TypeError(f"{type(self).__name__} defines no weight_rules")

    def layout_rules(self) -> LayoutRules:
        """Return where layouts cut this family."""
        return LayoutRules()

    def init_std(self, name: str) -> float:
        """Return the standard deviation a parameter is drawn with."""
        return self.config.init_std

    def active_rules(self) -> list[WeightRule]:
        """Return the expanded rules of the parameters this model has (a tied one comes once)."""
        present = {name for name, _ in self.named_parameters()}
        rules = expand_rules(self.weight_rules(), self.config.num_layers)
        return [rule for rule in rules if rule.ours in present]

    def save_pretrained(
        self, directory: str | Path, *, overwrite: bool = False, max_file_bytes: int = 4 << 30
    ) -> None:
        """Write ``config.json`` and ``model.safetensors`` under Hugging Face names.

        On a layout every process must call this; each file is gathered on one process, tensor by
        tensor, and written there.

        Args:
            directory: made when it does not exist.
            overwrite: replace weights that are already there.
            max_file_bytes: size above which the weights are divided over several files.

        Raises:
            CheckpointError: the directory already holds weights and `overwrite` is off.
        """
        out = Path(directory)
        if has_weights(out) and not overwrite:
            raise CheckpointError(
                f"{str(out)!r} already holds a model. Name another, or pass overwrite=True."
            )
        out.mkdir(parents=True, exist_ok=True)
        parameters = dict(self.named_parameters())
        groups = group_by_source(self.active_rules())
        sizes = {
            name: sum(parameters[r.ours].numel() * parameters[r.ours].element_size() for r in rules)
            for name, rules in groups.items()
        }
        files = plan_files(sizes, max_file_bytes)
        rank, world = _rank_and_world()
        for number, (file, names) in enumerate(files.items()):
            mine = number % world == rank
            tensors = {}
            for name in names:
                tensor = assemble_source(groups[name], lambda n: _whole(parameters[n]))
                if mine:
                    tensors[name] = tensor.cpu()
            if mine:
                write_file(out / file, tensors)
        if rank == 0:
            dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
            config = {**self.config.to_hf(), "dtype": dtype}
            config.pop("torch_dtype", None)
            (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_index(out, files, sum(sizes.values()))
        if world > 1:
            dist.barrier()


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def init_weights_(
    model: Model, seed: int = 0, *, device: torch.device | str | None = None
) -> Model:
    """Draw every weight of a model, with the same result on every layout; return the model.

    Args:
        model: plain, on meta, or laid out by `parallelize`.
        seed: decides all of them.
        device: where a model on meta comes to live; None takes its layout's, else the CPU.
    """
    materialize_(model, device)
    for name, parameter in model.named_parameters():
        init_parameter_(parameter, name, model.init_std(name), seed)
    return model


def load_weights_(
    model: Model, directory: str | Path, *, device: torch.device | str | None = None
) -> Model:
    """Load a Hugging Face checkpoint into a model, reading only this process's slices.

    Args:
        model: plain, on meta, or laid out by `parallelize`.
        directory: holds the weights.
        device: where a model on meta comes to live; None takes its layout's, else the CPU.

    Raises:
        CheckpointError: weights missing, unexpected or wrongly shaped, all of them listed; the
            model is not touched then.
    """
    files = WeightFiles(directory)
    parameters = dict(model.named_parameters())
    sources = _match_sources(model, files)
    materialize_(model, device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for rule, source in track(list(sources), "load weights"):
            box = local_box(parameters[rule.ours])
            if box.numel:
                piece = rule.from_source(files.read(source, rule.source_slices(box)))
                local_tensor(parameters[rule.ours]).copy_(piece)
    return model


def _match_sources(model: Model, files: WeightFiles) -> list[tuple[WeightRule, str]]:
    """Pair every rule with a name in the files; raise with all that does not fit."""
    shapes = {n: s for n, s in files.shapes.items() if not f".{n}".endswith(_DEAD_SUFFIXES)}
    parameters = dict(model.named_parameters())
    pairs, missing, wrong = [], [], []
    for rule in model.active_rules():
        bare = rule.theirs.removeprefix(model.hf_prefix)
        source = next((n for n in (rule.theirs, bare) if n in shapes), None)
        if source is None:
            missing.append(rule.theirs)
            continue
        need = rule.source_shape(tuple(parameters[rule.ours].shape))
        if shapes[source] != need:
            wrong.append(f"{source} is {shapes[source]}, the config needs {need}")
        pairs.append((rule, source))
    used = {source for _, source in pairs}
    extra = [n for n in shapes if n not in used and not _is_tied_copy(model, files, n)]
    if missing or wrong or extra:
        text = [
            _list_names("missing", sorted(set(missing))),
            _list_names("unexpected", extra),
            _list_names("wrong shape", wrong),
        ]
        raise CheckpointError(
            f"the weights in {str(files.directory)!r} do not fit {type(model).__name__}: "
            + "; ".join(t for t in text if t)
        )
    return pairs


def _is_tied_copy(model: Model, files: WeightFiles, name: str) -> bool:
    """True for a head stored beside the embedding it equals."""
    if name != "lm_head.weight" or not model.config.tie_word_embeddings:
        return False
    embed = next(r.theirs for r in model.active_rules() if r.ours == "embed.weight")
    source = embed if embed in files.shapes else embed.removeprefix(model.hf_prefix)
    return source in files.shapes and torch.equal(files.read(name), files.read(source))


def _list_names(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{title}: {', '.join(names[:_LISTED])}{more}"
