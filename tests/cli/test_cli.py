"""The commands, through the entry point, from text to a trained and exported model."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bmforge.cli import main
from bmforge.cli.commands import COMMANDS
from bmforge.config import config_to_dict, load_toml
from bmforge.data import TokenStore, load_tokenizer
from bmforge.infer import generate
from bmforge.logging import get_logger, log_to_file
from bmforge.models import AutoModel
from bmforge.recipes import RECIPES
from bmforge.recipes.run import RunResult

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from cli_calls import assert_refused, bmforge, call, files_below
from real_runs import write_text


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_overview_lists_every_command(arguments) -> None:
    (said,) = bmforge(*arguments)
    assert said.status == 0
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.about)}$", said.out, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str) -> None:
    (said,) = bmforge(name, "--help")
    assert said.status == 0
    assert f"usage: bmforge {name}" in said.out
    assert said.err == ""


def test_version() -> None:
    (said,) = bmforge("--version")
    assert re.fullmatch(r"bmforge \d+\.\d+\.\d+\S*\n", said.out)


@pytest.mark.parametrize("name", RECIPES)
def test_print_config_round_trips(name: str, tmp_path: Path) -> None:
    options = ("--train.steps", "7", "--train.optim.lr", "1e-05", "--data.paths", "a b", "c")
    (said,) = bmforge("train", name, *options, "--print-config")
    assert said.status == 0
    shown = tomllib.loads(said.out)
    assert (shown["train"]["steps"], shown["train"]["optim"]["lr"]) == (7, 1e-05)
    assert shown["data"]["paths"] == ["a b", "c"]
    file = tmp_path / "shown.toml"
    file.write_text(said.out)
    assert config_to_dict(load_toml(RECIPES[name].config, file)) == shown
    (again,) = bmforge("train", name, "--config", file, "--print-config")
    assert again.out == said.out
    (traced,) = bmforge("train", name, "--config", file, "--profile", "--print-config")
    assert tomllib.loads(traced.out)["train"]["profile_steps"] == 3
    (changed,) = bmforge("train", name, f"--config={file}", "--train.steps", "8", "--print-config")
    assert changed.out == said.out.replace("steps = 7\n", "steps = 8\n", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shown.toml"]


def test_dry_run_says_who_holds_what() -> None:
    """A layout for processes that are not here, and what does not fit, in one message."""
    options = ("train", "gpt2-pretrain", "--dry-run", "--layout.tp", "2", "--layout.pp", "3")
    good = call((*options, "--world", "24"))
    bad = call(("train", "gpt2-pretrain", "--dry-run", "--world", "6", "--layout.tp", "5"))
    alone = call(("train", "gpt2-pretrain", "--world", "6"))
    assert good.status == 0, good.err
    assert "on 24 processes: pp=3 x dp_shard=4 x tp=2" in good.out
    rows = [line.split() for line in good.out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "8", "16"]
    assert sum(int(row[1]) for row in rows) == 12
    assert bad.status != 0
    assert "tp=5" in bad.err
    assert "no effect without --dry-run" in alone.err


def test_dry_run_counts_states_of_trained_parameters_only() -> None:
    """The frozen base in bf16 and AdamW for the adapter alone; one process without --world."""
    options = ("--adapter", "lora", "--precision", "bf16", "--dry-run")
    frozen, trained = (
        call(("train", "conversations", "--model", "qwen3-8b", *options)),
        call(("train", "pretrain", "--model", "qwen3-8b", "--dry-run")),
    )
    assert "on 1 processes" in frozen.out
    gib = [[float(n) for n in re.findall(r"([\d.]+) GiB", said.out)] for said in (frozen, trained)]
    assert gib[0][0] == pytest.approx(gib[1][0] / 2, rel=0.01)
    assert gib[0][1] - gib[0][0] < 0.5
    assert gib[1][1] == pytest.approx(4 * gib[1][0], rel=0.01)


def test_an_option_does_not_take_the_next_option_as_its_value() -> None:
    said = call(("train", "conversations", "--model", "--data", "chats.jsonl"))
    assert said.status == 2
    assert "--model needs a value." in said.err


@pytest.mark.parametrize("dry", [True, False])
def test_too_few_micro_batches_for_a_schedule(dry: bool, tmp_path: Path) -> None:
    """DualPipeV on two ranks takes four; said before the run's directory is this run's."""
    asked = "--dry-run --world 2" if dry else f"--run-dir {tmp_path / 'run'}"
    layout = "--layout.pp 2 --layout.pp-schedule dualpipev --layout.zero 0"
    options = f"{asked} {layout} --data.global-batch-size 24 --data.micro-batch-size 8".split()
    said = bmforge("train", "gpt2-pretrain", *options, world=1 if dry else 2)
    assert_refused(said, "24 / (data.micro_batch_size=8 x 1 ", "= 3 micro-batches", "at least 4")
    assert not list(tmp_path.iterdir())


def test_what_all_processes_say_is_said_once(tmp_path: Path, monkeypatch, capsys) -> None:
    """Two processes of one torchrun: folders `0` and `1` in one; a message of its own is said."""
    said = []
    for rank, arguments in enumerate([["trian"], ["trian"], ["inof"]]):
        folder = tmp_path / str(rank)
        folder.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        assert main(arguments) == 2
        said.append(capsys.readouterr().err)
    assert "'trian'" in said[0]
    assert said[1] == ""
    assert "'inof'" in said[2]
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert main(["info", "gpt2-small", "--seq-len", "many"]) == 2
        assert ("many" in capsys.readouterr().err) == (rank == 0)


def number(text: str, label: str) -> float:
    """The first number behind a label."""
    found = re.search(rf"{label} +([\d,.e+]+)", text)
    assert found is not None, text
    return float(found[1].replace(",", ""))


def test_info_of_a_preset() -> None:
    """GPT-2 small: 124,439,808 parameters, counted by hand from the paper's sizes."""
    d, layers, vocab, positions = 768, 12, 50257, 1024
    block = 4 * d * d + 4 * d + 8 * d * d + 5 * d + 4 * d
    parameters = vocab * d + positions * d + layers * block + 2 * d
    assert parameters == 124_439_808
    words = ["info", "gpt2-small", "--seq-len", "512"]
    (said,), (as_json,) = bmforge(*words), bmforge(*words, "--json")
    fields = json.loads(as_json.out)
    assert (fields["family"], fields["parameters"], fields["seq_len"]) == ("GPT2", parameters, 512)
    assert fields["config"]["hidden_size"] == d
    assert fields["kv_cache_bytes_per_token"] == number(said.out, "KV-cache bytes per token")
    assert number(said.out, "parameters") == parameters
    assert number(said.out, "KV-cache bytes per token") == 2 * layers * d * 2
    # 6 FLOPs per weight of a matrix and token (Kaplan et al. 2020); attention's 12 L D T at most.
    matrices = 6 * (layers * 12 * d * d + vocab * d)
    flops = number(said.out, "training FLOPs per token")
    assert matrices * 0.999 <= flops <= (matrices + 12 * layers * d * 512) * 1.001


