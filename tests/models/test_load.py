"""Reading and writing weight files: right bytes, little memory, damage seen, nothing shared."""

from __future__ import annotations

import copy
import gc
import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bmforge.errors import CheckpointError
from bmforge.host_memory import resident_bytes
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, load_weights_
from bmforge.models.formats import safe_file
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import Read, SafeFile, run_reads, write_file
from bmforge.parallel import Layout, init_distributed, parallelize
from bmforge.shards import local_box, local_tensor
from bmforge.testing import assert_close, assert_equal_trees, run_distributed

SHAPES = {"matrix": (37, 23), "cube": (5, 7, 11), "vector": (101,), "scalar": (), "empty": (0, 3)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
)
BIG = LlamaConfig(
    vocab_size=16384, hidden_size=512, intermediate_size=1024, num_layers=4, num_heads=8
)
needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file by safetensors itself with tensors of every shape and dtype."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.{dtype}": (torch.rand(shape, generator=generator) * 200).to(dtype)
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors", tensors


@pytest.mark.parametrize("chunk_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_slices_are_those_of_safetensors(stored, chunk_bytes, threads, monkeypatch) -> None:
    """Any slice, in any dtype and order of dims, into memory that is there."""
    file, tensors = stored
    monkeypatch.setattr(safe_file, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(1)
    reader, reads, pairs = SafeFile(file), [], []
    for name, tensor in tensors.items():
        for _ in range(3):
            ends = [sorted(torch.randint(n + 1, (2,), generator=generator)) for n in tensor.shape]
            slices = tuple(slice(int(a), int(b)) for a, b in ends)
            want = tensor[slices]
            for target in (torch.zeros_like(want), torch.zeros(want.shape, dtype=torch.float64)):
                reads.append(Read(reader, name, slices, target))
                pairs.append((target, want))
            if want.dim() == 2:
                turned = torch.zeros(want.shape[::-1], dtype=want.dtype)
                reads.append(Read(reader, name, slices, turned.t()))
                pairs.append((turned.t(), want))
    run_reads(reads)
    for target, want in pairs:
        assert torch.equal(target, want.to(target.dtype))


def test_whole_tensors(stored) -> None:
    """`WeightFiles` reads every tensor, or some rows of it."""
    file, tensors = stored
    files = WeightFiles(file.parent)
    assert files.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    assert_equal_trees({name: files.read(name) for name in tensors}, tensors)
    rows = (slice(3, 20),)
    assert torch.equal(
        files.read("matrix.torch.float16", rows), tensors["matrix.torch.float16"][3:20]
    )


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    """A dtype that only newer files have is refused when it is wanted, not before."""
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")
    reader = SafeFile(file)
    with pytest.raises(CheckpointError, match="F8_E8M0"):
        reader.dtype("a")


def test_written_files_are_safetensors(stored, tmp_path: Path) -> None:
    """safetensors reads what we write, and its data begins on a cache line."""
    _, tensors = stored
    tensors = {name: t.t() if t.dim() == 2 else t for name, t in tensors.items()}
    file = tmp_path / "written.safetensors"
    write_file(file, tensors)
    assert_equal_trees(load_file(file), tensors)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert (8 + length) % 64 == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", file.name]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small Llama's directory."""
    Llama.from_config(CONFIG).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_writing_to_a_model_does_not_touch_its_file(saved: Path) -> None:
    """Its parameters can be written to; the file, and other models of it, stay as they are."""
    before = (saved / "model.safetensors").read_bytes()
    files = WeightFiles(saved)
    first = load_weights_(Llama.from_config(CONFIG, device="meta"), files)
    second = load_weights_(Llama.from_config(CONFIG, device="meta"), files)
    third = Llama.from_pretrained(saved)
    state = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    assert (saved / "model.safetensors").read_bytes() == before
    assert_equal_trees(second.state_dict(), state)
    assert_equal_trees(third.state_dict(), state)
    assert torch.equal(first.norm.weight, state["norm.weight"] + 1)
    first.save_pretrained(saved, overwrite=True)
    assert_equal_trees(second.state_dict(), state)
    assert_equal_trees(Llama.from_pretrained(saved).state_dict(), first.state_dict())


def test_a_parameter_has_a_storage_of_its_own(saved: Path) -> None:
    """A copy or a pickle of one layer holds that layer only."""
    model = Llama.from_pretrained(saved)
    weight = model.layers["0"].attn.k_proj.weight
    assert weight.untyped_storage().nbytes() == weight.numel() * 4
    buffer = io.BytesIO()
    torch.save(weight.detach(), buffer)
    assert buffer.getbuffer().nbytes < 2 * weight.numel() * 4 + 4096
    assert torch.equal(copy.deepcopy(model).layers["0"].attn.k_proj.weight, weight)


@pytest.mark.parametrize("length", [0, 8, 4096])
def test_a_model_outlives_a_file_that_is_cut(saved: Path, length: int) -> None:
    """In a process of its own, which a signal would end."""
    program = (
        "import os, sys, torch\n"
        "from bmforge.models import AutoModel\n"
        "model = AutoModel.from_pretrained(sys.argv[1]).eval()\n"
        "os.truncate(sys.argv[1] + '/model.safetensors', int(sys.argv[2]))\n"
        "print(float(model(torch.tensor([[1, 2, 3]])).logits.abs().sum()))\n"
    )
    want = Llama.from_pretrained(saved).eval()(torch.tensor([[1, 2, 3]])).logits.abs().sum()
    run = subprocess.run(
        [sys.executable, "-c", program, str(saved), str(length)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-500:]
    assert float(run.stdout) == pytest.approx(float(want))


def test_a_model_outlives_its_directory(saved: Path) -> None:
    model = Llama.from_pretrained(saved)
    want = load_file(saved / "model.safetensors")["model.norm.weight"]
    for file in saved.iterdir():
        file.unlink()
    assert torch.equal(model.norm.weight, want)


def test_a_real_model_is_filled_in_place(saved: Path) -> None:
    """Who holds a parameter, an optimizer say, holds it after loading."""
    model = Llama.from_config(CONFIG, seed=7)
    addresses = [p.data_ptr() for p in model.parameters()]
    load_weights_(model, saved)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert_equal_trees(model.state_dict(), Llama.from_pretrained(saved).state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype(saved: Path, dtype: torch.dtype) -> None:
    """Every weight is rounded once, as `Tensor.to` does."""
    got = Llama.from_pretrained(saved, dtype=dtype).state_dict()
    want = {name: t.to(dtype) for name, t in Llama.from_pretrained(saved).state_dict().items()}
    assert_equal_trees(got, want)


def test_transposed_and_fused_weights(tmp_path: Path, monkeypatch) -> None:
    """GPT-2's fused and transposed weights, in chunks of a few rows."""
    config = GPT2Config(vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=24)
    model = GPT2.from_config(config)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(safe_file, "_CHUNK_BYTES", 100)
    assert_equal_trees(GPT2.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_a_file_changed_while_it_is_read(saved: Path) -> None:
    """Another file under the same name, or a cut one, is noticed."""
    files = WeightFiles(saved)
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-4])
    for model in (Llama.from_config(CONFIG, device="meta"), Llama.from_config(CONFIG)):
        with pytest.raises(CheckpointError, match="was changed"):
            load_weights_(model, files)


@pytest.mark.parametrize("place", ["offsets", "shape", "length", "json"])
def test_a_tampered_header(saved: Path, place: str) -> None:
    """Headers that contradict themselves are refused before anything is read."""
    file = saved / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    if place == "offsets":
        header["model.norm.weight"]["data_offsets"] = [0, 96]
    elif place == "shape":
        header["model.norm.weight"]["shape"] = [25]
    text = b"{" if place == "json" else json.dumps(header).encode()
    size = (1 << 60) if place == "length" else len(text)
    file.unlink()
    file.write_bytes(struct.pack("<Q", size) + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Llama.from_pretrained(saved)


def test_pickles_from_before_torch_1_6(saved: Path) -> None:
    """`pytorch_model.bin` that is no zip archive cannot be mapped, and opens."""
    tensors = load_file(saved / "model.safetensors")
    want = Llama.from_pretrained(saved).state_dict()
    (saved / "model.safetensors").unlink()
    torch.save(tensors, saved / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_equal_trees(Llama.from_pretrained(saved).state_dict(), want)


def _peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(t.split()[1]) for t in text.splitlines() if t.startswith("VmHWM:")) * 1024


def load_on_a_layout(
    directory: Path, config: LlamaConfig, zero: int
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Load a laid-out model; return this rank's part, and bytes read, held and taken at most."""
    init_distributed()
    read = 0
    fill = SafeFile.fill

    def counting_fill(self, name, slices, target) -> None:
        nonlocal read
        read += target.numel() * target.element_size()
        fill(self, name, slices, target)

    model = Llama.from_config(config, device="meta")
    parallelize(model, Layout(zero=zero))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    SafeFile.fill = counting_fill  # type: ignore[method-assign]
    try:
        load_weights_(model, directory)
    finally:
        SafeFile.fill = fill  # type: ignore[method-assign]
    mine = {name: local_tensor(p.detach()) for name, p in model.named_parameters()}
    held = sum(t.numel() * t.element_size() for t in mine.values())
    for name, parameter in model.named_parameters():
        assert tuple(mine[name].shape) == local_box(parameter).lengths
        assert mine[name].data_ptr() % 64 == 0
    sizes = {"read": read, "held": held, "peak": _peak_bytes() - before}
    boxes = {n: local_box(p).slices for n, p in model.named_parameters()}
    whole = Llama.from_pretrained(directory).state_dict()
    assert_equal_trees(mine, {name: whole[name][boxes[name]] for name in mine})
    return {}, sizes


@needs_proc
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_rank_reads_only_its_part(saved: Path, zero: int) -> None:
    """On three ranks, whose parts are uneven, into aligned memory of its own."""
    total = sum(p.numel() * 4 for p in Llama.from_config(CONFIG, device="meta").parameters())
    sizes = [found for _, found in run_distributed(load_on_a_layout, 3, saved, CONFIG, zero)]
    held = [one["held"] for one in sizes]
    assert all(h == total for h in held) if zero == 0 else sum(held) == total
    if zero:
        assert [one["read"] for one in sizes] == held


@needs_proc
def test_a_rank_holds_its_shard_and_one_tensor_at_most(tmp_path: Path) -> None:
    """Peak memory of loading under ZeRO-3 is the shard and less than the largest tensor."""
    Llama.from_config(BIG).save_pretrained(tmp_path)
    largest = BIG.vocab_size * BIG.hidden_size * 4
    for _, sizes in run_distributed(load_on_a_layout, 2, tmp_path, BIG, 3):
        assert sizes["peak"] < sizes["held"] + largest


@needs_proc
def test_peak_memory_of_another_dtype(tmp_path: Path) -> None:
    """Opening in bf16 what is stored in fp32 takes the weights and little more."""
    Llama.from_config(BIG).save_pretrained(tmp_path)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    model = Llama.from_pretrained(tmp_path, dtype=torch.bfloat16)
    weights = sum(p.numel() * 2 for p in model.parameters())
    assert _peak_bytes() - before < weights + (32 << 20)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": {', '{"weight_map": {"a": 3}}'])
def test_a_broken_index(text: str, tmp_path: Path) -> None:
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"{name}' is damaged.*'weight_map'"):
            WeightFiles(tmp_path)
        (tmp_path / name).unlink()


def test_the_padding_token_is_the_configs(saved: Path) -> None:
    """Where it was changed after opening, what config.json said of it is past."""
    config = LlamaConfig.from_hf(
        {**CONFIG.to_hf(), "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 3}
    )
    ids = torch.tensor([[1, 2, 3, 5, 5]])
    for padding, last in ((3, 4), (5, 2), (None, 4)):
        model = Llama.from_config(config.replace(pad_token_id=padding))
        logits = [model(ids).logits, model(ids, (torch.arange(5) <= last)[None].long()).logits]
        assert_close(logits[0], logits[1])
