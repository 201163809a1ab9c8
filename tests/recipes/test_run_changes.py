"""Runs that change their model: on the command line, in TOML, drawn or loaded, on any layout."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from small_runs import settings, write_start

from bmforge.cli import main
from bmforge.config import load_toml
from bmforge.models import GPT2, AutoModel, GPT2Config
from bmforge.models.changes import Change
from bmforge.parallel import Layout
from bmforge.recipes import find_recipe
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.testing import assert_close, run_distributed

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
LOW_RANK = Change("low_rank", ("layers.*.attn.q_proj",), {"rank": 2})
INT8 = Change("int8", ("layers.*.mlp.up_proj",))
NARROW = Change("resize", ("layers.0",), {"intermediate_size": 24})


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start"), SIZES)


def command(start: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        *("train", "pretrain", "--run-dir", str(run_dir), "--data.paths", str(start / "tokens")),
        *("--data.seq-len", "16", "--data.global-batch-size", "2", "--train.optim.lr", "0.01"),
        *more,
    ]


def test_parts_beside_a_loaded_model(start: Path, tmp_path: Path) -> None:
    """The base begins as it was, its parts are trained and saved; the run goes on from its file."""
    file = tmp_path / "changes.json"
    file.write_text(json.dumps([LOW_RANK.to_json()]))
    words = ["--model", str(start / "model"), "--changes", str(file), "--train.steps", "1"]
    assert main(command(start, tmp_path / "run", *words)) == 0
    made = AutoModel.from_pretrained(tmp_path / "run" / "export")
    assert made.config.changes == (LOW_RANK,)
    told = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert told["changes"][0]["kind"] == "low_rank"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the saved model has changes (low_rank)" in log
    assert ".export.new" not in log  # the name of the export while it was written
    moved = [p for n, p in made.named_parameters() if ".low_rank." in n]
    assert len(moved) == 4
    assert all(p.abs().sum() > 0 for p in moved)  # the second matrix begins as zeros
    own = GPT2.from_pretrained(start / "model")
    assert_close(made.embed.weight, own.embed.weight, atol=0.03)
    assert main(command(start, tmp_path / "run", *words[:-1], "2")) == 0
    again = ["train", "pretrain", "--config", str(tmp_path / "run" / "run.toml")]
    assert main([*again, "--train.steps", "3"]) == 0


def test_what_a_part_adds_at_first_is_nothing(start: Path, tmp_path: Path) -> None:
    """At a rate of 0 the export answers as the model that the run began with."""
    text = json.dumps(LOW_RANK.to_json())
    words = ["--model", str(start / "model"), "--changes", text, "--train.steps", "1"]
    words += ["--train.optim.weight-decay", "0"]
    assert main([*command(start, tmp_path / "run", *words), "--train.optim.lr", "0"]) == 0
    ids = torch.arange(12)[None]
    made, own = (
        AutoModel.from_pretrained(d) for d in (tmp_path / "run" / "export", start / "model")
    )
    with torch.no_grad():
        assert_close(made(ids).logits, own(ids).logits)


def run_changed(start: Path, run_dir: Path, layout: Layout, loads: bool) -> tuple[float, int]:
    config = GPT2PretrainConfig(
        run_dir=run_dir,
        init_from=str(start / "model") if loads else None,
        model_changes=() if loads else None,
        model=GPT2Config(**SIZES),
        changes=(NARROW, LOW_RANK) if not loads else (LOW_RANK,),
        layout=layout,
        data=CorpusConfig(
            paths=(str(start / "tokens"),),
            validation=str(start / "tokens"),
            seq_len=16,
            global_batch_size=4,
            micro_batch_size=2,
        ),
        train=settings(3),
    )
    result = pretrain(config)
    assert result.evaluation is not None
    return result.evaluation.loss, result.step


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("layout", [Layout(zero=3), Layout(zero=2, tp=2)], ids=str)
def test_layouts_learn_the_same(loads: bool, layout: Layout, start: Path, tmp_path: Path) -> None:
    alone = run_changed(start, tmp_path / "one", Layout(), loads)
    found = run_distributed(run_changed, 2, start, tmp_path / "two", layout, loads)
    for loss, step in found:
        assert step == 3
        assert loss == pytest.approx(alone[0], rel=1e-5)
    opened = [AutoModel.from_pretrained(tmp_path / n / "export") for n in ("one", "two")]
    assert opened[0].config.changes == opened[1].config.changes
    for one, other in zip(opened[0].parameters(), opened[1].parameters(), strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_toml_has_a_list_of_tables(start: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[[changes]]\nkind = 'low_rank'\nwhere = ['layers.*.mlp.up_proj']\noptions = {rank = 3}\n"
    )
    config = load_toml(find_recipe("pretrain", "gpt2").config, file)
    assert config.changes == (Change("low_rank", ("layers.*.mlp.up_proj",), {"rank": 3}),)
    sizes = [f"--model.{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    words = ["--model", "gpt2", "--config", str(file), *sizes, "--train.steps", "1"]
    assert main(command(start, tmp_path / "run", *words)) == 0
    made = AutoModel.from_pretrained(tmp_path / "run" / "export")
    assert sum(".low_rank." in name for name, _ in made.named_parameters()) == 4


def test_a_changed_model_is_a_start(start: Path, tmp_path: Path) -> None:
    """What was changed before stays; a run may change it further."""
    model = GPT2.from_pretrained(start / "model").change_(NARROW)
    model.save_pretrained(tmp_path / "narrow")
    words = ["--model", str(tmp_path / "narrow"), "--train.steps", "1"]
    words += ["--changes", json.dumps([INT8.to_json(), LOW_RANK.to_json()])]
    assert main(command(start, tmp_path / "run", *words)) == 0
    made = AutoModel.from_pretrained(tmp_path / "run" / "export")
    assert made.config.changes == (NARROW, INT8, LOW_RANK)
    stored = model.change_(INT8).state_dict()  # what is stored in 8 bits is not trained
    for name, tensor in made.state_dict().items():
        if tensor.dtype == torch.int8:
            assert torch.equal(tensor, stored[name])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ("nowhere.json", "neither JSON nor a readable file"),
        ("[{]", "not valid JSON"),
        ('{"kind": "low_rnak", "where": "layers.*"}', "Did you mean 'low_rank'"),
        ('{"kind": "low_rank"}', "kind and where are required"),
        ('{"kind": "low_rank", "where": "layers.*.attn.q_porj", "options": {"rank": 2}}', "q_proj"),
        ('{"kind": "low_rank", "where": "layers.*.attn.q_proj"}', "rank"),
    ],
)
def test_bad_changes(
    changes: str, text: str, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(start / "model"), "--changes", changes, "--train.steps", "1"]
    assert main(command(start, tmp_path / "run", *words)) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.toml").exists()


def test_only_the_parts_are_trained(start: Path, tmp_path: Path) -> None:
    """With the base frozen its weights end as they began; without parts there is nothing to do."""
    change = json.dumps(LOW_RANK.to_json())
    words = ["--model", str(start / "model"), "--freeze-base", "True", "--train.steps", "3"]
    assert main(command(start, tmp_path / "run", *words, "--changes", change)) == 0
    made = AutoModel.from_pretrained(tmp_path / "run" / "export")
    before = dict(GPT2.from_pretrained(start / "model").named_parameters())
    for name, parameter in made.named_parameters():
        if ".low_rank." not in name:
            assert torch.equal(parameter, before[name]), name
    ups = [p for n, p in made.named_parameters() if n.endswith("low_rank.up")]
    assert ups
    assert all(bool(up.any()) for up in ups)
    assert main(command(start, tmp_path / "none", *words)) == 2
