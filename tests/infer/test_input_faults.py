"""Faults in files and prompts: each raises an error of bmforge, and the process continues."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import BmforgeError
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.models.formats.gguf_write import write_gguf

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64},
    **{"num_layers": 2, "num_heads": 2, "max_seq_len": 48},
}
IDS = torch.tensor([[5, 9, 33]])
SAMPLED = {"do_sample": True, "seed": 1}
BARRED = {"bad_words_ids": tuple((i,) for i in range(64))}

PROMPTS: dict[str, Any] = {
    "list": [5, 9],
    "nested list": [[5, 9], [3, 4]],
    "uneven lists": [[5, 9], [3]],
    "text": "abc",
    "texts": ["a", "b"],
    "none": None,
    "number": 5,
    "floats": torch.ones(1, 3),
    "booleans": torch.ones(1, 3, dtype=torch.bool),
    "one dim": torch.tensor([5, 9]),
    "three dims": torch.ones(1, 2, 3, dtype=torch.long),
    "no rows": torch.ones(0, 3, dtype=torch.long),
    "no tokens": torch.ones(1, 0, dtype=torch.long),
    "negative id": torch.tensor([[5, -1]]),
    "id too large": torch.tensor([[5, 64]]),
    "id far too large": torch.tensor([[5, 2**40]]),
    "numpy": IDS.numpy(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"max_new_tokens={v!r}": {"max_new_tokens": v} for v in (-1, 1.5, "3")},
    **{f"temperature={v!r}": {**SAMPLED, "temperature": v} for v in (-1.0, float("nan"), "hot")},
    **{f"top_p={v!r}": {**SAMPLED, "top_p": v} for v in (-0.1, 1.5, float("nan"))},
    **{f"top_k={v!r}": {**SAMPLED, "top_k": v} for v in (-3, 1.5)},
    **{f"num_beams={v!r}": {"num_beams": v} for v in (0, -1, 1.5)},
    **{f"repetition_penalty={v!r}": {"repetition_penalty": v} for v in (-1.0, float("nan"))},
    "unknown option": {"max_tokenz": 3},
    "returns more than beams": {"num_beams": 2, "num_return_sequences": 3},
    "bad word of another vocabulary": {"bad_words_ids": ((99,),)},
    "all barred, greedy": BARRED,
    "all barred, sampled": {**BARRED, **SAMPLED},
    "all barred, beams": {**BARRED, "num_beams": 2},
}
MASKS: dict[str, Any] = {
    "mask of another length": torch.ones(1, 4, dtype=torch.long),
    "mask of more rows": torch.ones(2, 3, dtype=torch.long),
    "mask of zeros": torch.zeros(1, 3, dtype=torch.long),
    "mask with a gap": torch.tensor([[1, 0, 1]]),
    "mask of a list": [[1, 1, 1]],
}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "beams": {"num_beams": 2}}
TENSORS = (
    "embed.weight",
    "layers.1.attn.q_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "norm.weight",
)
CONFIGS: dict[str, Any] = {
    "no JSON": "{",
    "a list": "[]",
    "no model_type": {"model_type": None},
    "unknown model_type": {"model_type": "nothing"},
    "negative width": {"hidden_size": -32},
    "width as text": {"hidden_size": "wide"},
    "no heads": {"num_attention_heads": 0},
    "heads that do not divide": {"num_attention_heads": 5},
    "other width": {"hidden_size": 64},
    "more layers": {"num_hidden_layers": 3},
    "fewer layers": {"num_hidden_layers": 1},
    "unknown activation": {"hidden_act": "magic"},
    "unknown rotary scaling": {"rope_scaling": {"rope_type": "magic", "factor": 2.0}},
}


def build() -> Llama:
    return Llama.from_config(LlamaConfig(**SIZES), seed=1).eval()


@pytest.fixture(scope="module")
def model() -> Llama:
    return build()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    out = tmp_path_factory.mktemp("faults") / "model"
    build().save_pretrained(out)
    return out


@pytest.fixture(autouse=True)
def _goes_on(model: Llama) -> Iterator[None]:
    """After every fault the model answers as before."""
    want = generate(model, IDS, max_new_tokens=4)
    yield
    assert torch.equal(generate(model, IDS, max_new_tokens=4), want)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, model: Llama) -> None:
    with pytest.raises(BmforgeError):
        generate(model, PROMPTS[name], max_new_tokens=2)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, model: Llama) -> None:
    with pytest.raises(BmforgeError):
        generate(model, IDS, **{"max_new_tokens": 2, **OPTIONS[name]})


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, model: Llama) -> None:
    with pytest.raises(BmforgeError):
        generate(model, IDS, MASKS[name], max_new_tokens=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, tensor: str, way: str) -> None:
    broken = build()
    with torch.no_grad():
        broken.get_parameter(tensor)[...] = value
    with pytest.raises(BmforgeError, match=r"finite|NaN"):
        generate(broken, IDS, max_new_tokens=2, **WAYS[way])


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_files_that_are_cut(share: float, directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "m") / "model.safetensors"
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(BmforgeError):
        AutoModel.from_pretrained(path.parent)


@pytest.mark.parametrize("position", [0, 3, 7, 8, 9, 12, 20])
def test_headers_that_are_damaged(position: int, directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "m") / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(BmforgeError):
        AutoModel.from_pretrained(path.parent)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["gone", "directory", "empty", "binary"])
def test_files_that_are_replaced(kind: str, name: str, directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "m") / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind != "gone":
        path.write_bytes(b"" if kind == "empty" else bytes(range(256)))
    with pytest.raises(BmforgeError):
        AutoModel.from_pretrained(path.parent)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "m") / "config.json"
    change = CONFIGS[name]
    raw = change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change)
    path.write_text(raw)
    with pytest.raises(BmforgeError):
        AutoModel.from_pretrained(path.parent)


@contextmanager
def _full_disk(limit_bytes: int) -> Iterator[None]:
    """Context manager: files cannot grow beyond a limit, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "export": lambda source, out: build().save_pretrained(out / "m"),
    "gguf": lambda source, out: write_gguf(build(), out / "m.gguf", "f32"),
    "pack": lambda source, out: Engine(
        source, quantize="int8", config=EngineConfig(max_tokens=32, spill_directory=out)
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_full_disks(name: str, directory: Path, tmp_path: Path) -> None:
    with _full_disk(2000), pytest.raises(BmforgeError, match=r"space|large|write"):
        WRITERS[name](directory, tmp_path)
    files = [
        p for p in tmp_path.rglob("*") if p.is_file() and p.suffix in (".gguf", ".safetensors")
    ]
    assert not files
