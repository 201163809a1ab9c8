"""Public base class of adapters, which adds merging, saving and loading to `base.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import nn

from bmforge.errors import ConfigError
from bmforge.tune.delta.attached import base_weights_of
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.merge import check_attached, merge_, unmerge_

__all__ = ["Delta"]


class Delta(AttachedDelta):
    """An adapter: trained modules attached to a frozen base model, under one name.

    Arguments and attributes are those of `AttachedDelta`. Each method (LoRA, IA3, ...) is a
    subclass, which declares the kind of its modules, their default options and the default targets.
    """

    def attach(self) -> Self:
        """Attach a detached adapter again to the same modules.

        Raises:
            ConfigError: the adapter is already attached, or cannot be combined with the merged
                adapters.
        """
        super().attach()
        if base_weights_of(self.model):
            try:
                check_attached(self.model, self)
            except ConfigError:
                self.detach()
                raise
        return self

    def merge(self, dequantize: bool = False) -> Self:
        """Add the adapter, scaled by its current weight, to the base's weights; detach its modules.

        Args:
            dequantize: True to dequantize torchao's quantized weights first.

        Raises:
            ConfigError: adapters of this kind cannot be merged into weights; a weight is quantized,
                shared or streamed; the adapter is already merged or detached; or it can only be
                merged together with others (`merge_deltas`). Nothing is changed in this case.

        Memory: a copy of the original value of every changed weight, until unmerging.
        """
        merge_(self.model, [self], dequantize)
        return self

    def unmerge(self) -> Self:
        """Remove the adapter from the base's weights and attach its modules again.

        Adapters may be unmerged in any order; after the last one the base is bit-identical to the
        original.

        Raises:
            ConfigError: the adapter is not merged, or can only be unmerged together with others
                (`unmerge_deltas`). Nothing is changed in this case.
        """
        unmerge_(self.model, [self])
        return self

    def save(self, directory: str | Path, **card: Any) -> None:
        """Write the adapter to a directory: PEFT's two files, and a model card.

        Args:
            directory: target directory; created if it does not exist.
            card: fields of the model card: base, data, license, scores, command.
        """
        # The file formats are imported here, because generation with adapters does not need them.
        from bmforge.tune.delta.files import save_delta

        save_delta(self, Path(directory), card)

    @classmethod
    def load(cls, model: nn.Module, directory: str | Path, **options: Any) -> Self:
        """Load a saved adapter of this type and attach it to a model; see `files.load_delta`.

        Raises:
            ConfigError: the directory contains an adapter of another type.
        """
        from bmforge.tune.delta.files import load_delta

        delta = load_delta(model, directory, **options, kind=cls)
        assert isinstance(delta, cls)
        return delta
