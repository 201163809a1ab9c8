"""Image folders: read as transformers reads them, in an order of their own, and learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import settings
from transformers import ViTForImageClassification, ViTImageProcessor

from bmforge.cli import main
from bmforge.errors import BmforgeError, ConfigError, DataError
from bmforge.models import AutoModel, ViT, ViTConfig
from bmforge.parallel import Layout
from bmforge.recipes import find_recipe
from bmforge.recipes.images import ImagesConfig, train_images
from bmforge.recipes.inputs.examples import ExampleLoader, iter_held_out
from bmforge.recipes.inputs.image_folder import ImageConfig, ImageFolder, save_preprocessing
from bmforge.testing import assert_close, run_distributed

Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
datasets = pytest.importorskip("sklearn.datasets", reason="needs the extra tasks")

SIZES = ViTConfig(
    hidden_size=48, num_layers=2, num_heads=4, image_size=8, patch_size=2, num_channels=1
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's 1,797 written digits: the last 397 are held out."""
    root, found = tmp_path_factory.mktemp("digits"), datasets.load_digits()
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        folder = root / ("train" if number < 1400 else "dev") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Colourful images of several sizes and modes."""
    rng = np.random.default_rng(0)
    for name, size, mode in (("a/0.png", (31, 20), "RGB"), ("a/1.png", (16, 40), "RGBA")):
        write_image(tmp_path / "photos" / name, rng, size, mode)
    write_image(tmp_path / "photos" / "b" / "0.png", rng, (24, 24), "L")
    (tmp_path / "photos" / "b" / "notes.txt").write_text("no image")
    return tmp_path / "photos"


def write_image(path: Path, rng: Any, size: tuple[int, int], mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = rng.integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    Image.fromarray(values.squeeze(), mode).save(path)


def test_digits_are_learned(digits: Path, tmp_path: Path) -> None:
    """Most held-out digits are told, and transformers' model tells the same ones."""
    run_dir = tmp_path / "run"
    options = f"""
        --run-dir {run_dir} --data.paths {digits / "train"} --data.validation {digits / "dev"}
        --data.mirror False --data.smallest-crop 0.9 --data.global-batch-size 50
        --data.micro-batch-size 50 --train.steps 100 --train.optim.name muon --train.optim.lr 0.005
        --model.hidden-size 48 --model.num-layers 2 --model.num-heads 4 --model.image-size 8
        --model.patch-size 4 --model.num-channels 1 --model.init-std 0.1
    """
    assert main(["train", "images", "--model", "vit", *options.split()]) == 0
    told = json.loads((run_dir / "results.json").read_text())["accuracy"]["model"]
    assert told > 0.85  # one of ten is chance
    theirs = ViTForImageClassification.from_pretrained(run_dir / "export").eval()
    assert theirs.config.id2label == {n: str(n) for n in range(10)}
    folder = ImageFolder(str(digits / "dev"), ImageConfig(), AutoModel.from_pretrained(
        run_dir / "export").config, learns=False)  # fmt: skip
    right = 0
    for batch in iter_held_out(folder, ImageConfig(micro_batch_size=397)):
        with torch.no_grad():
            chosen = theirs(batch["pixel_values"]).logits.argmax(-1)
        right = int((chosen == batch["labels"]).sum())
    assert told == right / 397


def test_images_are_read_as_transformers_reads_them(photos: Path, tmp_path: Path) -> None:
    """Resizing and normalising; the processor is opened from what a run writes."""
    model = ViTConfig(hidden_size=32, num_layers=1, num_heads=2, image_size=12, patch_size=4)
    config = ImageConfig(paths=(str(photos),))
    save_preprocessing(tmp_path, config, model)
    processor = ViTImageProcessor.from_pretrained(tmp_path)
    folder = ImageFolder(str(photos), config, model, learns=False)
    assert folder.classes == ["a", "b"]
    assert [folder.label(n) for n in range(len(folder))] == [0, 0, 1]
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        image = Image.open(path).convert("RGB")
        want = processor(image, return_tensors="np")["pixel_values"][0]
        ours = folder.make(number, ())["pixel_values"]
        # The processor may resize with another library, which rounds to other whole values.
        assert np.abs(ours - want).max() <= 1.01 / 127.5


