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
    "GPUS_PER_NODE": _to("--nproc-per-node", note="of torchrun"),
    "NNODES": _to("--nnodes", note="of torchrun"),
    "NODE_RANK": _to("--node-rank", note="of torchrun"),
    "MASTER_ADDR": _to("--master-addr", note="of torchrun"),
    "MASTER_PORT": _to("--master-port", note="of torchrun"),
    "--hostfile": _gone("start torchrun on every node, or use Slurm: see layouts.md"),
    "--deepspeed": _gone("there is one engine"),
    "--deepspeed_config": _to("--ds-config", note="read where there is a pipeline"),
    "--local_rank": _gone("torchrun tells it in the environment"),
    "--distributed-backend": _gone("follows from the device"),
    "--DDP-impl": _gone("there is one engine; layout.zero=0 replicates"),
    "--lazy-mpu-init": _gone("weights are always initialized after the layout is known"),
    "--use-cpu-initialization": _gone("weights do not depend on device or layout"),
}
_PARALLEL = {
    "--model-parallel-size": _to("layout.tp"),
    "--pipe-parallel-size": _to("layout.pp", note="0 becomes 1"),
    "--zero-stage": _to("layout.zero", note="0, 2 or 3; 1 becomes 2"),
    "--zero-reduce-scatter": _gone("always"),
    "--zero-contigious-gradients": _gone("always"),
    "--zero-reduce-bucket-size": _gone("one bucket per block"),
    "--zero-allgather-bucket-size": _gone("one bucket per block; see prefetch"),
}
_MODEL = {
    "--num-layers": _to("model.num_layers"),
    "--hidden-size": _to("model.hidden_size"),
    "--kv-hidden-size": _to(
        "model.head_dim", note="width of one head; not set: hidden_size / num_heads"
    ),
    "--ff-hidden-size": _to("model.intermediate_size"),
    "--num-attention-heads": _to("model.num_heads"),
    "--max-position-embeddings": _to("model.max_seq_len"),
    "--make-vocab-size-divisible-by": _to(
        "model.vocab_size", note="any size is cut; give the padded one to keep the shapes"
    ),
    "--layernorm-epsilon": _to("model.norm_eps"),
    "--attention-dropout": _to(
        "model.attn_dropout", note="a T5 has one number, model.dropout", only="gpt2"
    ),
    "--hidden-dropout": _to("model.dropout", note="0 here, 0.1 there"),
    "--init-method-std": _to("model.init_std", note="of a T5 a factor on the paper's"),
    "--openai-gelu": _to(
        "model.activation", note="gelu_new (this one, the default) or gelu", only="gpt2"
    ),
    "--hidden-bias": _to("model.bias", note="a GPT-2 has them unless it is false", only="gpt2"),
    "--apply-residual-connection-post-layernorm": _gone("a GPT-2 is pre-norm"),
    "--num-unique-layers": _gone("layers do not share weights"),
    "--param-sharing-style": _gone("layers do not share weights"),
    "--onnx-safe": _gone("not needed"),
}
_TRAINING = {
    "--batch-size": _to("data.micro_batch_size"),
    "--gas": _to("data.grad_accum_steps", note="or data.global_batch_size itself"),
    "--train-iters": _to("train.steps"),
    "--lr": _to("train.optim.lr"),
    "--lr-decay-style": _to("train.schedule.kind"),
    "--lr-decay-iters": _to("train.schedule.total_steps"),
    "--min-lr": _to("train.schedule.min_lr_ratio", note="min-lr / lr"),
    "--warmup": _to("train.schedule.warmup_steps", note="warmup x lr-decay-iters, in steps"),
    "--override-lr-scheduler": _gone("what may change in a run's directory is in training.md"),
    "--use-checkpoint-lr-scheduler": _gone("a schedule depends on the step alone"),
    "--weight-decay": _to("train.optim.weight_decay"),
    "--adam-beta1": _to("train.optim.betas", note="the first; 0.9 in both"),
    "--adam-beta2": _to("train.optim.betas", note="the second; 0.95 here, 0.999 there"),
    "--adam-eps": _to("train.optim.eps"),
    "--clip-grad": _to("train.grad_clip", note="0 becomes None"),
    "--seed": _to("seed", "data.seed", "train.seed", note="of weights, order and dropout"),
    "--exit-interval": _gone("SIGTERM or Ctrl-C saves and ends a run"),
    "--cpu-optimizer": _to("offload.fraction", note="1"),
    "--cpu_torch_adam": _to("offload.fraction", note="1"),
}
_PRECISION = {
    "--fp16": _to("train.precision", note="fp16"),
    "--loss-scale": _to("loss_scale.fixed", note="not set: adapted"),
    "--loss-scale-window": _to("loss_scale.growth_interval_steps", note="2000 here, 1000 there"),
    "--hysteresis": _to("loss_scale.hysteresis", note="1 here, 2 there"),
    "--min-scale": _to("loss_scale.min_scale"),
    "initial_scale_power": _to("loss_scale.init_scale", note="2 to that power; in ds_config"),
    "--fp32-allreduce": _gone("gradients are always reduced in fp32"),
    "--attention-softmax-in-fp32": _gone("the kernels add up in fp32"),
    "--apply-query-key-layer-scaling": _gone("did not change the result; kept fp16 in range"),
    "--fp16-lm-cross-entropy": _gone("the loss is always in fp32"),
    "--scaled-upper-triang-masked-softmax-fusion": _gone("attention is one fused kernel"),
    "--scaled-masked-softmax-fusion": _gone("attention is one fused kernel"),
    "--bias-gelu-fusion": _to("compile", note="fuses what can be"),
    "--bias-dropout-fusion": _to("compile", note="fuses what can be"),
}
_MEMORY = {
    "--checkpoint-activations": _to("recompute"),
    "--checkpoint-num-layers": _to("recompute", note="of every block"),
    "--deepspeed-activation-checkpointing": _to("recompute"),
    "--distribute-checkpointed-activations": _to("layout.sequence_parallel"),
    "--partition-activations": _to("layout.sequence_parallel"),
    "--checkpoint-in-cpu": _to("offload.activations"),
    "--contigious-checkpointing": _gone("torch's allocator keeps memory whole"),
    "--synchronize-each-layer": _gone("a help in looking for faults; see train.profile_steps"),
    "--profile-backward": _to("train.profile_steps"),
}
_DATA = {
    "--data-path": _to("data.paths"),
    "--split": _to("data.split", note="949,50,1 becomes 949 50 1"),
    "--data-impl": _gone("mmap; lazy and cached stores have to be rewritten"),
    "--mmap-warmup": _gone("pages are read when they are needed"),
    "--vocab-file": _to("data.tokenizer", note="the directory"),
    "--merge-file": _to("data.tokenizer", note="the directory"),
    "--tokenizer-type": _gone("follows from the directory's files"),
    "--seq-length": _to("data.seq_len", note="a row has T tokens, there T + 1"),
    "--enc-seq-length": _to("data.seq_len", only="t5"),
    "--dec-seq-length": _to("target_len", only="t5"),
    "--mask-prob": _to("noise_density", only="t5"),
    "--short-seq-prob": _gone("only BERT's data had it"),
    "--reset-position-ids": _to("data.reset_at_documents", only="gpt2"),
    "--reset-attention-mask": _to("data.reset_at_documents", only="gpt2"),
    "--eod-mask-loss": _to("data.reset_at_documents", only="gpt2"),
    "--num-workers": _to("data.prefetch_steps", note="one thread reads ahead", only="gpt2"),
}
_SAVING = {
    "--save": _to("run_dir", note="checkpoints, log and metrics"),
    "--save-interval": _to("train.save_every_steps"),
    "--load": _to("run_dir", note="a run goes on by itself"),
    "--finetune": _to("init_from", note="weights alone, from step 0"),
    "--no-load-optim": _to("init_from"),
    "--no-load-rng": _to("init_from"),
    "--no-save-optim": _to("export", note="the weights alone"),
    "--no-save-rng": _gone("a checkpoint is always whole"),
    "--log-interval": _to("train.log_every_steps"),
    "--tensorboard-dir": _to("run_dir", note="its tensorboard folder"),
    "--eval-interval": _to("train.eval_every_steps"),
    "--eval-iters": _to("data.validation_batches"),
}
_REALM = """
    --ict-head-size --ict-load --bert-load --titles-data-path --query-in-block-prob
    --use-one-sent-docs --report-topk-accuracies --faiss-use-gpu --block-data-path
    --indexer-batch-size --indexer-log-interval
"""
_OTHER = {
    "--adlr-autoresume": _gone("a run goes on by itself"),
    "--adlr-autoresume-interval": _gone("a run goes on by itself"),
    **dict.fromkeys(_REALM.split(), _gone("of REALM, which CPM-Pretrain did not train")),
}

ARGUMENTS: Mapping[str, Mapping[str, Argument]] = {
    "Starting": _LAUNCH,
    "Parallelism": _PARALLEL,
    "Model": _MODEL,
    "Training": _TRAINING,
    "Precision": _PRECISION,
    "Memory": _MEMORY,
    "Data": _DATA,
    "Saving and evaluating": _SAVING,
    "Programs that are not here": _OTHER,
}
