"""Every metadata key of a GGUF file changes our numbers as llama.cpp's, or is refused by name.

Rotary scaling is compared with llama.cpp's formula (``ggml_rope_yarn`` of ggml-cpu), written here a
second time; every other key of the `gguf` package, and invented ones, must be refused where they
are not read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import build_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmforge.errors import BmforgeError, CheckpointError, ConfigError, DataError
from bmforge.gguf_header import read_gguf_header
from bmforge.models import AutoModel
from bmforge.models.formats.gguf_config import read_gguf_config
from bmforge.models.formats.gguf_write import write_gguf
from bmforge.nn.position import rope_table
from bmforge.tokenizers import AutoTokenizer

gguf = pytest.importorskip("gguf")
R = "llama.rope.scaling."
HEAD_DIM, THETA, LENGTH = 16, 10000.0, 64
_CORPUS = {"a": 0, "b": 1, "ab": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


def _write(folder: Path, keys: dict[str, Any]) -> Path:
    path = folder / "a.gguf"
    write_gguf(build_model("llama"), path, "f32", tokens={**NO_TOKENS, **keys}, overwrite=True)
    return path


NO_TOKENS = {"tokenizer.ggml.model": "none"}


def _llama_cpp(keys: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of positions 0 to 63, as llama.cpp computes them."""
    kind = keys.get(R + "type", "linear")
    factor = keys.get(R + "factor", 1.0) or 1.0
    scale = 1.0 if kind == "none" else 1.0 / factor
    extrapolates = float(kind == "yarn")
    original = keys.get(R + "original_context_length") or LENGTH
    pairs = np.arange(HEAD_DIM // 2)
    angles = np.arange(LENGTH)[:, None] * THETA ** (-2.0 * pairs / HEAD_DIM)
    amplitude = keys.get(R + "attn_factor", 1.0)
    inner = angles * scale
    if extrapolates:

        def place(turns: float) -> float:
            turned = math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))
            return HEAD_DIM * turned

        low = max(0.0, math.floor(place(keys.get(R + "yarn_beta_fast", 32.0))))
        high = min(HEAD_DIM - 1.0, math.ceil(place(keys.get(R + "yarn_beta_slow", 1.0))))
        ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        inner = inner * (1 - ramp) + angles * ramp
        amplitude *= 1 + 0.1 * math.log(1 / scale)
    return np.cos(inner) * amplitude, np.sin(inner) * amplitude


ROPE_KEYS = st.fixed_dictionaries(
    {},
    optional={
        R + "type": st.sampled_from(["none", "linear", "yarn"]),
        R + "factor": st.sampled_from([1.0, 2.0, 4.0]),
        R + "original_context_length": st.sampled_from([16, 32]),
        R + "attn_factor": st.sampled_from([1.0, 2.0]),
        R + "yarn_beta_fast": st.sampled_from([16.0, 32.0]),
        R + "yarn_beta_slow": st.sampled_from([1.0, 2.0]),
        R + "yarn_ext_factor": st.sampled_from([1.0, 0.0]),
        R + "yarn_attn_factor": st.sampled_from([1.0, 1.5]),
        R + "yarn_log_multiplier": st.sampled_from([0.0, 0.1]),
        R + "finetuned": st.booleans(),
        R + "foo": st.just(1.0),
    },
)
_CHANGES = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}


