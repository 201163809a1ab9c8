"""GGUF files: stored values against `gguf`'s own, models there and back, and damaged files."""

from __future__ import annotations

import re
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bmforge.errors import BmforgeError, CheckpointError, ConfigError
from bmforge.gguf_header import BLOCKS, read_gguf_header
from bmforge.models import (
    CPM1,
    EVA,
    OPT,
    T5,
    AutoModel,
    Bert,
    Llama,
    LlamaConfig,
    Qwen3Moe,
)
from bmforge.models.formats.gguf import GgufFile
from bmforge.models.formats.gguf_blocks import FLOAT_KINDS, SPECS, read_values, unpack_blocks
from bmforge.models.formats.gguf_write import write_gguf
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.surgery import persistent_tensors

sys.path.insert(0, str(Path(__file__).parent))

from gguf_models import GGUF_MODELS, build_model
from tiny_models import TINY

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def reference(stored: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Return random bytes whose scales are numbers."""
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 256, (rows, blocks * BLOCKS[kind][1]), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        while (bad := ~np.isfinite(reference(stored, kind)).all(1)).any():
            stored[bad] = rng.integers(0, 256, (bad.sum(), stored.shape[1]), dtype=np.uint8)
    return stored


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(3))
    given = {"input_ids": ids}
    if isinstance(model, T5):
        given["decoder_input_ids"] = ids[:, :4]
    with torch.no_grad():
        out = model(**given)
    return out.last_hidden_state if isinstance(model, Bert) else out.logits


@pytest.mark.parametrize("kind", BLOCKS)
def test_stored_values_are_the_reference_bit_for_bit(kind):
    stored = random_blocks(kind, rows=9, blocks=5 if kind not in FLOAT_KINDS else 64)
    want = reference(stored, kind)
    got = read_values(kind, torch.from_numpy(stored)).float().numpy()
    assert want.view(np.uint32).tolist() == got.view(np.uint32).tolist()


@pytest.mark.parametrize("kind", SPECS)
def test_groups_have_few_bits(kind):
    stored = torch.from_numpy(random_blocks(kind, rows=3, blocks=4))
    groups = unpack_blocks(kind, stored)
    least, most = {"Q8": (-128, 127), "Q6": (-32, 31)}.get(kind[:2], (-16, 31))
    assert groups.integers.dtype == torch.int8
    assert least <= int(groups.integers.min()) < int(groups.integers.max()) <= most
    assert groups.integers.shape[2] == (16 if kind == "Q6_K" else 32)


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **metadata: Any) -> Path:
    """Write a Llama's file with such tensors, with the package."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_uint32(f"llama.{key}", value)
    for name, (stored, kind) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_any_slice_is_read(tmp_path, kind):
    """Of stacked matrices, in any dtype, rows across the bounds of what is read at a time."""
    width = 256 if kind != "F16" else 64
    stored = random_blocks(kind, rows=6 * 40, blocks=width // BLOCKS[kind][0])
    path = write_tensors(tmp_path / "a.gguf", {"x": (stored.reshape(6, 40, -1), kind)})
    whole = torch.from_numpy(reference(stored, kind)).view(6, 40, width)
    files = WeightFiles(path)
    assert files.shapes == {"x": (6, 40, width)}
    for place in ((slice(1, 4),), (slice(0, 6), slice(3, 40)), (slice(2, 3), slice(5, 6))):
        assert torch.equal(files.read("x", place).float(), whole[place])
    inner = (slice(1, 3), slice(7, 39), slice(17, 50))
    half = torch.empty(2, 32, 33, dtype=torch.bfloat16)
    files.plan_read("x", inner, half).run()
    assert torch.equal(half, whole[inner].to(torch.bfloat16))


def test_groups_of_a_slice(tmp_path):
    stored = random_blocks("Q4_0", rows=12, blocks=2)
    path = write_tensors(tmp_path / "a.gguf", {"x": (stored.reshape(3, 4, -1), "Q4_0")})
    file = GgufFile(path)
    groups = file.read_groups("x", (slice(1, 3), slice(2, 4), slice(0, 64)))
    want = reference(stored, "Q4_0").reshape(3, 4, 64)[1:, 2:].reshape(4, 64)
    assert np.array_equal(groups.values().numpy(), want)
    assert file.kind("x") == "Q4_0"
    assert file.dtype("x") == torch.float32


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_there_and_back(tmp_path, name):
    """The config, all weights in the file's dtype, and the logits."""
    model = build_model(name)
    mine = persistent_tensors(model)
    for kind, dtype in DTYPES.items():
        back = AutoModel.from_pretrained(
            write_gguf(model, tmp_path / f"{kind}.gguf", kind), dtype=dtype
        )
        theirs = persistent_tensors(back)
        assert type(back) is type(model)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[n].to(dtype), theirs[n]) for n in mine)
        if kind == "f32":
            want, got = logits_of(model), logits_of(back)
            # GGUF keeps the rounded factors of what is scaled.
            is_rounded = "scaled" in name or name == "minicpm4"
            close = {"rtol": 0, "atol": 1e-5 if is_rounded else 0}
            torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_tensors_have_the_names_of_the_package(tmp_path, name):
    """Every tensor is in the `gguf` package's list of the architecture's tensors."""
    header = read_gguf_header(write_gguf(build_model(name), tmp_path / "a.gguf", "f32"))
    kind = header.metadata["general.architecture"]
    kinds = {value: arch for arch, value in gguf.MODEL_ARCH_NAMES.items()}
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kinds[kind]]}
    names = {re.sub(r"\bblk\.\d+\.", "blk.{bid}.", tensor) for tensor in header.tensors}
    assert {tensor.rpartition(".")[0] for tensor in names} <= known


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt2", "t5"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantised_is_what_the_package_stores(tmp_path, name, kind):
    """Every value we read back is the package's quantised one, in its order of rows."""
    model = build_model(name)
    path = write_gguf(model, tmp_path / "a.gguf", kind)
    header, file = read_gguf_header(path), GgufFile(path)
    data = path.read_bytes()
    kinds = {place.kind for place in header.tensors.values()}
    assert kinds <= {"F32", "F16", "Q8_0", kind.upper()}
    assert kind.upper() in kinds
    sized = {"values": 0, "bytes": 0}
    for tensor, place in header.tensors.items():
        sized["values"] += int(np.prod(place.shape))
        sized["bytes"] += place.size
        if place.kind not in ("Q8_0", "Q4_0"):
            continue
        stored = np.frombuffer(data, np.uint8, place.size, place.start)
        want = reference(stored.reshape(-1, BLOCKS[place.kind][1]), place.kind)
        whole = tuple(slice(0, size) for size in file.shapes[tensor])
        got = torch.empty(file.shapes[tensor])
        file.fill(tensor, whole, got)
        assert np.sort(want.ravel()).tolist() == got.flatten().sort().values.tolist()
    back = AutoModel.from_pretrained(path)
    for ours, tensor in persistent_tensors(model).items():
        error = (persistent_tensors(back)[ours] - tensor).abs().max()
        assert error <= tensor.abs().max() / (120 if kind == "q8_0" else 7)


