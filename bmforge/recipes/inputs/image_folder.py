"""Reads the images of a folder, whose subfolders are classes, as input of a ViT.

An image is converted to RGB (or gray), resized to a square, and normalized from 0..255 to -1..1, as
transformers' ViTImageProcessor does. Training uses a random resized crop and mirrors half of the
images; the random choices depend only on the seed and the global sample index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.example import fingerprint_of
from bmforge.data.load.order import derive_key, draw_below
from bmforge.errors import ConfigError, DataError, MissingDependencyError
from bmforge.files import replace_file
from bmforge.value_ranges import check_values

__all__ = ["ImageConfig", "ImageFolder", "stack_images", "save_preprocessing"]

Seed = tuple[int | str, ...]
_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
_DRAWN_FROM = 1 << 30
_TRIES = 10
_MODES = {1: "L", 3: "RGB"}


@dataclass(kw_only=True)
class ImageConfig:
    """Data options of a run that trains on images.

    Args:
        paths: one folder with a subfolder of training images for each class.
        validation: one folder with a subfolder of held-out images for each class.
        global_batch_size: number of images per optimizer step, over all processes.
        micro_batch_size: number of images per forward pass of one process.
        grad_accum_steps: number of gradient accumulation steps; sets global_batch_size to
            micro_batch_size x grad_accum_steps x processes / (tp x pp x cp) (if None: derived from
            global_batch_size).
        smallest_crop: minimum area of a random training crop as a fraction of the image, above 0;
            the default is that of ViT's training, and 1 disables cropping.
        mirror: flip half of the training images horizontally.
        mean: mean that normalization subtracts from the values of every channel, which range from 0
            to 1.
        std: standard deviation by which normalization divides the values of every channel.
        validation_batches: maximum number of micro-batches of an evaluation (if None: all).
        seed: random seed of the sample order and of the training crops.
    """

    paths: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    global_batch_size: int = 32
    micro_batch_size: int = 8
    grad_accum_steps: int | None = None
    smallest_crop: float = 0.08
    mirror: bool = True
    mean: float = 0.5
    std: float = 0.5
    validation_batches: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or unless there is exactly one folder."""
        check_values(self, "data.")
        if len(self.paths) != 1 or len(self.validation) > 1:
            raise ConfigError(
                f"data.paths={list(self.paths)} must be one folder with a subfolder of "
                "images per class, and data.validation at most one such folder."
            )


class ImageFolder:
    """Images of a folder with their classes; an `ExampleSource`.

    Args:
        folder: folder whose subfolders are the classes, in the order of their names.
        config: preprocessing options.
        model: a ViT's config, with the image size and the number of channels.
        classes: required names of the subfolders (default: any names).
        learns: True to apply random crops and flips, for training.

    Raises:
        DataError: the folder does not exist, has no images, or has classes other than `classes`.
    """

    def __init__(
        self,
        folder: str,
        config: ImageConfig,
        model: Any,
        classes: Sequence[str] | None = None,
        learns: bool = True,
    ) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise DataError(
                f"{folder!r} is not a folder. Use a folder with one subfolder per class."
            )
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        if classes is not None and set(self.classes) - set(classes):
            raise DataError(
                f"{folder!r} has the classes {sorted(set(self.classes) - set(classes))}, which "
                "the training data does not have. Remove these subfolders."
            )
        self.classes = list(classes or self.classes)
        self._files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in (sorted((root / name).iterdir()) if (root / name).is_dir() else ())
            if path.suffix.lower() in _ENDINGS
        ]
        if not self._files:
            raise DataError(
                f"{folder!r} has no images in subfolders (needed: one subfolder per class; file "
                f"endings: {', '.join(sorted(_ENDINGS))})."
            )
        self._config, self._model, self._learns = config, model, learns
        self.columns: Mapping[str, tuple[int, int]] = {
            "pixel_values": (model.image_size, 0),
            "labels": (1, IGNORE_INDEX),
        }
        listing = [(str(path.relative_to(root)), path.stat().st_size) for path, _ in self._files]
        looks = config.smallest_crop, config.mirror, config.mean, config.std
        self.fingerprint = fingerprint_of(listing, looks, model.image_size, model.num_channels)

    def __len__(self) -> int:
        return len(self._files)

    def label(self, index: int) -> int:
        """Return the class index of the image at `index`."""
        return self._files[index][1]

    def make(self, index: int, seed: Seed) -> Any:
        """Return the preprocessed image at `index`; `seed` determines its random crop."""
        path, label = self._files[index]
        image = _open_image(path, self._model.num_channels)
        if self._learns:
            image = _random_crop(image, self._config, seed)
        pixels = _to_values(image, self._model.image_size, self._config)
        return {"pixel_values": pixels, "labels": [label]}

    def collate(self, rows: Sequence[Any]) -> Batch:
        """Stack images into a batch."""
        return stack_images(rows)


def stack_images(rows: Sequence[Any]) -> Batch:
    """Stack images and their class indices into a batch.

    Shape:
        pixel_values (B, C, H, W), float32; labels (B,), int64
    """
    pixels = torch.from_numpy(np.stack([row["pixel_values"] for row in rows]))
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"][0] for row in rows])}


def save_preprocessing(directory: Path, config: ImageConfig, model: Any) -> None:
    """Write ``preprocessor_config.json`` with this run's preprocessing for transformers."""
    size = model.image_size
    values = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [config.mean] * model.num_channels,
        "image_std": [config.std] * model.num_channels,
    }
    replace_file(directory / "preprocessor_config.json", json.dumps(values, indent=2) + "\n")


def _open_image(path: Path, channels: int) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingDependencyError("Pillow", "images", "reading images") from error
    if channels not in _MODES:
        raise ConfigError(
            f"model.num_channels={channels} is not supported for images (supported: 1 and 3)."
        )
    try:
        with Image.open(path) as image:
            return image.convert(_MODES[channels])
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(
            f"{str(path)!r} cannot be read as an image ({error}). Replace or remove the file."
        ) from error


def _random_crop(image: Any, config: ImageConfig, seed: Seed) -> Any:
    """Crop a random area with a random aspect ratio; mirror the image with probability 1/2.

    Settings of `config` disable cropping or mirroring.
    Source: Szegedy et al., "Going Deeper with Convolutions" (2014), section 6: the area is from
    `smallest_crop` to the whole image, the aspect ratio from 3:4 to 4:3.
    """
    from PIL import Image

    def drawn(*what: int | str) -> float:
        return draw_below(_DRAWN_FROM, derive_key(*seed, *what)) / _DRAWN_FROM

    width, height = image.size
    for number in range(_TRIES if config.smallest_crop < 1 else 0):
        share = config.smallest_crop + (1 - config.smallest_crop) * drawn("area", number)
        form = math.exp((2 * drawn("form", number) - 1) * math.log(4 / 3))
        wide = round(math.sqrt(share * width * height * form))
        high = round(math.sqrt(share * width * height / form))
        if 0 < wide <= width and 0 < high <= height:
            left = draw_below(width - wide + 1, derive_key(*seed, "left"))
            top = draw_below(height - high + 1, derive_key(*seed, "top"))
            image = image.crop((left, top, left + wide, top + high))
            break
    if config.mirror and drawn("mirror") < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def _to_values(image: Any, size: int, config: ImageConfig) -> NDArray[np.float32]:
    """Resize an image (bilinear, like transformers' ViT processor) and normalize its values.

    Shape:
        returns (C, size, size)
    """
    from PIL import Image

    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.float32)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.ascontiguousarray((pixels / 255 - config.mean) / config.std, dtype=np.float32)
