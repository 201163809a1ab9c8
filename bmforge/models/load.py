"""Loading published weights into a model on any layout, reading only this process's slices.

A plain new model on the CPU takes tensors that lie in the file as it wants them from a map of the
file: nothing is copied, and pages come in when they are first used. All else is read into memory of
the parameters' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.device import reads_are_free
from bmforge.errors import CheckpointError
from bmforge.logging import get_logger
from bmforge.models.config import ModelConfig
from bmforge.models.formats.gguf_blocks import Groups
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import Read, run_reads
from bmforge.models.heads import Head
from bmforge.models.init import init_tensor_, materialize_
from bmforge.models.weights import OWN_PREFIX, WeightRule
from bmforge.nn.packing import QuantSpec
from bmforge.shards import Box, is_streamed, local_box, local_tensor
from bmforge.surgery import match_glob, persistent_tensors

__all__ = ["WeightReader", "find_missing_head", "load_weights_", "settle_tie", "weight_reader"]

# Buffers that old checkpoints carry and nothing needs.
_DEAD = (
    "**.attn.bias",
    "**.attn.masked_bias",
    "**.attention.bias",
    "**.attention.masked_bias",
    "**rotary_emb.inv_freq",
    "**position_ids",
    "**token_type_ids",
)
_LISTED = 20
_COMPARED_ROWS = 1 << 12


def load_weights_(
    model: Any,
    source: str | Path | WeightFiles,
    *,
    device: torch.device | str | None = None,
    new_head: bool = False,
    threads: int | None = None,
) -> Any:
    """Load a Hugging Face checkpoint into a model, reading only this process's slices.

    Args:
        model: a `Model`: plain, on meta, or laid out by `parallelize`.
        source: the directory that holds the weights, or its opened files.
        device: where a model on meta comes to live; None takes its layout's, else the CPU.
        new_head: draw the head's weights (seed 0) where the checkpoint has none that fit.
        threads: that read at a time; None takes as many as torch has.

    Raises:
        CheckpointError: weights missing, unexpected or wrongly shaped, all of them listed; the
            model is not touched then.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    pairs, fresh, beside = _match_sources(model, files, new_head)
    unborn = {name for name, tensor in persistent_tensors(model).items() if tensor.is_meta}
    materialize_(model, device)
    tensors = persistent_tensors(model)
    if any(is_streamed(tensor) for tensor in tensors.values()):
        unborn.clear()  # who streams has little memory, and a map counts as all of the file
    uses = Counter(name for _, name in pairs)
    reads = []
    for rule, name in pairs:
        tensor = tensors[rule.ours]
        if is_streamed(tensor):
            continue
        may_map = rule.ours in unborn and rule.is_renaming and uses[name] == 1
        if not (may_map and _map_(tensor, name, files)):
            reads += _plan_reads(tensor, rule, name, files)
    run_reads(reads, "load weights", threads)
    for name in fresh + beside:
        if name in fresh or name in unborn:
            init_tensor_(model, tensors[name], name, seed=0)
    if fresh:
        get_logger().info("new head, drawn at random: %s", ", ".join(fresh))
    return model


def find_missing_head(model: Any, source: str | Path | WeightFiles) -> list[str]:
    """Return the published names of the head's weights that a checkpoint has not, or not so large.

    Those that it may lack, and a head that is the embedding, are not among them.

    Args:
        model: with the head that is wanted; on meta is enough.
        source: the directory that holds the weights, or its opened files.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    head = model.config.heads[model.config.head]
    tensors, found = persistent_tensors(model), []
    for rule in files.rules_for(model, files.shapes):
        if not _is_in(rule.ours, head) or rule.ours in head.optional:
            continue
        name = _find_name(model, rule, files.shapes)
        need = rule.source_shape(tuple(tensors[rule.ours].shape))
        if name is None or files.shapes[name] != need:
            found.append(rule.theirs)
    return found


class WeightReader:
    """Reads tensors of a model from a checkpoint, whole, when they are asked for.

    Args:
        model: whose tensors they are.
        files: the checkpoint.
        pairs: what each tensor is read by, and from which one in the files.
        fresh: names of tensors that are drawn instead.
        threads: that read at a time; None takes as many as torch has.
    """

    def __init__(
        self,
        model: Any,
        files: WeightFiles,
        pairs: Sequence[tuple[WeightRule, str]],
        fresh: Set[str],
        threads: int | None,
    ) -> None:
        self._model, self._files, self._fresh, self._threads = model, files, fresh, threads
        self._rules: dict[str, list[tuple[WeightRule, str]]] = {}
        for rule, name in pairs:
            self._rules.setdefault(rule.ours, []).append((rule, name))

    def __call__(self, ours: str, target: Tensor) -> None:
        """Fill a contiguous host tensor with the model's of that name."""
        self.read_all({ours: target})

    def read_all(self, targets: Mapping[str, Tensor]) -> None:
        """Fill several, which is quicker than one after the other."""
        for ours in self._fresh & targets.keys():
            init_tensor_(self._model, targets[ours], ours, seed=0)
        reads = [
            read
            for ours, target in targets.items()
            for rule, name in self._rules.get(ours, ())
            for read in _plan_reads(target, rule, name, self._files)
        ]
        run_reads(reads, threads=self._threads)

    def stored_spec(self, ours: str) -> QuantSpec | None:
        """Return how a tensor is stored as integers; None where it is not, or in another layout."""
        rules = self._rules.get(ours, ())
        if any(rule.transpose for rule, _ in rules):
            return None
        specs = {self._files.stored_spec(name) for _, name in rules}
        return next(iter(specs)) if len(specs) == 1 else None

    def read_groups(self, ours: str, box: Box) -> Groups:
        """Return the stored integers of some whole rows of a tensor that has a `stored_spec`.

        Args:
            ours: its name.
            box: where in it; of a stack, rows of one entry.
        """
        for rule, name in self._rules[ours]:
            slices = rule.source_slices(box)
            if slices is not None:
                return self._files.read_groups(name, slices)
        raise AssertionError(f"no rule of {ours} has {box}")

    def read_expert(self, ours: str, expert: int, target: Tensor) -> None:
        """Fill a contiguous host tensor with one entry of a stacked tensor of ours.

        Shape:
            target: that of ours without its first dim
        """
        box = Box((expert,) + (0,) * target.dim(), (1, *target.shape))
        reads = []
        for rule, name in self._rules[ours]:
            slices = rule.source_slices(box)
            if slices is not None:
                view = rule.source_view(rule.target(target[None], box))
                reads.append(self._files.plan_read(name, slices, view))
        run_reads(reads, threads=self._threads)