def test_unaligned_widths_are_halves(tmp_path):
    """Rows that blocks do not divide are stored as fp16."""
    config = LlamaConfig(
        **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_layers": 1},
        num_heads=4,
    )
    path = write_gguf(Llama.from_config(config), tmp_path / "a.gguf", "q8_0")
    kinds = {place.kind for place in read_gguf_header(path).tensors.values()}
    assert kinds == {"F32", "F16"}


def test_refuses_to_write(tmp_path):
    """Other families, what GGUF cannot say, and what would be lost: named, and nothing is left."""
    llama = build_model("llama")
    out = tmp_path / "a.gguf"
    for family, name in ((OPT, "opt"), (CPM1, "cpm1"), (EVA, "eva")):
        with pytest.raises(ConfigError, match=f"{family.__name__}.*is not supported in GGUF"):
            write_gguf(family.from_config(TINY[name]), out)
    for config, said in (
        (llama.config.replace(activation="gelu"), "activation='gelu'"),
        (TINY["qwen"], "window=3"),
        (GGUF_MODELS["qwen3moe"].replace(normalize_weights=False), "normalize_weights=False"),
        (GGUF_MODELS["qwen3moe"].replace(dense_layers=[1]), "dense_layers"),
        (GGUF_MODELS["t5"].replace(scale_head=False), "scale_head=False"),
    ):
        family = next(
            f
            for f in (Llama, Qwen3Moe, T5, type(build_model("qwen2")))
            if f.config_class is type(config)
        )
        with pytest.raises(ConfigError, match=said):
            write_gguf(family.from_config(config), out)
    with pytest.raises(ConfigError, match="head='sequence_classification'"):
        write_gguf(Llama.from_config(llama.config.replace(head="sequence_classification")), out)
    with pytest.raises(ConfigError, match=r"must have the extension \.gguf"):
        write_gguf(llama, tmp_path / "a")
    with pytest.raises(ConfigError, match="supported: f32"):
        write_gguf(llama, out, "q2_k")
    with torch.no_grad():
        llama.layers["0"].mlp.up_proj.weight[3, 3] = 1e6
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight has values that F16"):
        write_gguf(llama, out, "f16")
    assert list(tmp_path.iterdir()) == []
    write_gguf(llama, out, "bf16")
    with pytest.raises(CheckpointError, match="already exists"):
        write_gguf(llama, out)
    write_gguf(llama, out, "f32", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_bert_leaves_its_head_out(tmp_path):
    model = Bert.from_config(GGUF_MODELS["bert"].replace(head="masked_lm"))
    path = write_gguf(model, tmp_path / "a.gguf", "f32")
    back = AutoModel.from_pretrained(path, head="masked_lm", new_head=True)
    assert torch.equal(back.layers["1"].attn.q_proj.weight, model.layers["1"].attn.q_proj.weight)
    with pytest.raises(CheckpointError, match=r"missing: bmforge\.mlm_head\.decoder\.bias"):
        AutoModel.from_pretrained(path, head="masked_lm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A small file with every kind of metadata."""
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    tokens = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(61)],
        "tokenizer.ggml.scores": [-float(i) for i in range(61)],
        "tokenizer.ggml.token_type": [1] * 61,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_gguf(build_model("mixtral"), path, "q8_0", tokens=tokens)
    return path.read_bytes()


def open_all(path: Path) -> None:
    """Read a file as far as it goes; what is wrong is said by an error of ours."""
    try:
        AutoModel.from_pretrained(path)
    except BmforgeError:
        return


def peak_of_opening(path: Path) -> int:
    """Return the most bytes that Python held while a file was opened, which is then removed."""
    tracemalloc.start()
    open_all(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    path.unlink()
    return peak


def header_bytes(data: bytes, path: Path) -> int:
    path.write_bytes(data)
    return min(place.start for place in read_gguf_header(path).tensors.values())


def test_cut_short_anywhere(tmp_path, whole):
    path = tmp_path / "a.gguf"
    end = header_bytes(whole, path)
    for length in (*range(end), *range(end, len(whole) - 64, 4999)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_gguf_header(path)


FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@FUZZ
@given(st.data())
def test_changed_bytes(tmp_path_factory, whole, data):
    """Any bytes of the header changed: an error of ours, or a model, in little memory."""
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    end = header_bytes(whole, path)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    assert peak_of_opening(path) < 64 * len(whole)


@FUZZ
@given(st.data())
def test_lying_numbers(tmp_path_factory, whole, data):
    """Counts, lengths, offsets: any eight bytes of the header become an edge."""
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    end = header_bytes(whole, path)
    at = data.draw(st.integers(4, end - 9))
    number = data.draw(
        st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
    )
    path.write_bytes(whole[:at] + struct.pack("<Q", number) + whole[at + 8 :])
    assert peak_of_opening(path) < 64 * len(whole)


@FUZZ
@given(st.binary(max_size=200))
@example(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63))
@example(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 2**60) + b"a" * 20)
def test_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + data if not data.startswith(b"GGUF") else data)
    with pytest.raises(CheckpointError):
        GgufFile(path)


