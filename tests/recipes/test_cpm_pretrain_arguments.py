"""Every argument of CPM-Pretrain has its line in the table, and every field in it exists."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from bmforge.compat.cpm_pretrain.arguments import ARGUMENTS
from bmforge.recipes.registry import RECIPES

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "--ds-config",
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
}

# As they stand in Megatron's parser, group by group, and then in the scripts.
OLD = """
    --num-layers --num-unique-layers --param-sharing-style --hidden-size --kv-hidden-size
    --ff-hidden-size --num-attention-heads --max-position-embeddings --make-vocab-size-divisible-by
    --layernorm-epsilon --apply-residual-connection-post-layernorm --openai-gelu --onnx-safe
    --attention-dropout --hidden-dropout --weight-decay --clip-grad --adam-beta1 --adam-beta2
    --adam-eps --batch-size --gas --checkpoint-activations --distribute-checkpointed-activations
    --checkpoint-num-layers --train-iters --log-interval --exit-interval --tensorboard-dir
    --scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --bias-gelu-fusion
    --bias-dropout-fusion --hidden-bias --cpu-optimizer --cpu_torch_adam --seed --init-method-std
    --lr --lr-decay-style --lr-decay-iters --min-lr --warmup --override-lr-scheduler
    --use-checkpoint-lr-scheduler --save --save-interval --no-save-optim --no-save-rng --load
    --no-load-optim --no-load-rng --finetune --fp16 --apply-query-key-layer-scaling
    --attention-softmax-in-fp32 --fp32-allreduce --hysteresis --loss-scale --loss-scale-window
    --min-scale --fp16-lm-cross-entropy --model-parallel-size --pipe-parallel-size
    --distributed-backend --DDP-impl --local_rank --lazy-mpu-init --use-cpu-initialization
    --eval-iters --eval-interval --data-path --split --vocab-file --merge-file --seq-length
    --enc-seq-length --dec-seq-length --mask-prob --short-seq-prob --mmap-warmup --num-workers
    --tokenizer-type --data-impl --reset-position-ids --reset-attention-mask --eod-mask-loss
    --adlr-autoresume --adlr-autoresume-interval --ict-head-size --ict-load --bert-load
    --titles-data-path --query-in-block-prob --use-one-sent-docs --report-topk-accuracies
    --faiss-use-gpu --block-data-path --indexer-batch-size --indexer-log-interval --zero-stage
    --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size
    --zero-allgather-bucket-size --deepspeed-activation-checkpointing --partition-activations
    --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer --profile-backward

    GPUS_PER_NODE MASTER_ADDR MASTER_PORT NNODES NODE_RANK --deepspeed --deepspeed_config --hostfile
    initial_scale_power
"""
# What the two scripts set has to have a field.
SET = """
    GPUS_PER_NODE MASTER_ADDR MASTER_PORT NNODES NODE_RANK --model-parallel-size
    --pipe-parallel-size --num-layers --hidden-size --kv-hidden-size --ff-hidden-size
    --num-attention-heads --seq-length --enc-seq-length --dec-seq-length --max-position-embeddings
    --batch-size --gas --train-iters --lr-decay-iters --save --data-path --vocab-file --split --lr
    --lr-decay-style --min-lr --weight-decay --clip-grad --warmup --checkpoint-activations
    --checkpoint-num-layers --partition-activations --log-interval --save-interval --eval-interval
    --eval-iters --fp16 --tensorboard-dir --deepspeed_config --loss-scale --loss-scale-window
    --hysteresis --min-scale initial_scale_power
"""
TABLE = {name: entry for group in ARGUMENTS.values() for name, entry in group.items()}


def test_every_old_argument_is_there_once() -> None:
    assert sum(len(group) for group in ARGUMENTS.values()) == len(TABLE)
    assert set(TABLE) == set(OLD.split())
    assert all(TABLE[name].fields for name in SET.split())
    assert all(entry.fields or entry.note for entry in TABLE.values())


def has_field(config: Any, path: str) -> bool:
    for name in path.split("."):
        if not dataclasses.is_dataclass(config) or not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_every_field_exists(family: str) -> None:
    config = RECIPES[f"{family}-pretrain"].config()
    for name, entry in TABLE.items():
        for path in entry.fields:
            if path.startswith("--"):
                assert path in OPTIONS
            elif entry.only in ("", family):
                assert has_field(config, path), f"{name}: {family}-pretrain has no {path}"


def test_the_page_is_up_to_date() -> None:
    """Run dev/cpm_pretrain_table.py after changing the table."""
    file = ROOT / "dev" / "cpm_pretrain_table.py"
    spec = importlib.util.spec_from_file_location("cpm_pretrain_table", file)
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    text = writer.PAGE.read_text("utf-8")
    assert writer.page(text) == text
    assert "`--kv-hidden-size` | `model.head_dim`" in text
