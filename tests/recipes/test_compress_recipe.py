"""`bmforge compress`: phases that are runs, the small model, going on, a dry run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
import transformers
from safetensors.torch import load_file
from small_runs import write_start

from bmforge.cli import main
from bmforge.compress import CompressReport
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.nn.packed_store import PackedStore
from bmforge.provenance import Provenance, ProvenanceSource, read_provenance
from bmforge.testing import assert_close

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start"), SIZES)


def write_recipe(start: Path, folder: Path, steps: dict[str, int], **changes: object) -> Path:
    """Half the MLP, then zeros and int8 taught by what it was."""
    recipe: dict[str, object] = {
        "structure": {"intermediate_size": 128},
        "prune": {"pattern": "2:4"},
        "quantize": {"scheme": "int8", **({"training": "fake"} if steps else {})},
        **changes,
    }
    if steps:
        data = {"paths": [str(start / "tokens")], "seq_len": 16, "global_batch_size": 2}
        recipe |= {
            "task": "pretrain",
            "steps": steps,
            "distill": {"teacher": str(start / "model")},
            "run": {"data": data, "train": {"optim": {"lr": 0.01}}},
        }
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(recipe))
    return file


def command(start: Path, file: Path, out: Path, *more: str) -> list[str]:
    return ["compress", str(start / "model"), "--recipe", str(file), "--out", str(out), *more]


def check_small(start: Path, out: Path) -> CompressReport:
    """It opens, has half the MLP, zeros in groups of four and integers."""
    small = AutoModel.from_pretrained(out)
    assert small.layers["0"].spec.mlp.intermediate_size == 128
    packed = [module for module in small.modules() if isinstance(module, PackedStore)]
    assert len(packed) == 2 * 6
    for module in packed:
        values = module.dense(small.embed.weight.dtype).unflatten(-1, (-1, 4))
        assert int((values == 0).sum(-1).min()) >= 2
    report = CompressReport.load(out)
    assert [phase.name for phase in report.phases] == ["structure", "weights"]
    assert (out / "report.html").is_file()
    assert report.after.size_bytes < report.before.size_bytes / 2
    return report


def test_after_training_only(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_recipe(start, tmp_path, {}), tmp_path / "small"
    assert main(command(start, file, out, "--dry-run")) == 0
    said = capsys.readouterr().out
    assert not out.exists()
    assert main(command(start, file, out)) == 0
    report = check_small(start, out)
    for phase in report.phases:
        assert f"{phase.sizes.parameters:,}" in said
        assert f"{phase.sizes.size_bytes / 1e6:,.1f} MB" in said


def test_the_dtype_of_the_checkpoint_is_kept(start: Path, tmp_path: Path) -> None:
    """A bf16 model stays bf16, and the sizes of the report are those of the files."""
    model = AutoModel.from_pretrained(start / "model").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    for name, recipe in (("pruned", {"prune": {"pattern": "2:4"}}), ("int8", {})):
        file, out = tmp_path / f"{name}.toml", tmp_path / name
        file.write_text(tomli_w.dumps(recipe or {"quantize": {"scheme": "int8"}}))
        assert (
            main(["compress", str(tmp_path / "half"), "--recipe", str(file), "--out", str(out)])
            == 0
        )
        (weights,) = out.glob("*.safetensors")
        report, stored = CompressReport.load(out), load_file(weights)
        size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        assert abs(report.after.size_bytes - size) < 0.05 * size
        whole = sum(p.numel() * 2 for p in model.parameters())
        assert abs(report.before.size_bytes - whole) < 0.05 * whole
        assert torch.float32 not in {tensor.dtype for tensor in stored.values()}


def test_too_few_calibration_texts_are_found_before_training(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text("a b c\n")
    changes = {
        "prune": {"method": "wanda", "pattern": "2:4"},
        "calibration": {"texts": [str(tmp_path / "few.txt")]},
    }
    file, out = write_recipe(start, tmp_path, {"structure": 2}, **changes), tmp_path / "small"
    assert main(command(start, file, out)) != 0
    assert "calibration" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.long
def test_files_for_others(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In vLLM's format transformers opens the small model; what it cannot hold is said before."""
    model = Llama.from_config(LlamaConfig(**SIZES, num_kv_heads=1, intermediate_size=192))
    model.provenance = Provenance(
        "apache-2.0", (ProvenanceSource("base", "someone/base", "apache-2.0"),)
    )
    model.eval().save_pretrained(tmp_path / "model")
    recipe = {
        "structure": {"intermediate_size": 128},
        "quantize": {"scheme": "int8-dynamic"},
        "speed": True,
    }
    file, out = tmp_path / "recipe.toml", tmp_path / "small"
    file.write_text(tomli_w.dumps(recipe))
    given = ["--recipe", str(file), "--out", str(out), "--format", "compressed-tensors"]
    assert main(["compress", str(start / "model"), *given]) != 0
    assert "compressed-tensors does not support this model" in capsys.readouterr().err
    assert not out.exists()
    assert main(["compress", str(tmp_path / "model"), *given]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(24).view(2, 12)
    want = AutoModel.from_pretrained(out, quantize="keep")(input_ids=ids).logits
    with torch.no_grad():
        got = theirs.eval()(input_ids=ids).logits
    assert (got - want).norm() < 0.02 * want.norm()
    assert read_provenance(out).license == "apache-2.0"
    assert "\n# small\n" in (out / "README.md").read_text()
    report = CompressReport.load(out)
    for speed in (report.speed, *(phase.speed for phase in report.phases)):
        assert set(speed) == {"prefill, tokens/s", "decode, tokens/s"}
        assert min(speed.values()) > 0
    assert "decode, tokens/s, times before" in (out / "report.html").read_text()
    assert main(["compress", str(tmp_path / "model"), *given]) == 0


@pytest.mark.long
def test_phases_with_steps(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_recipe(start, tmp_path, {"structure": 2, "weights": 2}), tmp_path / "small"
    assert main(command(start, file, out)) == 0
    report = check_small(start, out)
    assert [phase.steps for phase in report.phases] == [2, 2]
    run = out / "phases" / "2-weights" / "run"
    assert (run / "report.html").is_file()
    written = (run / "metrics.jsonl").read_text()
    # Done phases are passed over, and the model is put there again.
    (out / "bmforge_model.safetensors").unlink()
    assert main(command(start, file, out)) == 0
    check_small(start, out)
    assert (run / "metrics.jsonl").read_text() == written
    capsys.readouterr()
    other = write_recipe(start, tmp_path, {"structure": 2, "weights": 3})
    assert main(command(start, other, out)) != 0
    assert "contains another run" in capsys.readouterr().err


@pytest.mark.long
def test_gates_then_integers_of_training(start: Path, tmp_path: Path) -> None:
    """In one job they are refused; a recipe does one after the other."""
    gates = {"gates": ["features"], "gate_steps": 2, "warmup_steps": 1, "intermediate_size": 128}
    steps = {"structure": 3, "weights": 2}
    file, out = write_recipe(start, tmp_path, steps, structure=gates), tmp_path / "small"
    assert main(command(start, file, out)) == 0
    check_small(start, out)


@pytest.mark.long
def test_answers_in_the_teachers_place(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With answers of the whole vocabulary the recipe ends where it ends beside the teacher."""
    torch.manual_seed(3)
    teacher = Llama.from_config(LlamaConfig(**{**SIZES, "num_layers": 3}, num_kv_heads=1)).eval()
    teacher.save_pretrained(tmp_path / "teacher")
    files = start / "model"
    for file in files.glob("tokenizer*"):
        (tmp_path / "teacher" / file.name).write_bytes(file.read_bytes())
    losses = [{"kind": "logits", "temperature": 2.0}]
    data = {"paths": [str(start / "tokens")], "seq_len": 16, "global_batch_size": 4}

    def recipe(name: str, steps: int, data: dict[str, object] = data, **distill: object) -> Path:
        told: dict[str, object] = {
            "task": "pretrain",
            "steps": {"weights": steps},
            "distill": {"losses": losses, "task_weight": 0.5, **distill},
            "run": {"data": data, "train": {"precision": "fp32", "optim": {"lr": 0.001}}},
        }
        file = tmp_path / f"{name}.toml"
        file.write_text(tomli_w.dumps(told))
        return file

    taught = recipe("taught", 3, teacher=str(tmp_path / "teacher"))
    kept = {count: tmp_path / f"kept{count}" for count in (64, 4)}
    for count, place in kept.items():
        assert main(command(start, taught, place, "--answers", str(count))) == 0
    assert main(command(start, taught, tmp_path / "want")) == 0
    found = {}
    for count, place in kept.items():
        out = tmp_path / f"got{count}"
        assert main(command(start, recipe(f"kept{count}", 3, answers=str(place)), out)) == 0
        found[count] = AutoModel.from_pretrained(out).state_dict()
    want = AutoModel.from_pretrained(tmp_path / "want").state_dict()
    # Adam divides a gradient near 0 by its own size: one weight in 110,000 differed by 1.3e-5 on
    # AVX-512, 99.9 % by at most 2e-7. With 4 answers 1 % differ by more than 2e-3.
    assert_close(found[64], want, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[4]["embed.weight"], found[64]["embed.weight"])
    # What the teacher was not asked about is said.
    capsys.readouterr()
    other = recipe("other", 3, {**data, "seq_len": 12}, answers=str(kept[4]))
    assert main(command(start, other, tmp_path / "other")) != 0
    assert "seed and epochs as in this run" in capsys.readouterr().err


def test_recipes_that_cannot_be(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    for steps, changes, said in (
        ({}, {"task": "pretrain"}, "task has no effect"),
        ({}, {"prune": {"patern": "2:4"}}, "unknown field compress.prune.patern"),
        ({}, {"prune": {"method": "wanda"}}, "calibration.texts"),
        ({"experts": 2}, {}, "steps.experts=2 has no effect"),
        ({"weights": 2}, {"run": {"run_dir": "x"}}, "run.run_dir has no effect"),
        ({}, {"format": "gguf"}, "format='gguf' must be one of"),
    ):
        file = write_recipe(start, tmp_path, steps)
        recipe = write_recipe(start, tmp_path, steps, **changes) if not steps else file
        if steps and changes:
            recipe.write_text(
                recipe.read_text().replace("[run.data]", '[run]\nrun_dir = "x"\n\n[run.data]')
            )
        assert main(command(start, recipe, out)) != 0
        assert said in capsys.readouterr().err, said


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layout", {"tp": 2}, "tp=2"),
        ("adapter", {"kind": "lora"}, "a compression phase trains the whole model"),
        ("train", {"schedule": {"decay_steps": 1}}, "schedule.decay_steps=1 has no effect"),
        ("train", {"disable_dropout": True}, "train.disable_dropout=True"),
        ("loss_scale", {"init_scale": 8.0}, "loss_scale has no effect"),
        ("data", {"paths": ["no-such-store"]}, "no-such-store"),
        ("data", {"micro_batch_size": 0}, "data.micro_batch_size=0"),
    ],
)
def test_options_of_a_training_phase_are_checked_before(
    field: str,
    value: dict[str, object],
    words: str,
    start: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the dry run with the same sentence; no phase begins."""
    file, out = write_recipe(start, tmp_path, {"weights": 1}), tmp_path / "small"
    recipe = tomllib.loads(file.read_text())
    recipe["run"][field] = {**recipe["run"].get(field, {}), **value}
    file.write_text(tomli_w.dumps(recipe))
    errors = []
    for more in (("--dry-run",), ()):
        assert main(command(start, file, out, *more)) == 2
        shown = capsys.readouterr().err.splitlines()
        errors.append([line for line in shown if line.startswith("error:")])
    assert errors[0] == errors[1]
    assert words in errors[0][0]
    assert not (out / "phases").exists() or field == "data"


def test_widths_of_a_target_are_checked_before(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target leaves any width; int8 needs multiples of 32, which the first message says."""
    target = {"target": "parameters", "keep_ratio": 0.6}
    recipe = {"structure": target, "quantize": {"scheme": "int8"}}
    file, out = tmp_path / "recipe.toml", tmp_path / "small"
    file.write_text(tomli_w.dumps(recipe))
    for more in (("--dry-run",), ()):
        assert main(command(start, file, out, *more)) != 0
        assert "Set structure.multiple_of=32." in capsys.readouterr().err
    assert not out.exists()
    file.write_text(tomli_w.dumps({**recipe, "structure": {**target, "multiple_of": 32}}))
    assert main(command(start, file, out)) == 0
    packed = [m for m in AutoModel.from_pretrained(out).modules() if isinstance(m, PackedStore)]
    assert packed


def test_later_phases_may_change(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A phase that is done is kept when what comes after it is added or changed."""
    file, out = tmp_path / "recipe.toml", tmp_path / "small"
    shape = {"intermediate_size": 128}
    file.write_text(tomli_w.dumps({"structure": shape}))
    assert main(command(start, file, out)) == 0
    first = out / "phases" / "1-structure" / "export" / "model.safetensors"
    written = first.stat().st_mtime_ns
    file.write_text(tomli_w.dumps({"structure": shape, "quantize": {"scheme": "int8"}}))
    assert main(command(start, file, out)) == 0
    assert first.stat().st_mtime_ns == written
    assert any(isinstance(m, PackedStore) for m in AutoModel.from_pretrained(out).modules())
    for changed in (
        {"structure": {"intermediate_size": 64}, "quantize": {"scheme": "int8"}},
        {"structure": shape, "quantize": {"scheme": "int4"}},
    ):
        file.write_text(tomli_w.dumps(changed))
        capsys.readouterr()
        assert main(command(start, file, out)) != 0
        assert "contains another run" in capsys.readouterr().err