def weight_reader(
    model: Any,
    source: str | Path | WeightFiles,
    threads: int | None = None,
    new_head: bool = False,
) -> WeightReader:
    """Return what reads a tensor of `model` from a checkpoint, whole, when it is asked for.

    Args:
        model: plain or on meta; what does not fit is found now.
        source: the directory that holds the weights, or its opened files.
        threads: that read at a time; None takes as many as torch has.
        new_head: draw the head's weights (seed 0) where the checkpoint has none that fit.

    Raises:
        CheckpointError: as `load_weights_` does.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    pairs, fresh, beside = _match_sources(model, files, new_head)
    if fresh:
        get_logger().info("new head, drawn at random: %s", ", ".join(fresh))
    return WeightReader(model, files, pairs, {*fresh, *beside}, threads)


def _map_(tensor: Tensor, name: str, files: WeightFiles) -> bool:
    """Let a tensor of ours be the one in the file itself, where it can be; tell whether it is."""
    if not reads_are_free(tensor.data) or files.dtype(name) != tensor.dtype:
        return False
    mapped = files.map_tensor(name)
    if mapped is not None:
        tensor.data = mapped
    return mapped is not None


def _plan_reads(tensor: Tensor, rule: WeightRule, name: str, files: WeightFiles) -> list[Read]:
    """Return what fills this process's part of a tensor; nothing where it has none of it."""
    box = local_box(tensor)
    slices = rule.source_slices(box) if box.numel else None
    if slices is None:
        return []
    target = rule.target(local_tensor(tensor.detach()), box)
    return [files.plan_read(name, slices, rule.source_view(target))]


def _match_sources(
    model: Any, files: WeightFiles, new_head: bool
) -> tuple[list[tuple[WeightRule, str]], list[str], list[str]]:
    """Pair every rule with a name in the files; raise with all that does not fit.

    Returns:
        the pairs; names of the head's tensors that are to be drawn; and those of deltas, of which
        a file of the base has none.
    """
    shapes = {n: s for n, s in files.shapes.items() if not _is_dead(n)}
    here = set(persistent_tensors(model))
    # Of a pipeline each process has a part, but what does not fit must be the same on all.
    model = model.whole()
    tensors = persistent_tensors(model)
    head = model.config.heads[model.config.head]
    pairs, missing, wrong, fresh, beside, replaced = [], [], [], [], [], set()
    for rule in files.rules_for(model, shapes):
        source = _find_name(model, rule, shapes)
        if source is None:
            if _is_of_delta(model, rule.ours):
                beside.append(rule.ours)
            elif rule.ours in head.optional or (new_head and _is_in(rule.ours, head)):
                fresh.append(rule.ours)
            else:
                missing.append(rule.theirs)
            continue
        need = rule.source_shape(tuple(tensors[rule.ours].shape))
        if shapes[source] != need and new_head and _is_in(rule.ours, head):
            fresh.append(rule.ours)  # the stored one is of another number of classes
            replaced.add(source)
            continue
        if shapes[source] != need:
            wrong.append(f"{source} is {shapes[source]}, the config needs {need}")
        pairs.append((rule, source))
    extra = _find_extra(model, files, shapes, {source for _, source in pairs} | replaced)
    if missing or wrong or extra:
        _refuse(model, files, missing, extra, wrong)
    mine = ([name for name in names if name in here] for names in (fresh, beside))
    return [(r, n) for r, n in pairs if r.ours in here], *mine  # type: ignore[return-value]