def _check_rope(folder: Path, keys: dict[str, Any]) -> None:
    path = _write(folder, keys)
    kind = keys.get(R + "type", "linear" if R + "factor" in keys else "none")
    unread = R + "foo" in keys or any(keys.get(R + n, v) != v for n, v in _CHANGES.items())
    unread |= kind != "yarn" and keys.get(R + "attn_factor", 1.0) != 1.0
    if unread:
        with pytest.raises(ConfigError, match=r"llama\.rope\.scaling\."):
            AutoModel.from_pretrained(path)
        return
    model: Any = AutoModel.from_pretrained(path)
    positions = torch.arange(LENGTH)[None]
    table = rope_table(model.spec.rope, positions, torch.float64)
    for ours, theirs in zip(table, _llama_cpp({R + "type": kind, **keys}), strict=True):
        got = ours.reshape(LENGTH, -1)[:, : HEAD_DIM // 2].double().numpy()
        np.testing.assert_allclose(got, theirs, rtol=1e-4, atol=2e-5)


QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUICK
@given(keys=ROPE_KEYS)
def test_rotary_scaling_is_llama_cpps_or_refused(folder: Path, keys: dict[str, Any]) -> None:
    _check_rope(folder, keys)


@pytest.mark.long
@settings(QUICK, max_examples=1500)
@given(keys=ROPE_KEYS)
def test_rotary_scaling_is_llama_cpps_or_refused_long(folder: Path, keys: dict[str, Any]) -> None:
    _check_rope(folder, keys)


def _package_keys() -> list[str]:
    """Return every key of an architecture that the package knows."""
    names = []
    for group in vars(gguf.Keys).values():
        texts = (
            [v for v in vars(group).values() if isinstance(v, str)] if type(group) is type else []
        )
        names += [text.replace("{arch}", "llama") for text in texts if text.startswith("{arch}.")]
    return sorted(name for name in set(names) if "{" not in name)


def test_keys_of_the_package_are_read_or_refused(folder: Path) -> None:
    """An odd value for a key either shows in the config, or is refused with the key's name."""
    base = _write(folder, {})
    present = read_gguf_header(base).metadata
    plain = read_gguf_config(base)
    silent = []
    for key in _package_keys():
        if key in present:
            continue
        try:
            raw = read_gguf_config(_write(folder, {key: 3}))
        except BmforgeError:
            continue
        if raw == plain:
            silent.append(key.removeprefix("llama."))
    assert set(silent) <= WITHOUT_EFFECT, set(silent) - WITHOUT_EFFECT


# Keys that say what tensors say, or that llama.cpp's Llama does not read without others.
WITHOUT_EFFECT = {
    *("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow",),
}


@QUICK
@given(name=st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,2}", fullmatch=True))
def test_invented_keys_are_refused(folder: Path, name: str) -> None:
    key = f"llama.{name}"
    if name in WITHOUT_EFFECT or key in _package_keys():
        return
    with pytest.raises(BmforgeError, match=name.replace(".", r"\.")):
        AutoModel.from_pretrained(_write(folder, {key: 3}))


def _tokenizer_file(folder: Path, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(folder / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(keys.pop("pre", "gpt-2"))
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1])
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return folder / "t.gguf"


@pytest.mark.parametrize("key", ["add_sep_token", "treat_whitespace_as_suffix", "invented"])
def test_tokenizer_keys_are_refused(folder: Path, key: str) -> None:
    with pytest.raises(DataError, match=f"tokenizer.ggml.{key}=True"):
        AutoTokenizer.from_pretrained(_tokenizer_file(folder, **{key: True}))


TEXTS = ["It's 12345 o'clock, ISN'T it?", "HelloWORLDs  a\n\n b\t7", "naïve café 漢字 x=1//2 \r\n"]
# Words of the published tokenizers' expressions, by tiktoken's and Mistral's reference tokenizers.
WORDS = {
    "gpt-4o": ["Hello", "WORLDs", " ", " a", "\n\n", " b", "\t", "7"],
    "tekken": ["Hello", "WORLDs", " ", " a", "\n\n", " b", "\t", "7"],
    "llama3": ["HelloWORLDs", " ", " a", "\n\n", " b", "\t", "7"],
    "smollm": ["HelloWORLDs", " ", " a", "\n\n", " b", "\t", "7"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_pre_tokenizers_cut_as_published(folder: Path, pre: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer_file(folder, pre=pre))
    from tokenizers import Tokenizer

    cut = Tokenizer.from_str(tokenizer.definition).pre_tokenizer.pre_tokenize_str(TEXTS[1])
    assert [TEXTS[1][a:b] for _, (a, b) in cut] == WORDS[pre]


def test_split_files_are_read_as_one(folder: Path) -> None:
    """The package writes the parts; the tensors are those of the whole file."""
    whole = _write(folder, {})
    want = AutoModel.from_pretrained(whole).state_dict()
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "split.gguf", "llama", split_max_tensors=5)
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            value = entry.contents()
            add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool}
            add.get(type(value), writer.add_uint32)(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.glob("split-*.gguf"))
    assert len(parts) > 2
    found = AutoModel.from_pretrained(parts[0]).state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    with pytest.raises(CheckpointError, match="Use the path of the first part"):
        AutoModel.from_pretrained(parts[1])
    parts[-1].unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        AutoModel.from_pretrained(parts[0])
