"""Tests of saving and loading a family: strict checks, error messages, several formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import AutoModel, Model, load_weights_
from bmforge.testing.tolerance import assert_equal_trees

__all__ = ["FileSuite"]


class FileSuite:
    """Tests with valid and invalid model files; `tiny` is a small model."""

    model_class: ClassVar[type[Model]]

    @pytest.fixture
    def saved(self, tiny: Model, tmp_path: Path) -> Path:
        """Fixture: directory with the saved model `tiny`."""
        tiny.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def _edit_config(self, directory: Path, **fields: Any) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    def _edit_weights(self, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        file = directory / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        file.unlink()
        return file, tensors

    def test_opens_by_model_type(self, tiny: Model, saved: Path) -> None:
        """AutoModel finds the family, and the weights are bit-identical."""
        model = AutoModel.from_pretrained(saved)
        assert type(model) is self.model_class
        assert_equal_trees(model.state_dict(), tiny.state_dict())
        assert not model.training

    def test_unknown_model_type(self, saved: Path) -> None:
        """The error for an unknown model type says how to load the model."""
        self._edit_config(saved, model_type="mamba9")
        with pytest.raises(ConfigError, match=r"mamba9.*architecture of transformers"):
            AutoModel.from_pretrained(saved)

    def test_unknown_fields(self, saved: Path) -> None:
        """Unknown config fields raise an error that lists them; empty or allowed fields do not."""
        self._edit_config(saved, frobnicate=3, second_field="x", off=False, none=None, empty=[])
        with pytest.raises(ConfigError, match=r"frobnicate.*second_field") as caught:
            self.model_class.from_pretrained(saved)
        assert "empty" not in str(caught.value)
        allowed = ("frobnicate", "second_field")
        model = self.model_class.from_pretrained(saved, allow_unknown=allowed)
        assert model.config.to_hf()["frobnicate"] == 3

    def test_damaged_config(self, saved: Path) -> None:
        """The error for an invalid or missing config.json names the file."""
        (saved / "config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"config\.json"):
            AutoModel.from_pretrained(saved)
        (saved / "config.json").unlink()
        for opener in (AutoModel, self.model_class):
            with pytest.raises(ConfigError, match=r"no config\.json"):
                opener.from_pretrained(saved)

    def test_weights_that_do_not_fit(self, tiny: Model, saved: Path) -> None:
        """The error lists missing and unexpected weights, and wrong shapes; nothing is changed."""
        file, tensors = self._edit_weights(saved)
        names = sorted(name for name in tensors if ".0." in name)
        missing, wrong = names[0], names[1]
        del tensors[missing]
        tensors[wrong] = torch.zeros(3, 5, 7)
        tensors["surplus.weight"] = torch.zeros(2)
        save_file(tensors, file, metadata={"format": "pt"})
        before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            load_weights_(tiny, saved)
        for name in (missing, wrong, "surplus.weight", "(3, 5, 7)"):
            assert name in str(caught.value)
        assert_equal_trees(tiny.state_dict(), before)

    @pytest.mark.parametrize("keep", [0, 5, 0.5, 0.99])
    def test_truncated_weights(self, saved: Path, keep: float) -> None:
        """A truncated safetensors file raises an error."""
        file = saved / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            self.model_class.from_pretrained(saved)

    def test_no_weights(self, saved: Path) -> None:
        """The error for a directory without weights names the expected file."""
        (saved / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            self.model_class.from_pretrained(saved)

    def test_save_does_not_overwrite(self, tiny: Model, saved: Path) -> None:
        """An existing model directory is not overwritten without `overwrite=True`."""
        other = self.model_class.from_config(tiny.config, seed=5)
        with pytest.raises(CheckpointError, match="overwrite=True"):
            other.save_pretrained(saved)
        assert_equal_trees(self.model_class.from_pretrained(saved).state_dict(), tiny.state_dict())
        other.save_pretrained(saved, overwrite=True)
        assert_equal_trees(self.model_class.from_pretrained(saved).state_dict(), other.state_dict())
        other.save_pretrained(saved, overwrite=True, max_file_bytes=20_000)
        assert not (saved / "model.safetensors").exists()  # readers would prefer this file

    def test_sharded_files(self, tiny: Model, tmp_path: Path) -> None:
        """Large models are saved as several files with an index."""
        tiny.save_pretrained(tmp_path, max_file_bytes=20_000)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
        assert len(files) > 2
        assert sorted(set(index["weight_map"].values())) == files
        for file in files:
            names = {name for name, where in index["weight_map"].items() if where == file}
            assert set(load_file(tmp_path / file)) == names
        assert_equal_trees(
            self.model_class.from_pretrained(tmp_path).state_dict(), tiny.state_dict()
        )
        (tmp_path / files[1]).unlink()
        with pytest.raises(CheckpointError, match=files[1]):
            self.model_class.from_pretrained(tmp_path)

    def test_overwriting_with_fewer_files(self, tiny: Model, tmp_path: Path) -> None:
        """A single file saved over a sharded model replaces all of it."""
        tiny.save_pretrained(tmp_path, max_file_bytes=20_000)
        other = self.model_class.from_config(tiny.config, seed=5)
        other.save_pretrained(tmp_path, overwrite=True)
        again = self.model_class.from_pretrained(tmp_path)
        assert_equal_trees(again.state_dict(), other.state_dict())

    def test_pickled_weights(self, tiny: Model, saved: Path) -> None:
        """`pytorch_model.bin` is loaded, even with unused buffers, but not if it contains code."""
        file, tensors = self._edit_weights(saved)
        first = next(name for name in tensors if ".0." in name)
        layer = first[: first.index(".0.") + 3]
        tensors[f"{layer}attn.masked_bias"] = torch.tensor(-1e4)
        tensors[f"{layer}self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        torch.save(tensors, saved / "pytorch_model.bin")
        model = self.model_class.from_pretrained(saved)
        assert_equal_trees(model.state_dict(), tiny.state_dict())
        torch.save({"weight": Path("x")}, saved / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            self.model_class.from_pretrained(saved)
        assert not file.exists()

    def test_names_without_prefix(self, tiny: Model, saved: Path) -> None:
        """Checkpoints whose tensor names lack the family's prefix can be loaded too."""
        prefix = self.model_class.hf_prefix
        file, tensors = self._edit_weights(saved)
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        save_file(bare, file, metadata={"format": "pt"})
        model = self.model_class.from_pretrained(saved)
        assert_equal_trees(model.state_dict(), tiny.state_dict())

    def test_wrong_config_class(self) -> None:
        """The config of another family raises an error that names the expected class."""
        with pytest.raises(ConfigError, match=f"{self.model_class.config_class.__name__}.*str"):
            self.model_class.from_config("gpt2-small")  # type: ignore[arg-type]

    def test_unknown_preset(self) -> None:
        """The error for an unknown preset suggests the most similar name."""
        config_class = self.model_class.config_class
        name = next(iter(config_class.presets))
        with pytest.raises(ConfigError, match=f"Did you mean {name!r}"):
            config_class.preset(name + "x")
