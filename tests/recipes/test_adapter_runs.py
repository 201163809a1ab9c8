"""Runs that train an adapter on conversations: base storage, exports, merging, every command."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_traits import TEMPLATES, write_bpe
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from small_runs import write_jsonl

from bmforge.cli import main
from bmforge.data.sources.conversations import read_conversations
from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.recipes.adapter_dirs import find_source, merge_adapter
from bmforge.recipes.adapters import default_rate
from bmforge.recipes.inputs.conversation_rows import encode_turns, render_conversation
from bmforge.testing import assert_close
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.train import read_metrics
from bmforge.train.trainer import Trainer
from bmforge.tune.delta import load_delta

TEMPLATE = TEMPLATES["thoughts of the last answer alone"]
IDS = torch.tensor([[5, 9, 30, 77, 101, 8]])


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with tokenizer, hybrid template and generation config."""
    return write_qwen3(tmp_path_factory.mktemp(request.param) / "Qwen3-tiny", request.param)


def write_qwen3(folder: Path, dtype: str = "float32") -> Path:
    write_bpe(folder, TEMPLATE)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.top_p = 0.8
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    return folder


def write_chats(path: Path) -> Path:
    words = ["hi", "yes", "no", "abc", "well", "ok", "so", "bye"]
    return write_jsonl(
        path,
        [
            {"messages": [
                {"role": "user", "content": w}, {"role": "assistant", "content": w},
                {"role": "user", "content": "again"}, {"role": "assistant", "content": f"{w} {w}"},
            ]}
            for w in words
        ],
    )  # fmt: skip


def train(base: Path, folder: Path, *more: str, name: str = "run", steps: int = 3) -> Path:
    chats = write_chats(folder / "chats.jsonl")
    run = folder / name
    arguments = [
        *("train", "conversations", "--model", str(base), "--data", str(chats)),
        *("--seq-len", "128", "--run-dir", str(run), *more),
    ]
    for option, value in (("adapter", "lora"), ("batch-size", "2"), ("micro-batch-size", "1")):
        if f"--{option}" not in more:
            arguments += [f"--{option}", value]
    if "--epochs" not in more:
        arguments += ["--steps", str(steps)]
    assert main(arguments) == 0
    return run


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]


