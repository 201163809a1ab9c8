"""Table of the arguments of CPM-Pretrain's two programs, with their replacements.

`docs/migrating/cpm_pretrain.md` shows this table. Arguments that Megatron's parser has for other
programs (REALM's retrieval, an autoresume service) are listed without a field.
Source: ``megatron/arguments.py``, ``run_gpt2.sh`` and ``run_t5.sh`` of TsinghuaAI/CPM-1-Pretrain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ARGUMENTS", "Argument"]


@dataclass(frozen=True)
class Argument:
    """Replacement of one argument of CPM-Pretrain.

    Args:
        fields: paths of the recipe's config fields; a name that begins with ``--`` is an option of
            `bmforge train`, or of torchrun if `note` says so. Empty: none.
        note: how the value changes, or why there is no field.
        only: "gpt2" or "t5" if only that recipe has the fields.
    """

    fields: tuple[str, ...] = ()
    note: str = ""
    only: str = ""


def _to(*fields: str, note: str = "", only: str = "") -> Argument:
    return Argument(fields, note, only)


def _gone(note: str) -> Argument:
    return Argument((), note)


_LAUNCH = {
    "GPUS_PER_NODE": _to("--nproc-per-node", note="option of torchrun"),
    "NNODES": _to("--nnodes", note="option of torchrun"),
    "NODE_RANK": _to("--node-rank", note="option of torchrun"),
    "MASTER_ADDR": _to("--master-addr", note="option of torchrun"),
    "MASTER_PORT": _to("--master-port", note="option of torchrun"),
    "--hostfile": _gone("start torchrun on every node, or use Slurm; see layouts.md"),
    "--deepspeed": _gone("bmforge has one engine"),
    "--deepspeed_config": _to("--ds-config", note="used with a pipeline"),
    "--local_rank": _gone("set by torchrun in the environment"),
    "--distributed-backend": _gone("determined by the device"),
    "--DDP-impl": _gone("bmforge has one engine; layout.zero=0 replicates"),
    "--lazy-mpu-init": _gone("weights are always initialized after the layout is known"),
    "--use-cpu-initialization": _gone("weights do not depend on device or layout"),
}
_PARALLEL = {
    "--model-parallel-size": _to("layout.tp"),
    "--pipe-parallel-size": _to("layout.pp", note="0 becomes 1"),
    "--zero-stage": _to("layout.zero", note="0, 2 or 3; 1 becomes 2"),
    "--zero-reduce-scatter": _gone("always on"),
    "--zero-contigious-gradients": _gone("always on"),
    "--zero-reduce-bucket-size": _gone("one bucket per block"),
    "--zero-allgather-bucket-size": _gone("one bucket per block; see prefetch"),
}
_MODEL = {
    "--num-layers": _to("model.num_layers"),
    "--hidden-size": _to("model.hidden_size"),
    "--kv-hidden-size": _to(
        "model.head_dim", note="size of one head (default: hidden_size / num_heads)"
    ),
    "--ff-hidden-size": _to("model.intermediate_size"),
    "--num-attention-heads": _to("model.num_heads"),
    "--max-position-embeddings": _to("model.max_seq_len"),
    "--make-vocab-size-divisible-by": _to(
        "model.vocab_size", note="any size can be sharded; set the padded size to keep the shapes"
    ),
    "--layernorm-epsilon": _to("model.norm_eps"),
    "--attention-dropout": _to(
        "model.attn_dropout", note="a T5 has only model.dropout", only="gpt2"
    ),
    "--hidden-dropout": _to("model.dropout", note="default 0, in CPM-Pretrain 0.1"),
    "--init-method-std": _to("model.init_std", note="for a T5, a factor of the paper's values"),
    "--openai-gelu": _to(
        "model.activation", note="gelu_new (default, = --openai-gelu) or gelu", only="gpt2"
    ),
    "--hidden-bias": _to("model.bias", note="GPT-2 has biases unless it is false", only="gpt2"),
    "--apply-residual-connection-post-layernorm": _gone("GPT-2 is a pre-norm model"),
    "--num-unique-layers": _gone("layers do not share weights"),
    "--param-sharing-style": _gone("layers do not share weights"),
    "--onnx-safe": _gone("not needed"),
}
_TRAINING = {
    "--batch-size": _to("data.micro_batch_size"),
    "--gas": _to("data.grad_accum_steps", note="or set data.global_batch_size"),
    "--train-iters": _to("train.steps"),
    "--lr": _to("train.optim.lr"),
    "--lr-decay-style": _to("train.schedule.kind"),
    "--lr-decay-iters": _to("train.schedule.total_steps"),
    "--min-lr": _to("train.schedule.min_lr_ratio", note="min-lr / lr"),
    "--warmup": _to("train.schedule.warmup_steps", note="warmup x lr-decay-iters"),
    "--override-lr-scheduler": _gone(
        "training.md lists the settings that a resumed run may change"
    ),
    "--use-checkpoint-lr-scheduler": _gone("a schedule depends only on the step"),
    "--weight-decay": _to("train.optim.weight_decay"),
    "--adam-beta1": _to("train.optim.betas", note="first value; both defaults are 0.9"),
    "--adam-beta2": _to(
        "train.optim.betas", note="second value; default 0.95, in CPM-Pretrain 0.999"
    ),
    "--adam-eps": _to("train.optim.eps"),
    "--clip-grad": _to("train.grad_clip", note="0 becomes None"),
    "--seed": _to("seed", "data.seed", "train.seed", note="seeds of weights, order and dropout"),
    "--exit-interval": _gone("SIGTERM or Ctrl-C saves and stops a run"),
    "--cpu-optimizer": _to("offload.fraction", note="1"),
    "--cpu_torch_adam": _to("offload.fraction", note="1"),
}
_PRECISION = {
    "--fp16": _to("train.precision", note="fp16"),
    "--loss-scale": _to("loss_scale.fixed", note="dynamic if not set"),
    "--loss-scale-window": _to(
        "loss_scale.growth_interval_steps", note="default 2000, in CPM-Pretrain 1000"
    ),
    "--hysteresis": _to("loss_scale.hysteresis", note="default 1, in CPM-Pretrain 2"),
    "--min-scale": _to("loss_scale.min_scale"),
    "initial_scale_power": _to("loss_scale.init_scale", note="2 to this power; in ds_config"),
    "--fp32-allreduce": _gone("gradients are always reduced in fp32"),
    "--attention-softmax-in-fp32": _gone("the kernels accumulate in fp32"),
    "--apply-query-key-layer-scaling": _gone(
        "did not change the result, but avoided fp16 overflow"
    ),
    "--fp16-lm-cross-entropy": _gone("the loss is always in fp32"),
    "--scaled-upper-triang-masked-softmax-fusion": _gone("attention is one fused kernel"),
    "--scaled-masked-softmax-fusion": _gone("attention is one fused kernel"),
    "--bias-gelu-fusion": _to("compile", note="compiles fused kernels"),
    "--bias-dropout-fusion": _to("compile", note="compiles fused kernels"),
}
_MEMORY = {
    "--checkpoint-activations": _to("recompute"),
    "--checkpoint-num-layers": _to("recompute", note="applies to every block"),
    "--deepspeed-activation-checkpointing": _to("recompute"),
    "--distribute-checkpointed-activations": _to("layout.sequence_parallel"),
    "--partition-activations": _to("layout.sequence_parallel"),
    "--checkpoint-in-cpu": _to("offload.activations"),
    "--contigious-checkpointing": _gone("torch's allocator avoids fragmentation"),
    "--synchronize-each-layer": _gone("for debugging; see train.profile_steps"),
    "--profile-backward": _to("train.profile_steps"),
}
_DATA = {
    "--data-path": _to("data.paths"),
    "--split": _to("data.split", note="949,50,1 becomes 949 50 1"),
    "--data-impl": _gone("always mmap; rewrite lazy and cached stores"),
    "--mmap-warmup": _gone("pages are read on demand"),
    "--vocab-file": _to("data.tokenizer", note="the directory"),
    "--merge-file": _to("data.tokenizer", note="the directory"),
    "--tokenizer-type": _gone("determined by the files of the directory"),
    "--seq-length": _to("data.seq_len", note="a row has T tokens, in CPM-Pretrain T + 1"),
    "--enc-seq-length": _to("data.seq_len", only="t5"),
    "--dec-seq-length": _to("target_len", only="t5"),
    "--mask-prob": _to("noise_density", only="t5"),
    "--short-seq-prob": _gone("used only by BERT's data"),
    "--reset-position-ids": _to("data.reset_at_documents", only="gpt2"),
    "--reset-attention-mask": _to("data.reset_at_documents", only="gpt2"),
    "--eod-mask-loss": _to("data.reset_at_documents", only="gpt2"),
    "--num-workers": _to("data.prefetch_steps", note="one thread prefetches", only="gpt2"),
}
_SAVING = {
    "--save": _to("run_dir", note="checkpoints, log and metrics"),
    "--save-interval": _to("train.save_every_steps"),
    "--load": _to("run_dir", note="runs resume automatically"),
    "--finetune": _to("init_from", note="only the weights, from step 0"),
    "--no-load-optim": _to("init_from"),
    "--no-load-rng": _to("init_from"),
    "--no-save-optim": _to("export", note="exports only the weights"),
    "--no-save-rng": _gone("checkpoints are always complete"),
    "--log-interval": _to("train.log_every_steps"),
    "--tensorboard-dir": _to("run_dir", note="the folder tensorboard in it"),
    "--eval-interval": _to("train.eval_every_steps"),
    "--eval-iters": _to("data.validation_batches"),
}
_REALM = """
    --ict-head-size --ict-load --bert-load --titles-data-path --query-in-block-prob
    --use-one-sent-docs --report-topk-accuracies --faiss-use-gpu --block-data-path
    --indexer-batch-size --indexer-log-interval
"""
_OTHER = {
    "--adlr-autoresume": _gone("runs resume automatically"),
    "--adlr-autoresume-interval": _gone("runs resume automatically"),
    **dict.fromkeys(_REALM.split(), _gone("belongs to REALM, which CPM-Pretrain did not train")),
}

ARGUMENTS: Mapping[str, Mapping[str, Argument]] = {
    "Launch": _LAUNCH,
    "Parallelism": _PARALLEL,
    "Model": _MODEL,
    "Training": _TRAINING,
    "Precision": _PRECISION,
    "Memory": _MEMORY,
    "Data": _DATA,
    "Saving and evaluating": _SAVING,
    "Unsupported programs": _OTHER,
}
