"""Start scripts of CPM-Pretrain become configs that say the same, or say what they could not."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bmforge.cli.main import main
from bmforge.compat.cpm_pretrain.arguments import ARGUMENTS
from bmforge.compat.cpm_pretrain.migrate import migrate_text
from bmforge.compat.cpm_pretrain.shell import read_script
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.recipes.registry import RECIPES

# In the shape of run_t5.sh, with its two mistakes: a test without a blank, and blanks around "=".
SCRIPT = r"""#! /bin/bash
GPUS_PER_NODE=4
NNODES=1   # one machine
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DATA_DIR=${HOME}/t5_data
VOCAB_PATH="${DATA_DIR}/bpe_new"
config_json="work/ds_config_t5.json"
mp_size=2
pp_size=%(pp)s
NLAYERS=12
LOGDIR="tensorboard/${NLAYERS}l_${mp_size}mp_ds4"
checkpoint_activations=%(recompute)s
t5_options=" \
        --model-parallel-size ${mp_size} \
        --pipe-parallel-size ${pp_size} \
        --num-layers $NLAYERS --hidden-size 128 --kv-hidden-size 16 --ff-hidden-size 256 \
        --num-attention-heads 8 \
        --enc-seq-length 1024\
        --dec-seq-length 384\
        --max-position-embeddings 1024 --batch-size 4 --gas 16 --train-iters 320000 \
        --lr-decay-iters 320000 --save checkpoints/t5_test --data-path $DATA_DIR/baike \
        --vocab-file $VOCAB_PATH --data-impl mmap --split 949,50,1 --lr 1.5e-4 \
        --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 \
        --log-interval 1 --save-interval 500 --eval-interval 100 --eval-iters 10 \
        --fp16 --tensorboard-dir ${LOGDIR} --load checkpoints/elsewhere --hidden-bias --new-one 3
"
deepspeed_options=" --deepspeed --deepspeed_config ${config_json} "
if [ "${checkpoint_activations}" = "true" ]; then
        chkp_opt=" --checkpoint-activations --checkpoint-num-layers 1"
        if [ "${WORLD_SIZE}" != "1" ]; then
        chkp_opt="${chkp_opt} --partition-activations"
        fi
else
        chkp_opt = " "
fi
if ["${mp_size}" = "2"]; then
  t5_options="${t5_options} --num-layers 99"