def test_what_is_drawn_follows_from_seed_and_sample_number(photos: Path) -> None:
    """Two ranks read together what one reads, in every epoch other parts of the images."""
    model = ViTConfig(hidden_size=32, num_layers=1, num_heads=2, image_size=8, patch_size=4)
    config = ImageConfig(
        paths=(str(photos),), global_batch_size=2, micro_batch_size=1, smallest_crop=0.3
    )
    folder = ImageFolder(str(photos), config, model)
    alone = ExampleLoader(folder, config)
    steps = [torch.cat([b["pixel_values"] for b in next(alone)]) for _ in range(6)]
    pair = [ExampleLoader(folder, config, rank, 2) for rank in range(2)]
    for step in steps[:3]:
        halves = [next(loader)[0]["pixel_values"] for loader in pair]
        assert torch.equal(torch.cat(halves), step)
    later = ExampleLoader(folder, config)
    later.load_state_dict(pair[0].state_dict())
    assert torch.equal(torch.cat([b["pixel_values"] for b in next(later)]), steps[3])
    rows = torch.cat(steps)  # four epochs of three images
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)
    whole = ImageFolder(str(photos), config, model, learns=False)
    assert np.array_equal(
        whole.make(0, ("a",))["pixel_values"], whole.make(0, ("b",))["pixel_values"]
    )


def test_a_part_is_within_its_bounds(tmp_path: Path) -> None:
    """Every pixel of a part is one of the image's, half of the parts are mirrored."""
    ramp = np.tile(np.arange(64, dtype=np.uint8) * 4, (64, 1))
    (tmp_path / "c").mkdir()
    Image.fromarray(ramp).save(tmp_path / "c" / "0.png")
    model = ViTConfig(
        hidden_size=32, num_layers=1, num_heads=2, image_size=16, patch_size=4, num_channels=1
    )
    folder = ImageFolder(str(tmp_path), ImageConfig(smallest_crop=0.25), model)
    rising, widths = 0, []
    for number in range(64):
        row = folder.make(0, ("s", number))["pixel_values"][0, 0]
        rising += int(row[0] < row[-1])
        widths.append(abs(float(row[-1] - row[0])) * 127.5 / 4)
    assert 16 < rising < 48
    # A quarter to all of the area, 3:4 to 4:3: from 0.43 of the width, less a pixel at each side.
    assert 0.35 * 64 < min(widths) < 0.6 * 64
    assert 0.85 * 64 < max(widths) <= 64


def run_split(digits: Path, run_dir: Path, layout: Layout) -> float:
    config = find_recipe("images", "vit").config(
        run_dir=run_dir,
        model=SIZES,
        layout=layout,
        train=settings(3),
        data=ImageConfig(
            paths=(str(digits / "train"),),
            validation=(str(digits / "dev"),),
            validation_batches=2,
            global_batch_size=12,
            micro_batch_size=4,
        ),
        export=False,
    )
    result = train_images(config)
    assert result.evaluation is not None
    return result.evaluation.loss


def test_two_processes_learn_the_same(digits: Path, tmp_path: Path) -> None:
    alone = run_split(digits, tmp_path / "one", Layout())
    both = run_distributed(run_split, 2, digits, tmp_path / "two", Layout(zero=2))
    assert_close(torch.tensor(both), torch.tensor([alone] * 2))


def test_a_published_classifier_gets_other_classes(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where it is asked for; what is not the head's is the checkpoint's."""
    start = ViT.from_config(SIZES.replace(num_labels=7))
    start.save_pretrained(tmp_path / "start")
    options = ["--model", str(tmp_path / "start"), "--data.paths", str(digits / "train")]
    options += ["--run-dir", str(tmp_path / "run"), "--train.steps", "1"]
    assert main(["train", "images", *options]) == 2
    said = capsys.readouterr().err
    assert "no head 'image_classification'" in said
    assert "--new-head" in said
    rate = ["--train.optim.lr", "1e-9", "--train.optim.weight-decay", "0"]
    assert main(["train", "images", *options, *rate, "--new-head"]) == 0
    made = AutoModel.from_pretrained(tmp_path / "run" / "export")
    assert made.config.num_labels == 10
    assert_close(made.embed_positions, start.embed_positions, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"paths": ()}, ConfigError, "must be one folder"),
        ({"paths": ("{}/nowhere",)}, DataError, "is not a folder"),
        ({"paths": ("{}/a",)}, DataError, "no images in subfolders"),
        ({"paths": ("{}",), "smallest_crop": 0.0}, ConfigError, "smallest_crop=0.0"),
        ({"paths": ("{}",), "validation": ("{}/..",)}, DataError, "training data does not have"),
    ],
)
def test_bad_input(
    data: dict[str, Any], error: type[BmforgeError], text: str, photos: Path, tmp_path: Path
) -> None:
    filled = {
        name: tuple(v.format(photos) for v in value) if isinstance(value, tuple) else value
        for name, value in data.items()
    }
    kind = find_recipe("images", "vit").config
    config = kind(run_dir=tmp_path / "run", model=SIZES, data=ImageConfig(**filled))
    assert isinstance(config, ImagesConfig)
    with pytest.raises(error, match=text):
        train_images(config)


def test_a_damaged_image_is_named(photos: Path) -> None:
    (photos / "b" / "2.png").write_bytes(b"\x89PNG damaged")
    folder = ImageFolder(str(photos), ImageConfig(), SIZES)
    with pytest.raises(DataError, match=r"2\.png.*cannot be read as an image"):
        folder.make(3, ())