def lying(entries: bytes, tensors: int, count: int, tail: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + entries + tail


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def one_tensor(kind: int = 0, dims: tuple[int, ...] = (32,), start: int = 0) -> bytes:
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    return text("x") + struct.pack("<I", len(dims)) + shape + struct.pack("<IQ", kind, start)


ARRAY_OF_ARRAYS = text("a") + struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ", 9, 1) * 40
ALIGNED_BY_3 = text("general.alignment") + struct.pack("<II", 4, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGUX" + bytes(60), "does not begin"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (lying(b"", 0, 2**61, bytes(40)), "2305843009213693952 metadata entries"),
        (lying(b"", 2**61, 0, bytes(40)), "2305843009213693952 tensors"),
        (lying(struct.pack("<Q", 2**62), 0, 1, bytes(60)), "characters"),
        (lying(text("a") + struct.pack("<I", 77), 0, 1, bytes(60)), "unknown type 77"),
        (lying(text("a") + struct.pack("<IIQ", 9, 4, 2**62), 0, 1, bytes(60)), "numbers in 'a'"),
        (lying(text("a") + struct.pack("<IIQ", 9, 8, 2**40), 0, 1, bytes(60)), "texts in 'a'"),
        (lying(ARRAY_OF_ARRAYS, 0, 1), "array of arrays"),
        (lying(ALIGNED_BY_3, 0, 1), "general.alignment=3"),
        (
            lying((text("a") + struct.pack("<IB", 0, 1)) * 2, 0, 2, bytes(60)),
            "metadata key 'a' occurs twice",
        ),
        (lying(text("a")[:8] + b"\xff" + bytes(60), 0, 1), "not UTF-8"),
        (lying(one_tensor(), 1, 0), "ends at byte"),
        (lying(one_tensor(dims=(2**63, 2**63, 2**63)), 1, 0, bytes(99)), "ends at byte"),
        (lying(one_tensor(dims=(0,)), 1, 0, bytes(99)), "not a multiple of the block size of F32"),
        (
            lying(one_tensor(kind=8, dims=(31,)), 1, 0, bytes(99)),
            r"not a multiple of the block size of Q8_0 \(32 values\)",
        ),
        (lying(one_tensor(kind=9), 1, 0, bytes(99)), "unsupported type Q8_1"),
        (lying(one_tensor(kind=99), 1, 0, bytes(99)), "unsupported type number 99"),
        (lying(one_tensor(start=7), 1, 0, bytes(999)), "begins at byte 7"),
        (lying(one_tensor(start=2**63), 1, 0, bytes(999)), "ends at byte"),
        (lying(one_tensor(dims=(1,) * 5), 1, 0, bytes(999)), "has 5 dims"),
        (lying(one_tensor() * 2, 2, 0, bytes(999)), "tensor 'x' occurs twice"),
    ],
)
def test_lies_are_named(tmp_path, data, said):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        read_gguf_header(path)