fi
full_options="${t5_options} ${deepspeed_options} ${chkp_opt}"
run_cmd="deepspeed --master_port 8888 -i n:4,5 --hostfile h pretrain_t5.py $@ ${full_options}"
echo ${run_cmd}
eval ${run_cmd}
set +x
"""


def script(**changes: str) -> str:
    return SCRIPT % {"pp": "2", "recompute": "true", **changes}


def test_a_script_of_t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    vocabulary = tmp_path / "t5_data" / "bpe_new"
    vocabulary.mkdir(parents=True)
    (vocabulary / "vocab.txt").write_text("\n".join(map(str, range(300))))
    found = migrate_text(script())
    assert found.task == "t5-pretrain"
    wanted: dict[str, Any] = {
        "run_dir": "checkpoints/t5_test",
        "target_len": 384,
        "recompute": True,
        "seed": 1234,
        "layout": {"tp": 2, "pp": 2, "sequence_parallel": True},
        "model": {
            **{"num_layers": 12, "hidden_size": 128, "head_dim": 16, "intermediate_size": 256},
            **{"num_heads": 8, "max_seq_len": 1024, "dropout": 0.1, "vocab_size": 512},
        },
        "data": {
            "paths": [f"{tmp_path}/t5_data/baike"],
            **{"tokenizer": str(vocabulary), "split": [949.0, 50.0, 1.0], "seq_len": 1024},
            **{"micro_batch_size": 4, "grad_accum_steps": 16, "validation_batches": 10},
            "seed": 1234,
        },
        "train": {
            **{"steps": 320000, "precision": "fp16", "grad_clip": 1.0, "seed": 1234},
            **{"save_every_steps": 500, "eval_every_steps": 100, "log_every_steps": 1},
            "optim": {"lr": 1.5e-4, "weight_decay": 0.01, "betas": [0.9, 0.999]},
            "schedule": {"kind": "cosine", "warmup_steps": 3200, "min_lr_ratio": 0.0666667},
        },
        "loss_scale": {
            **{"growth_interval_steps": 1000, "hysteresis": 2, "init_scale": 2.0**32},
        },
    }
    assert found.values == wanted
    unplaced = dict(found.unplaced)
    assert set(unplaced) == {
        *("line 36", "--new-one", "--hidden-bias"),
        "--load checkpoints/elsewhere",
    }
    assert "--data-impl" in dict(found.dropped)
    assert shlex.split(found.command) == [
        *("torchrun", "--nproc-per-node", "4", "-m", "bmforge", "train", "t5-pretrain"),
        *("--config", "{config}", "--ds-config", "work/ds_config_t5.json"),
    ]


def test_no_pipeline_and_no_vocabulary_at_hand() -> None:
    """pp_size=0 is none, and what cannot be known is asked for, not guessed."""
    found = migrate_text(script(pp="0", recompute="false"))
    assert found.values["layout"] == {"tp": 2, "pp": 1}
    assert "recompute" not in found.values
    assert "vocab_size" not in found.values["model"]
    assert any("set model.vocab_size" in why for _, why in found.unplaced)
    assert "--ds-config" not in found.command  # it was not read then


def test_a_command_line_of_gpt2() -> None:
    line = (
        "python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt2.py --num-layers=24 "
        "--hidden-size 1024 --kv-hidden-size 80 --num-attention-heads 16 --seq-length 512 "
        "--max-position-embeddings 1024 --batch-size 2 --train-iters 1000 --lr 1e-3 "
        "--lr-decay-style exponential --cpu-optimizer --reset-position-ids --hidden-dropout 0 "
        "--lr-decay-iters 800 --zero-stage 1"
    )
    found = migrate_text(line)
    values = found.values
    assert found.task == "gpt2-pretrain"
    assert values["model"]["head_dim"] == 80
    assert values["model"]["bias"] is False
    assert (values["model"]["dropout"], values["model"]["attn_dropout"]) == (0.0, 0.1)
    assert values["layout"] == {"tp": 1, "pp": 1, "zero": 2}
    assert values["offload"] == {"fraction": 1.0}
    assert values["data"]["reset_at_documents"] is True
    assert "loss_scale" not in values
    assert values["train"]["schedule"] == {
        **{"kind": "exponential", "warmup_steps": 8, "min_lr_ratio": 0.0, "total_steps": 800},
    }
    assert [name for name, _ in found.unplaced] == ["--lr-decay-style exponential", "--vocab-file"]
    assert found.command.startswith("torchrun --nproc-per-node 8 ")
    config = config_from_dict(RECIPES[found.task].config, values)
    assert config.model.head_dim == 80


def test_every_argument_is_placed_or_said() -> None:
    """Each one alone: it changes the config, or it is listed."""
    base = "pretrain_{}.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    usual = {kind: migrate_text(base.format(kind)) for kind in ("gpt2", "t5")}
    values = {"--loss-scale": "8 --fp16", "--loss-scale-window": "7 --fp16", "--split": "1,1,1"}
    values |= {"--hysteresis": "3 --fp16", "--min-scale": "2 --fp16", "--lr-decay-style": "cosine"}
    values |= {"--min-lr": "1 --lr 2", "--save": "x", "--load": "x", "--data-path": "x"}
    values |= {"--warmup": "0.5 --train-iters 10", "--vocab-file": "x", "--adam-beta1": "0.5"}
    values |= dict.fromkeys(("--adam-beta2", "--attention-dropout", "--hidden-dropout"), "0.5")
    values |= {"--mask-prob": "0.5"}
    partners = {"--partition-activations", "--distribute-checkpointed-activations"}
    silent = []
    for group in ARGUMENTS.values():
        for name in (name for name in group if name.startswith("--")):
            pair = " --model-parallel-size 2" if name in partners else ""
            told = False
            for kind, plain in usual.items():
                line = f"{base.format(kind)} {name} {values.get(name, '3')}{pair}"
                found = migrate_text(line)
                said = [n.split()[0] for n, _ in found.unplaced + found.dropped]
                told |= found.values != plain.values or name in said
            if not told:
                silent.append(name)
    # It needs a vocabulary to be counted; `test_a_script_of_t5` has one.
    assert silent == ["--make-vocab-size-divisible-by"]


def test_shells_are_read_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"A=1\nB='$A'\nC=\"$A${{D:-x}}\" # no\nE=$((A+2*3))\ntouch {mark}\nfor i in 1; do\n"
    read = read_script(text)
    assert read.variables == {"A": "1", "B": "$A", "C": "1x", "E": "7"}
    assert read.unread == [(6, "for i in 1")]
    assert not mark.exists()
    with pytest.raises(ConfigError, match=r"pretrain_gpt2\.py"):
        migrate_text("python train.py --lr 3")
    with pytest.raises(ConfigError, match="--num-layers many must be of type int"):
        migrate_text("pretrain_gpt2.py --num-layers many")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "run_t5.sh", tmp_path / "t5.toml"
    source.write_text(script())
    assert main(["migrate", str(source), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"--config {out}" in said
    assert "--hidden-bias: a T5 has no biases" in said
    text = out.read_text()
    assert text.startswith("# not migrated: ")
    assert tomllib.loads(text) == migrate_text(script()).values
    assert main(["migrate", str(source), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
