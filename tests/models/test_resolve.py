"""What is fetched from the hub, and when: against a hub that is a list of files."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from bmforge.errors import ConfigError
from bmforge.models.resolve import resolve_model

COMMON = ["config.json", "tokenizer_config.json", "chat_template.jinja", "spiece.model"]
COMMON += ["merges.txt", "vocab.json", "vocab.txt"]
INDEX = "model.safetensors.index.json"
Hub = Callable[..., list[str]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return what stands in for the hub: it asks for `org/name` and tells what was fetched."""

    def resolve_from(online: list[str] | None, cached: dict[str, str] | None = None) -> list[str]:
        for name, text in (cached or {}).items():
            (tmp_path / name).write_text(text)
        fetched: list[str] = []

        def list_files(name: str) -> list[str]:
            assert name == "org/name"
            if online is None:
                raise ConnectionError("no network")
            return online

        def info(name: str, **options: Any) -> SimpleNamespace:
            files = [SimpleNamespace(rfilename=file) for file in list_files(name)]
            return SimpleNamespace(siblings=files)

        def download(name: str, **options: Any) -> str:
            if options.get("local_files_only"):
                if cached is None:
                    raise LocalEntryNotFoundError("nothing here")
                return str(tmp_path)
            for file in list_files(name):
                wanted = any(fnmatch.fnmatch(file, p) for p in options["allow_patterns"])
                if wanted and not any(fnmatch.fnmatch(file, p) for p in options["ignore_patterns"]):
                    fetched.append(file)
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "model_info", info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_model("org/name") == tmp_path
        return fetched

    return resolve_from


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "training_args.pt"], ["pytorch_model.bin"]),
        (["cpm_ant.pt"], ["cpm_ant.pt"]),
        (["pytorch_model.bin", "onnx/model.safetensors"], ["pytorch_model.bin"]),
    ],
)
def test_what_is_fetched(weights: list[str], fetched: list[str], hub: Hub) -> None:
    """All of config and tokenizer, the card, which has the license, and the weights once."""
    named = "additional_chat_templates/tool_use.jinja"
    there = [*COMMON, "README.md", *weights, named, "train.py", "onnx/config.json", "onnx/a/b.json"]
    assert hub(there) == [*COMMON, "README.md", *fetched, named]


def test_a_cached_copy_without_all_weights_is_completed(hub: Hub) -> None:
    online = [*COMMON, "model.safetensors"]
    config, index = {"config.json": "{}"}, {INDEX: json.dumps({"weight_map": {"a": "b"}})}
    assert hub(online, config) == online
    assert hub(online, {**config, **index}) == online
    assert hub(online, {**config, **index, "b": ""}) == []
    assert hub(None, {"b": ""}) == []


def test_without_the_hub(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """What is cached is taken, and said to be in part; with nothing there is an error."""
    with pytest.raises(ConfigError, match=r"cannot be reached.*ConnectionError"):
        hub(None)
    assert hub(None, {"config.json": "{}"}) == []


@pytest.mark.parametrize("name", ["kv-plm", "cpm1-large", "cpm2-large"])
def test_names_that_were_never_on_the_hub(name: str) -> None:
    """Nobody is asked; the error says where the weights were, and where to put them."""
    with pytest.raises(ConfigError, match=rf"{name}.*ModelCenter.*pytorch_model\.pt"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["my-int5", "./my-int5", "{}/my-int5", "sub/my-int5"])
@pytest.mark.parametrize("file", ["config.json", "run.toml", "adapter_config.json"])
def test_a_mistyped_directory_names_its_neighbor(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked only for names of the form OWNER/NAME, and only once."""
    asked = list[str]()

    def info(name: str, **options: Any) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    def download(name: str, **options: Any) -> str:
        validate_repo_id(name)
        raise LocalEntryNotFoundError("nothing here")

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    name = name.format(tmp_path)
    near = Path(name).with_name("my-int4")
    for folder, content in ((near, file), (near.with_name("my-int6"), "notes.txt")):
        folder.mkdir(parents=True)
        (folder / content).write_text("{}")
    with pytest.raises(ConfigError) as error:
        resolve_model(name)
    assert f"Did you mean {str(near)!r}?" in str(error.value)
    assert asked == (["sub/my-int5"] if name == "sub/my-int5" else [])


@pytest.mark.parametrize("name", ["runs/mine/export", "org/name/file", "../mine", "/no/model"])
def test_a_path_that_is_no_hub_id_fails_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the cache nor the hub is asked, which can take a minute without a network."""

    def ask(name: str, **options: Any) -> None:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr(huggingface_hub, "model_info", ask)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^no such directory: '{name}' .a model of the hub"):
        resolve_model(name)