def test_info_without_a_name_lists_the_presets_of_the_page() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "presets.md"
    presets = re.findall(r"^\| `(\S+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    listed, as_json = bmforge("info"), bmforge("info", "--json")
    assert [name for names in json.loads(as_json[0].out).values() for name in names] == presets
    assert re.findall(r"[ ]([^\s,]+)(?=[,\n])", listed[0].out) == presets


def test_info_is_what_the_page_shows() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "guides" / "models.md"
    (shown,) = re.findall(r"```text\n(gpt2: GPT2\n.*?)```", page.read_text(), re.DOTALL)
    (said,) = bmforge("info", "gpt2")
    assert said.out == shown


def test_info_of_layers_that_differ() -> None:
    """CPM-Bee 2B lacks parts in 31 of its 48 layers; which has what is listed."""
    (said,) = bmforge("info", "cpm-bee-2b")
    found = re.findall(r"  layers ([\d, ]+): (.*)", said.out)
    assert sorted(int(n) for numbers, _ in found for n in numbers.split(", ")) == list(range(48))
    kinds = {what: len(numbers.split(", ")) for numbers, what in found}
    heads = "attention of 32 heads of 64"
    assert kinds == {f"{heads}, an MLP of 5120": 17, heads: 2, "an MLP of 5120": 7, "nothing": 22}
    # Two numbers per head and dim, of two bytes each, where there is attention.
    assert number(said.out, "KV-cache bytes per token") == 19 * 2 * 32 * 64 * 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A quickstart of few steps on a tiny folder: its run directory and its arguments."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "texts").mkdir()
    write_text(folder / "texts" / "a.jsonl", 60)
    run_dir = folder / "runs" / "quick"
    options = ["--input", str(folder / "texts"), "--run-dir", str(run_dir)]
    options += ["--prepare.vocab-size", "300", "--samples", "1", "--steps", "12"]
    (said,) = bmforge("quickstart", *options)
    assert said.status == 0, said
    assert "bits per byte" in said.err
    return run_dir, options


def test_quickstart_leaves_everything(finished) -> None:
    run_dir, _ = finished
    results = json.loads((run_dir / "results.json").read_text())
    assert set(results["bits per byte"]) == {"model", "bigram", "unigram"}
    assert all(0 < bits < 8.5 for bits in results["bits per byte"].values())
    assert results["bits per byte"]["bigram"] < results["bits per byte"]["unigram"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "val_loss" in rows[-1]
    (sample,) = [json.loads(line) for line in (run_dir / "samples.jsonl").open()]
    assert sample["prompt"]
    assert sample["text"]
    page = (run_dir / "report.html").read_text()
    assert "bigram" in page
    assert not re.search(r"(src|href)=[\"']https?://", page)


def test_export_opens_in_transformers_with_equal_logits(finished) -> None:
    run_dir, _ = finished
    theirs = AutoModelForCausalLM.from_pretrained(run_dir / "export").eval()
    ours = AutoModel.from_pretrained(run_dir / "export").eval()
    ids = torch.randint(ours.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_bits_per_byte_of_the_export(finished) -> None:
    """Every held-out token but the first is predicted once, by transformers' model."""
    run_dir, _ = finished
    data = run_dir / "data"
    theirs = AutoModelForCausalLM.from_pretrained(run_dir / "export").eval()
    stream = torch.from_numpy(TokenStore(data / "validation" / "tokens").tokens.astype("int64"))
    nats = 0.0
    for start in range(0, len(stream) - 1, 127):
        row = stream[None, start : start + 128]
        with torch.no_grad():
            logits = theirs(row).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
    report = tomllib.loads((data / "prepared.toml").read_text())
    bits = nats / torch.log(torch.tensor(2.0)).item() / report["validation"]["text_bytes"]
    results = json.loads((run_dir / "results.json").read_text())
    assert results["bits per byte"]["model"] == pytest.approx(bits, rel=1e-4)


def test_generate_equals_the_library(finished) -> None:
    run_dir, _ = finished
    export = run_dir / "export"
    tokenizer, model = load_tokenizer(export), AutoModel.from_pretrained(export)
    ids = torch.tensor([tokenizer.encode("river stone")])
    end = tokenizer.token_to_id("<|endoftext|>")
    options = ("--prompt", "river stone", "--max-new-tokens", "12")
    for extra, changes in (
        ((), {}),
        (("--num-beams", "3"), {"num_beams": 3}),
        (("--do-sample", "--top-k", "20", "--seed", "5"), {"do_sample": True, "top_k": 20}),
    ):
        torch.manual_seed(5)
        wanted = generate(model, ids, max_new_tokens=12, eos_token_id=end, **changes)[0].tolist()
        (said,) = bmforge("generate", export, *options, *extra)
        assert said.status == 0, said
        assert said.out == tokenizer.decode(wanted) + "\n"
    assert_refused(bmforge("generate", export, "--prompt", ""), "prompt is empty")


def test_info_of_an_export_and_report(finished) -> None:
    run_dir, _ = finished
    (said,) = bmforge("info", run_dir / "export")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    assert number(said.out, "parameters") == sum(p.numel() for p in model.parameters())
    page = run_dir / "report.html"
    page.unlink()
    (said,) = bmforge("report", run_dir)
    assert said.status == 0
    assert str(page) in said.err
    assert page.stat().st_size > 1000


def test_evaluation_comes_to_what_training_measured(finished) -> None:
    """In the rows of the run, without being told; the figure stands beside the run's own."""
    run_dir, _ = finished
    data = str(run_dir / "data")
    wanted = json.loads((run_dir / "results.json").read_text())["bits per byte"]["model"]
    (said,) = bmforge("evaluate", run_dir, "--prepared", data)
    assert said.status == 0, said
    (line,) = [line for line in said.out.splitlines() if line.startswith("bits per byte")]
    assert line.split()[3:] == [data, f"{wanted:.4f}"]
    told = json.loads((run_dir / "results.json").read_text())["bits per byte"]
    assert told[data] == pytest.approx(told["model"], rel=1e-6)
    assert f"<th>{data}</th>" in (run_dir / "report.html").read_text()


def test_a_stopped_quickstart_ends_as_interrupted(finished, monkeypatch, tmp_path) -> None:
    """As `bmforge train` does, so that what comes after it in a script does not start."""
    _, options = finished

    def stop(config) -> RunResult:
        return RunResult(None, config.train.steps - 1, None, None, stopped=True)

    monkeypatch.setattr(sys.modules["bmforge.recipes.quickstart"], "pretrain", stop)
    handler = log_to_file(tmp_path / "log.txt")
    try:
        assert main(["quickstart", *options]) == 130
    finally:
        get_logger().removeHandler(handler)
        handler.close()
    said = (tmp_path / "log.txt").read_text()
    assert "at step 11 of 12; run the same command to continue" in said
    assert "done" not in said


def test_quickstart_again_continues_and_fresh_starts_over(finished) -> None:
    run_dir, options = finished
    before = files_below(run_dir / "checkpoints")
    (said,) = bmforge("quickstart", *options)
    assert said.status == 0, said
    assert "found prepared text" in said.err
    assert "resumed at step 12 of 12" in said.err
    assert "changed since" not in said.err
    assert files_below(run_dir / "checkpoints") == before
    (said,) = bmforge("quickstart", *options, "--steps", "26")
    assert said.status == 0, said
    assert "changed since the start of the run: train.steps\n" in said.err
    assert "resumed at step 12 of 26" in said.err
    (said,) = bmforge("quickstart", *options, "--fresh", "--steps", "4")
    assert said.status == 0, said
    assert "resumed" not in said.err
    assert "prepared text" in said.err
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