def _is_of_delta(model: Any, name: str) -> bool:
    """Tell whether a tensor is of a part that came beside a finished model."""
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_delta", False))


def _is_in(name: str, head: Head) -> bool:
    """Tell whether a tensor is the head's, or of what changes have put beside or in its place."""
    own = {ours.rpartition(".")[0] for ours in head.names}
    return name in head.names or any(name.startswith(f"{module}.") for module in own if module)


def _is_dead(name: str) -> bool:
    return not name.startswith(OWN_PREFIX) and any(match_glob(name, glob) for glob in _DEAD)


def _find_name(model: Any, rule: WeightRule, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Return the name under which the files hold what `rule` needs, with any known prefix."""
    bare = rule.theirs.removeprefix(model.hf_prefix)
    head_prefix = model.config.heads[model.config.head].prefix or ""
    bare = bare.removeprefix(head_prefix)
    names = [rule.theirs, bare, model.hf_prefix + bare]
    names += [
        name.removesuffix(new) + old
        for new, old in model.hf_old_names
        for name in names
        if name.endswith(new)
    ]
    return next((name for name in names if name in shapes), None)


def _as_new_name(model: Any, name: str) -> str:
    """Return what newer checkpoints call a tensor."""
    for new, old in model.hf_old_names:
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _find_extra(
    model: Any, files: WeightFiles, shapes: dict[str, tuple[int, ...]], used: set[str]
) -> list[str]:
    """Return names that nothing explains; those of other heads are only told."""
    others = files.head_names(model)
    left_out: list[str] = []
    extra: list[str] = []
    for name in shapes:
        if name in used or _is_copy(model, files, name):
            continue
        known = name in others or _as_new_name(model, name) in others
        is_head = known or any(match_glob(name, glob) for glob in model.hf_unused)
        (left_out if is_head else extra).append(name)
    if left_out and not extra:
        get_logger().info(
            "head %r leaves out of the checkpoint: %s", model.config.head, _list(left_out)
        )
    return extra


def _is_copy(model: Any, files: WeightFiles, name: str) -> bool:
    """True for a tensor stored beside the one it equals, such as a tied head."""
    copies = dict(model.tied_copies())
    head, embed = (_their_name(model, ours) for ours in model.tied_head)
    if head is not None and embed is not None and model.config.tie_word_embeddings:
        copies[head] = embed
    original = copies.get(name)
    if original is None:
        return False
    bare = original.removeprefix(model.hf_prefix)
    source = next((n for n in (original, bare) if n in files.shapes), None)
    return source is not None and _are_equal(files, name, source)


def _their_name(model: Any, ours: str) -> str | None:
    return next((rule.theirs for rule in model.all_rules() if rule.ours == ours), None)


def _are_equal(files: WeightFiles, one: str, other: str) -> bool:
    """Compare two stored tensors, some rows at a time."""
    if files.shapes[one] != files.shapes[other]:
        return False
    rows = files.shapes[one][0]
    return all(
        torch.equal(files.read(one, part), files.read(other, part))
        for start in range(0, rows, _COMPARED_ROWS)
        for part in [(slice(start, min(start + _COMPARED_ROWS, rows)),)]
    )


def settle_tie(model: Any, files: WeightFiles) -> ModelConfig:
    """Return the model's config with `tie_word_embeddings` as the weights are.

    Old configs lack the field or state it wrongly. A head that differs from the embedding is kept;
    one that is not there is the embedding where the config does not say otherwise.
    """
    config = model.config
    head, embed = (_their_name(model, ours) for ours in model.tied_head)
    is_changed = any(OWN_PREFIX + ours in files.shapes for ours in model.tied_head)
    stems = [name.removesuffix("weight") for name in (head, embed) if name is not None]
    is_changed = is_changed or any(f"{stem}packed" in files.shapes for stem in stems)
    if head is None or embed is None or is_changed:
        return config
    bare = embed.removeprefix(model.hf_prefix)
    source = next((n for n in (embed, bare) if n in files.shapes), None)
    if head in files.shapes and source is not None and config.tie_word_embeddings:
        if not _are_equal(files, head, source):
            get_logger().warning(
                "config.json ties %s to the embedding, but the weights differ: both are kept", head
            )
            return config.replace(tie_word_embeddings=False)
    elif head not in files.shapes and "tie_word_embeddings" not in config.raw:
        return config.replace(tie_word_embeddings=True)
    return config


def _refuse(
    model: Any, files: WeightFiles, missing: list[str], extra: list[str], wrong: list[str]
) -> None:
    head = model.config.heads[model.config.head]
    parts = [("missing", sorted(set(missing))), ("unexpected", extra), ("wrong shape", wrong)]
    text = "; ".join(f"{title}: {_list(names)}" for title, names in parts if names)
    hint = ""
    if missing and set(missing) <= set(head.names.values()):
        hint = f" The checkpoint has no head {model.config.head!r}; new_head=True draws a new one."
    raise CheckpointError(
        f"the weights in {str(files.directory)!r} do not fit {type(model).__name__}: {text}.{hint}"
    )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
