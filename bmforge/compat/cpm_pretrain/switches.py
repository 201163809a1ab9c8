"""CPM-Pretrain's arguments without values, and the defaults of the other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULTS", "SWITCHES"]

_NAMES = """
    --apply-residual-connection-post-layernorm --openai-gelu --checkpoint-activations
    --distribute-checkpointed-activations --scaled-upper-triang-masked-softmax-fusion
    --scaled-masked-softmax-fusion --bias-gelu-fusion --bias-dropout-fusion --hidden-bias
    --cpu-optimizer --cpu_torch_adam --override-lr-scheduler --use-checkpoint-lr-scheduler
    --no-save-optim --no-save-rng --no-load-optim --no-load-rng --finetune --fp16
    --apply-query-key-layer-scaling --attention-softmax-in-fp32 --fp32-allreduce
    --fp16-lm-cross-entropy --use-cpu-initialization --mmap-warmup --reset-position-ids
    --reset-attention-mask --eod-mask-loss --adlr-autoresume --deepspeed --zero-reduce-scatter
    --zero-contigious-gradients --deepspeed-activation-checkpointing --partition-activations
    --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer --profile-backward
    --report-topk-accuracies --use-one-sent-docs --faiss-use-gpu
"""
SWITCHES = frozenset(_NAMES.split())
# What its parser took where nothing was said, as far as ours takes something else.
DEFAULTS: Mapping[str, Any] = {
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--weight-decay": 0.01,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--lr-decay-style": "linear",
    "--warmup": 0.01,
    "--seed": 1234,
    "--min-lr": 0.0,
    "--hysteresis": 2,
    "--loss-scale-window": 1000,
    "--eval-interval": 1000,
    "--eval-iters": 100,
    "--log-interval": 100,
    "--split": "969,30,1",
    "--gas": 1,
    "--model-parallel-size": 1,
    "--pipe-parallel-size": 0,
    "--make-vocab-size-divisible-by": 128,
}