def test_exports_open_everywhere(base: Path, tmp_path: Path) -> None:
    """PEFT opens the adapter as it is; the merged export has the same logits and base dtype."""
    run = train(base, tmp_path, "--lr", "0.01", steps=8)
    export = run / "export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert tokenizer.chat_template == TEMPLATE
    assert json.loads((export / "generation_config.json").read_text())["top_p"] == 0.8
    theirs = AutoPeftModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    ours = AutoModel.from_pretrained(base)
    before = ours(IDS).logits
    load_delta(ours, export)
    with torch.no_grad():
        want = theirs(IDS).logits
        assert_close(ours(IDS).logits, want, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(before, want, atol=1e-3)
        merged = merge_adapter(run, tmp_path / "merged")
        raw = transformers.AutoModelForCausalLM.from_pretrained(merged)
        dtype = transformers.AutoConfig.from_pretrained(base).dtype
        assert raw.dtype == dtype
        exact = dtype == torch.float32
        got = raw.float()(IDS).logits
        assert_close(got, want, rtol=1e-4 if exact else 0.1, atol=1e-5 if exact else 0.05)
        assert_close(AutoModel.from_pretrained(merged)(IDS).logits, got, rtol=1e-4, atol=1e-5)
    has = {file.name for file in base.iterdir()} | {"LICENSE.json", "README.md"}
    assert {file.name for file in merged.iterdir()} == has


def test_a_merged_export_keeps_no_adapter(base: Path, tmp_path: Path) -> None:
    run = train(base, tmp_path, "--lr", "0.01")
    assert (run / "export" / "adapter_config.json").exists()
    (run / "export" / "model-00001-of-00002.safetensors").write_text("stale")
    train(base, tmp_path, "--lr", "0.01", "--adapter.merge")
    names = {file.name for file in (run / "export").iterdir()}
    assert {"model.safetensors", "generation_config.json", "chat_template.jinja"} <= names
    assert not {name for name in names if "adapter" in name or "00001" in name}
    assert not list(run.glob(".export*"))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_frozen_weights_are_stored_in_the_precision(
    base: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is that of a base stored in fp32, which blocks cast in every step."""
    dtypes: dict[str, Counter[Any]] = {}
    fit = Trainer.fit

    def watch(self: Trainer, **options: Any) -> None:
        state = Counter((p.requires_grad, p.dtype) for p in self.model.parameters())
        dtypes[self.run_dir.name] = state
        fit(self, **options)

    monkeypatch.setattr(Trainer, "fit", watch)
    one = train(base, tmp_path, "--precision", precision, name="stored", steps=4)
    other = ("--precision", precision, "--base-dtype", "fp32")
    two = train(base, tmp_path, *other, name="fp32", steps=4)
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {dtype for (trains, dtype) in dtypes["stored"] if trains} == {torch.float32}
    assert {dtype for (trains, dtype) in dtypes["stored"] if not trains} == {half}
    assert {dtype for (trains, dtype) in dtypes["fp32"] if not trains} == {torch.float32}
    assert losses(one) == pytest.approx(losses(two), rel=1e-6)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_bases_learn_and_merge_onto_the_16_bit_one(
    base: Path, tmp_path: Path, scheme: str
) -> None:
    run = train(base, tmp_path, "--base-dtype", scheme, "--lr", "0.02", steps=12)
    plain = train(base, tmp_path, "--lr", "0.02", name="plain", steps=12)
    assert losses(run)[-1] < losses(run)[0] - 0.2
    assert losses(run) == pytest.approx(losses(plain), rel=0.02 if scheme == "int8" else 0.2)
    merged = merge_adapter(run / "export", tmp_path / "merged")
    ours = AutoModel.from_pretrained(base)
    load_delta(ours, run / "export")
    with torch.no_grad():
        got = AutoModel.from_pretrained(merged)(IDS).logits
        assert_close(got, ours(IDS).logits, rtol=0.1, atol=0.05)
    assert main(["evaluate", str(run), "--text", str(write_text(tmp_path))]) == 0


def write_text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("A list is a sequence.\n" * 4)
    return folder / "notes.txt"


def test_a_quantized_run_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    more = ("--base-dtype", "int4", "--train.schedule.kind", "constant")
    whole = train(base, tmp_path, *more, name="whole", steps=4)
    train(base, tmp_path, *more, name="parts", steps=2)
    parts = train(base, tmp_path, *more, name="parts", steps=4)
    assert losses(parts) == losses(whole)
    one, other = (load_file(r / "export" / "adapter_model.safetensors") for r in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_command_takes_an_adapter(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter directory, and the run that made it, stand for the tuned model."""
    pytest.importorskip("gguf")
    run = train(base, tmp_path, "--lr", "0.01", steps=8)
    merged, text = merge_adapter(run, tmp_path / "merged"), str(write_text(tmp_path))
    answers = []
    for name in (run, run / "export", merged):
        capsys.readouterr()
        arguments = ["generate", str(name), "--chat", "--prompt", "hi", "--max-new-tokens", "6"]
        assert main(arguments) == 0
        answers.append(capsys.readouterr().out)
        assert main(["evaluate", str(name), "--text", text]) == 0
        figures = capsys.readouterr().out
        answers[-1] += figures.splitlines()[0].rpartition(" ")[0]
        assert main(["info", str(name)]) == 0
        assert main(["tree", str(name)]) == 0
    if json.loads((base / "config.json").read_text())["dtype"] == "float32":
        assert answers[0] == answers[1] == answers[2]
    for number, name in enumerate((run, run / "export")):
        assert main(["quantize", str(name), str(tmp_path / f"q{number}"), "--scheme", "int8"]) == 0
        assert main(["convert", str(name), str(tmp_path / f"c{number}")]) == 0
        assert main(["convert", str(name), str(tmp_path / f"m{number}.gguf"), "--type", "f32"]) == 0
        assert not list(tmp_path.glob(".*"))
    with torch.no_grad():
        want = AutoModel.from_pretrained(merged)(IDS).logits
        for name in ("c0", "m0.gguf"):
            got = AutoModel.from_pretrained(tmp_path / name)(IDS).logits
            assert_close(got, want, rtol=1e-4, atol=1e-5)
    template = (tmp_path / "q0" / "chat_template.jinja").read_text()
    assert template == TEMPLATE
    assert find_source(run).tokenizer == run / "export"


def test_defaults_of_lora(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All linear layers at 2e-4; the log says what is trained; epochs give the steps."""
    run = train(base, tmp_path, "--epochs", "3", "--batch-size", "4")
    log = caplog.text
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    kinds = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert kinds == {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    rank, hidden, inner = 8, 64, 128
    layer = (2 * (64 + 64) + 2 * (64 + 32) + 3 * (hidden + inner)) * rank
    assert f"{2 * layer} parameters" in log
    assert "learning rate 0.0002" in log
    assert "8 conversations with 16 answers" in log
    rows = int(log.partition("answers to train on, in ")[2].split()[0])
    assert f"3 epochs of {rows} sequences, 4 sequences per step: {-(-3 * rows // 4)} steps" in log
    assert len(losses(run)) == -(-3 * rows // 4)
    assert default_rate("lora", 8, 1e-6) == 1e-5  # preferences and rl
    assert default_rate("lora", 8, 3e-4) == 2e-4  # never above the rate of chats
    assert [default_rate("lora", rank) for rank in (None, 8, 16, 64, 256)] == [
        *(2e-4, 2e-4, 2e-4, 1e-4, 1e-4)
    ]


def test_soft_prompts_train_as_in_peft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of a step equals PEFT's loss of the conversations, one per row."""
    base = write_qwen3(tmp_path / "Qwen3-tiny")
    options = ("--adapter", "soft-prompt", "--adapter.length", "5", "--lr", "0")
    run = train(base, tmp_path, *options, "--batch-size", "16", "--micro-batch-size", "4", steps=1)
    assert (
        "a soft prompt is prepended to sequences: every sequence has one conversation"
        in caplog.text
    )
    theirs = AutoPeftModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = ChatTemplate(TEMPLATE, tokenizer)
    total, count = 0.0, 0
    for conversation in read_conversations(tmp_path / "chats.jsonl"):
        for row in encode_turns(render_conversation(conversation, template), tokenizer):
            labels = torch.tensor([row.labels])
            number = int((labels != -100).sum())
            with torch.no_grad():
                total += number * float(theirs(torch.tensor([row.ids]), labels=labels).loss)
            count += number
    assert losses(run)[0] == pytest.approx(total / count, rel=1e-5)

    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{}")
    common = ["train", "preferences", "--model", str(base), "--data", str(pairs)]
    common += ["--run-dir", str(tmp_path / "refused"), "--adapter", "soft-prompt", "--steps", "1"]
    for more, text in (
        (["--data.prefix-sharing"], "prepended to prompts, not to answers"),
        (
            ["--seq-len", "200"],
            "data.seq_len=200 + adapter.length=100 is more than model.max_seq_len=256",
        ),
    ):
        assert main([*common, *more]) == 2
        assert text in capsys.readouterr().err


def test_base_dtypes_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = str(write_chats(tmp_path / "chats.jsonl"))
    common = ["train", "conversations", "--model", str(base), "--data", chats]
    common += ["--run-dir", str(tmp_path / "run"), "--seq-len", "64"]
    cases = [
        (["--steps", "1", "--epochs", "2"], "both set the length of the run"),
        (["--base-dtype", "int4"], "--adapter lora"),
        (["--base-dtype", "bf16", "--adapter", "lora"], "--precision bf16"),
        (["--base-dtype", "int4", "--adapter", "lora", "--adapter.merge"], "bmforge merge"),
        (["--epochs", "0", "--adapter", "lora"], "epochs=0.0 must be above 0"),
    ]
    for more, text in cases:
        assert main([*common, *more]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["merge", str(base), "--out", str(tmp_path / "out")]) == 2
    assert "is not an adapter directory" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.eos_id == 2


def test_exports_are_pushed_whole(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub gets the folder of the export, card included, in a private repository."""
    calls: list[tuple[str, Any]] = []

    class Hub:
        def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
            calls.append(("create", (repo_id, private, exist_ok)))

        def upload_folder(self, repo_id: str, folder_path: str) -> None:
            calls.append(("upload", {file.name for file in Path(folder_path).iterdir()}))

    monkeypatch.setattr("bmforge.recipes.export.HfApi", Hub)
    monkeypatch.setattr("bmforge.recipes.export.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("bmforge.recipes.export.get_token", lambda: "a token")
    run = train(base, tmp_path, "--push-to-hub", "me/mine", steps=1)
    names = {file.name for file in (run / "export").iterdir()}
    assert calls == [("create", ("me/mine", True, True)), ("upload", names)]
    assert {"README.md", "adapter_config.json", "tokenizer.json"} <= names


def test_python_opens_adapters_and_runs(base: Path, tmp_path: Path) -> None:
    """`AutoModel` opens an adapter or a run as the commands do, with the logits of PEFT."""
    run = train(base, tmp_path, "--lr", "0.01", steps=8)
    theirs = AutoPeftModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    with torch.no_grad():
        want = theirs(IDS).logits
        for name in (run, run / "export", str(run)):
            model = AutoModel.from_pretrained(name)
            assert not model.training
            assert not any(p.requires_grad for p in model.parameters())
            assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)
        model = AutoModel.from_pretrained(base)
        load_delta(model, run)
        assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)
        packed = AutoModel.from_pretrained(run, quantize="int8")
        assert_close(packed(IDS).logits, want, rtol=0.1, atol=0.1)
    with pytest.raises(ConfigError, match=r"is an adapter, not a model\. Merge it first"):
        AutoModel.describe_pretrained(run)
    shutil.move(base, moved := tmp_path / "moved")
    try:
        with pytest.raises(ConfigError, match=r"base model .* was not found"):
            AutoModel.from_pretrained(run)
    finally:
        shutil.move(moved, base)


def test_compress_takes_an_adapter(base: Path, tmp_path: Path) -> None:
    """The recipe compresses the merged model; a repeated call merges nothing again."""
    run = train(base, tmp_path, "--lr", "0.01", steps=8)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[structure]\nintermediate_size = 64\n[quantize]\nscheme = "int8"\n')
    merged, out = merge_adapter(run, tmp_path / "merged"), tmp_path / "small"
    for name, target in ((run, out), (merged, tmp_path / "want")):
        command = ["compress", str(name), "--recipe", str(recipe), "--out", str(target)]
        assert main([*command, "--dry-run"]) == 0
        assert main(command) == 0
    want = load_file(tmp_path / "want" / "bmforge_model.safetensors")
    got = load_file(out / "bmforge_model.safetensors")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    kept = (out / "phases" / "merged" / "model.safetensors").stat().st_mtime_ns
    assert main(["compress", str(run), "--recipe", str(recipe), "--out", str(out)]) == 0
    assert (out / "phases" / "merged" / "model.safetensors").stat().st_mtime_ns == kept
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert main(["generate", str(out), "--prompt", "hi", "--max-new-tokens", "2"]) == 0