def test_models_that_are_not_read_are_named(tmp_path):
    """Another architecture, metadata that may change numbers, layers and widths that lie."""
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        step()
    with pytest.raises(CheckpointError, match="unsupported architecture 'mamba'"):
        AutoModel.from_pretrained(path)
    write_gguf(build_model("llama"), path, "f32", overwrite=True)
    data = path.read_bytes()
    for key, value, said in (
        ("llama.block_count", 2**31 - 1, "block_count=2147483647"),
        ("llama.embedding_length", 2**31 - 1, "token_embd.weight has the size 2147483647"),
        ("llama.attention.head_count", 0, "number of attention heads: 0"),
        ("llama.attention.head_count", 2**31 - 1, "damaged"),
        ("llama.attention.head_count", 2**31, "attention.head_count=2147483648"),
    ):
        place = data.index(key.encode()) + len(key) + 4
        path.write_bytes(data[:place] + struct.pack("<I", value) + data[place + 4 :])
        with pytest.raises(CheckpointError, match=said):
            AutoModel.from_pretrained(path)
    tokens = {"tokenizer.ggml.model": "none", "llama.attention.sliding_window": 4}
    write_gguf(build_model("llama"), path, "f32", tokens=tokens, overwrite=True)
    with pytest.raises(ConfigError, match="sliding_window=4"):
        AutoModel.from_pretrained(path)
    allowed = ("llama.attention.sliding_window",)
    assert AutoModel.from_pretrained(path, allow_unknown=allowed).config.num_layers == 2


def test_a_file_that_changes_is_not_read_on(tmp_path):
    path = write_gguf(build_model("llama"), tmp_path / "a.gguf", "q8_0")
    files = WeightFiles(path)
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(CheckpointError, match="was changed while"):
        files.read("token_embd.weight")
