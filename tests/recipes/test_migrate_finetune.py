"""Start scripts of CPM-1-Finetune and CPM-2-Pretrain become runs; what has no field is listed."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from bmforge.cli.main import main
from bmforge.compat.cpm_pretrain.migrate import migrate_text
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.recipes.registry import RECIPES

SCRIPT = """#!/bin/bash
MPSIZE={tp}
DS_CONFIG="{ds}"
python3 -m torch.distributed.launch --master_port ${{1-1122}} --nproc_per_node 4 {program} \\
       --do_train --model-parallel-size ${{MPSIZE}} --num-layers 2 --hidden-size 48 \\
       --num-attention-heads 4 --seq-length 64 --max-position-embeddings 128 --vocab-size 300 \\
       --tokenizer-path bpe/ --lr 0.0002 --warmup 0.1 --batch-size 3 --seed 7 {more} \\
       --deepspeed --deepspeed_config ${{DS_CONFIG}} --epoch 2 --checkpoint-activations
"""
TASKS = {"finetune_lm.py": "cpm1-stc", "finetune_chid.py": "cpm1-chid"}
PRODUCT = list(itertools.product(TASKS, (1, 2), ("", "--fp16"), (None, 0, 1, 2)))


@pytest.mark.parametrize("case", random.Random(0).sample(PRODUCT, 8))
def test_a_finetuning_script_becomes_a_run(tmp_path: Path, case: tuple) -> None:
    program, tp, more, stage = case
    ds = tmp_path / "ds.json"
    if stage is not None:
        settings = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage}}
        ds.write_text(json.dumps(settings))
    out = migrate_text(SCRIPT.format(tp=tp, ds=ds, program=program, more=more))
    config = config_from_dict(RECIPES[out.task].config, out.values)
    assert out.task == TASKS[program]
    assert out.command == (
        f"torchrun --nproc-per-node 4 -m bmforge train {out.task} --config {{config}}"
    )
    model, train = config.model, config.train
    assert (model.num_layers, model.hidden_size, model.intermediate_size) == (2, 48, 192)
    assert (model.num_heads, model.head_dim, model.vocab_size) == (4, 12, 300)
    assert (train.optim.lr, train.optim.weight_decay, train.grad_clip) == (2e-4, 0.01, 1.0)
    assert train.precision == ("fp16" if more else "fp32")
    assert (config.data.seq_len, config.data.micro_batch_size, config.seed) == (64, 3, 7)
    assert config.layout.tp == tp
    assert config.recompute
    if stage is not None:
        assert config.data.grad_accum_steps == 4
        assert config.layout.zero == {0: 0, 1: 2, 2: 2}[stage]
    unplaced = {name.split()[0] for name, _ in out.unplaced}
    assert unplaced == {"--epoch", "--warmup", *(["--deepspeed_config"] if stage is None else [])}


def test_cpm2_pretraining_reads_the_model_config(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_ff": 80, "d_kv": 8, "num_heads": 4, "num_layers": 3}
    (tmp_path / "model.json").write_text(json.dumps({**sizes, "layer_norm_epsilon": 1e-5}))
    out = migrate_text(
        f"deepspeed --num_gpus 8 src/pretrain_enc_dec.py --model-config {tmp_path}/model.json "
        "--train-iters 200 --warmup 0.05 --lr-decay-style cosine --split 949,50,1 --enc-seq-length "
        "96 --data-path corpus --unheard-of 3"
    )
    config = config_from_dict(RECIPES["cpm2-pretrain"].config, out.values)
    model = config.model
    assert (model.hidden_size, model.intermediate_size, model.head_dim) == (32, 80, 8)
    assert (model.num_layers, model.norm_eps) == (3, 1e-5)
    assert (config.train.steps, config.train.schedule.warmup_steps) == (200, 10)
    assert list(config.data.paths) == ["corpus"]
    assert [name for name, _ in out.unplaced] == ["--unheard-of"]


def test_programs_without_a_recipe_name_the_replacement() -> None:
    with pytest.raises(ConfigError, match=r"finetune_cpm2\.py cannot be converted.* Use .*prompt-"):
        migrate_text("deepspeed finetune_cpm2.py --data-path x")
    with pytest.raises(ConfigError, match=r"--lr fast must be of type float"):
        migrate_text("python finetune_lm.py --lr fast")


def test_the_command_writes_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "lm.sh"
    script.write_text(SCRIPT.format(tp=1, ds="none.json", program="finetune_lm.py", more=""))
    main(["migrate", str(script), "--out", str(tmp_path / "run.toml")])
    assert "hidden_size = 48" in (tmp_path / "run.toml").read_text()
    assert "--epoch 2: set train.steps" in capsys.readouterr().out
