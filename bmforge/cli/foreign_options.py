"""Suggests a bmforge option for an unknown one, such as an option of TRL or llama.cpp.

The tables map each option of a command to the names that it has in TRL, transformers, PEFT,
LLaMA-Factory, Unsloth and DeepSpeed (training), and in vLLM, llama.cpp, lm-eval and Megatron (the
other commands).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bmforge.errors import suggest

__all__ = ["FOREIGN_COMMANDS", "FOREIGN_OPTIONS", "suggest_command", "suggest_option"]

_MODEL = "model model-name-or-path model-name model-path model-id pretrained"
_ADAPTER = "lora lora-path adapter-name-or-path adapter-path peft-model peft"
_LENGTH = "max-length max-seq-length max-seq-len max-model-len cutoff-len context-length block-size"
_DTYPE = "torch-dtype dtype precision"
_OUT = "output output-dir output-path outfile export-dir save-path save-dir out"

# Command of bmforge, and names under which users look for it.
FOREIGN_COMMANDS = {
    "prepare": "tokenizer tokenize train-tokenizer preprocess preprocess-data clean dedup",
    "data collect": "collect crawl scrape download",
    "data explain": "explain",
    "data quality": "quality",
    "data show": "show",
    "data verify": "verify",
    "train": "pretrain finetune fine-tune sft dpo grpo rl lora",
    "evaluate": "eval lm-eval lm_eval benchmark",
    "generate": "infer inference",
    "serve": "server api-server",
    "convert": "export",
}

# Option of bmforge, possibly with a value, and its names elsewhere.
_TRAIN = {
    "model": f"{_MODEL} base-model",
    "data": "dataset dataset-name dataset-path dataset-dir train-file train-data data-path",
    "data.validation": "eval-dataset validation-file eval-file val-data",
    "data.validation-fraction": "val-size validation-split-percentage test-size",
    "run-dir": f"{_OUT} resume-from-checkpoint logging-dir",
    "epochs": "num-train-epochs num-epochs train-epochs max-epochs n-epochs",
    "steps": "max-steps train-steps num-steps train-iters max-iters",
    "lr": "learning-rate",
    "batch-size": "train-batch-size total-batch-size",
    "micro-batch-size": "per-device-train-batch-size per-device-eval-batch-size "
    "per-device-batch-size train-micro-batch-size-per-gpu",
    "data.grad-accum-steps": "gradient-accumulation-steps grad-acc accumulation-steps",
    "seq-len": f"{_LENGTH} max-prompt-length model-max-length",
    "precision": f"{_DTYPE} mixed-precision",
    "precision bf16": "bf16",
    "precision fp16": "fp16",
    "recompute": "gradient-checkpointing use-gradient-checkpointing activation-checkpointing",
    "compile": "torch-compile",
    "seed": "random-state random-seed data-seed",
    "template": "chat-template chat-template-path",
    "ds-config": "deepspeed",
    "layout.zero": "fsdp zero-stage zero",
    "layout.tp": "tensor-parallel-size tensor-model-parallel-size tp-size tp",
    "layout.pp": "pipeline-parallel-size pipeline-model-parallel-size pp-size pp",
    "layout.cp": "context-parallel-size cp-size sequence-parallel-size cp",
    "layout.ep": "expert-parallel-size expert-model-parallel-size ep-size ep",
    "push-to-hub": "hub-model-id",
    "wandb-project": "report-to",
    "adapter lora": "use-peft use-lora lora",
    "adapter": "finetuning-type peft-type train-type",
    "adapter.rank": "lora-r lora-rank adapter.r adapter.lora-r r rank",
    "adapter.alpha": "lora-alpha adapter.lora-alpha alpha",
    "adapter.dropout": "lora-dropout adapter.lora-dropout",
    "adapter.target-modules": "lora-target-modules lora-target target-modules",
    "adapter.modules-to-save": "lora-modules-to-save additional-target modules-to-save",
    "adapter.use-rslora": "use-rslora",
    "adapter.use-dora": "use-dora",
    "adapter.lr-ratio": "loraplus-lr-ratio loraplus-lr-multiplier",
    "base-dtype": "quantization-bit quantization-method",
    "base-dtype int4": "load-in-4bit",
    "base-dtype int8": "load-in-8bit",
    "train.optim.name": "optim optimizer",
    "train.optim.betas": "adam-beta1 adam-beta2 betas",
    "train.optim.eps": "adam-epsilon",
    "train.optim.weight-decay": "weight-decay",
    "train.schedule.kind": "lr-scheduler-type lr-scheduler lr-decay-style",
    "train.schedule.warmup-steps": "warmup-steps warmup-ratio lr-warmup-iters num-warmup-steps",
    "train.grad-clip": "max-grad-norm clip-grad gradient-clipping",
    "train.log-every-steps": "logging-steps log-interval",
    "train.save-every-steps": "save-steps save-interval save-strategy",
    "train.keep-last": "save-total-limit",
    "train.eval-every-steps": "eval-steps eval-interval eval-strategy evaluation-strategy",
    "method": "loss-type pref-loss rl-algorithm advantage-estimator",
    "beta": "pref-beta dpo-beta kto-beta",
    "nll-weight": "rpo-alpha cpo-alpha pref-ftx",
    "label-smoothing": "label-smoothing-factor dpo-label-smoothing",
    "desirable-weight": "kto-chosen-weight",
    "undesirable-weight": "kto-rejected-weight",
    "reference": "ref-model ref-model-name-or-path",
    "reference precomputed": "precompute-ref-log-probs",
    "reward": "reward-funcs reward-func reward-model reward-model-name-or-path reward-model-path",
    "teacher": "teacher-model teacher-model-name-or-path",
    "distill-top-k": "loss-top-k distill.top-k",
    "rl.beta": "beta kl-coef init-kl-coef",
    "rl.clip-low": "epsilon cliprange eps-clip",
    "rl.clip-high": "epsilon-high",
    "rl.ratio": "importance-sampling-level",
    "rl.advantage": "scale-rewards",
    "rollout.max-new-tokens": "max-new-tokens",
}
_MEMORY = {
    "quantize": "quantization load-in-kbit",
    "quantize int8": "load-in-8bit",
    "quantize int4": "load-in-4bit",
    "device-budget": "gpu-memory-utilization max-memory",
    "adapter": f"{_ADAPTER} lora-modules enable-lora",
}
_GENERATE = {
    **_MEMORY,
    "model": _MODEL,
    "max-new-tokens": "max-length n-predict num-predict max-completion-tokens max-gen-toks",
    "temperature": "temp",
    "repetition-penalty": "repeat-penalty",
}
# Other spellings of the options, or of the arguments without a name, of each command.
FOREIGN_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "train": _TRAIN,
    "generate": {
        **_GENERATE,
        "prompt": "text input query",
        "num-return-sequences": "n num-samples",
        "stop-strings": "stop stop-sequences",
        "num-beams": "beam-size beams",
    },
    "chat": {**_GENERATE, "system": "system-prompt default-system"},
    "serve": {
        **_MEMORY,
        "model": _MODEL,
        "name": "served-model-name model-name alias",
        "context": f"{_LENGTH} ctx-size n-ctx",
        "keys-file": "api-key api-keys api-key-file",
        "devices": "tensor-parallel-size tp-size device-ids",
        "draft": "speculative-model draft-model model-draft",
        "speculate": "num-speculative-tokens speculative-config",
        "max-num-seqs": "parallel n-parallel max-batch-size max-running-requests",
        "tool-call-parser": "enable-auto-tool-choice",
        "split-reasoning": "reasoning-parser enable-reasoning",
        "log-requests": "enable-log-requests disable-log-requests",
        "allow-runtime-lora-updating": "enable-runtime-lora-updating",
    },
    "evaluate": {
        "model": _MODEL,
        "seq-len": _LENGTH,
        "micro-batch-size": "batch-size per-device-eval-batch-size",
        "text": "data dataset data-path",
        "tasks": "task",
        "examples": "limit max-samples num-examples",
        "max-new-tokens": "max-gen-toks max-completion-length",
        "precision": _DTYPE,
        "out": _OUT,
    },
    "plan": {
        "model": _MODEL,
        "seq": f"seq-len {_LENGTH}",
        "batch": "batch-size global-batch-size train-batch-size",
        "adapter": "finetuning-type peft-type",
        "adapter-rank": "lora-r lora-rank adapter.r adapter.rank rank",
        "base-dtype": "quantization-bit",
        "base-dtype int4": "load-in-4bit",
        "base-dtype int8": "load-in-8bit",
        "precision": _DTYPE,
        "gpus": "num-gpus n-gpus world world-size nproc-per-node",
    },
    "prepare": {
        "input": "data dataset train-file files input-files",
        "out": f"{_OUT} output-prefix",
        "text-field": "json-keys text-column dataset-text-field",
        "workers": "num-workers num-proc preprocessing-num-workers",
        "tokenizer": "tokenizer-name tokenizer-name-or-path tokenizer-model vocab-file",
        "validation-fraction": "val-size test-size validation-split-percentage",
    },
    "data collect": {
        "urls": "url input start-urls seeds",
        "out": f"{_OUT} directory-prefix warc-file",
        "most-pages": "max-pages limit pages max-requests",
        "most-bytes": "max-bytes quota",
        "most-page-bytes": "max-filesize max-size",
        "delay-s": "delay wait download-delay rate-limit",
        "page-seconds": "timeout max-time",
        "agent": "user-agent ua",
        "hosts": "domains allowed-domains domain host span-hosts",
    },
    "merge": {
        "adapter": _ADAPTER,
        "base": f"{_MODEL} base-model base-model-name-or-path",
        "out": _OUT,
        "dtype": _DTYPE,
    },
    "convert": {
        "source": f"{_MODEL} input checkpoint",
        "target": _OUT,
        "type": "outtype ftype",
        "dtype": _DTYPE,
        "max-file-gb": "max-shard-size",
    },
    "quantize": {
        "source": f"{_MODEL} input",
        "target": _OUT,
        "scheme": "bits w-bit wbits quantization quant-method qtype group-size",
        "scheme int4": "load-in-4bit",
        "scheme int8": "load-in-8bit",
        "dtype": _DTYPE,
        "max-file-gb": "max-shard-size",
    },
    "compress": {"model": _MODEL, "out": _OUT, "recipe": "config recipe-path"},
    "info": {"name": _MODEL, "seq-len": _LENGTH},
    "tree": {"model": _MODEL, "adapter": _ADAPTER},
}


def suggest_command(name: str, commands: Collection[str]) -> str:
    """Return advice for an unknown command, with a space before it; "" if none is similar."""
    for command, names in FOREIGN_COMMANDS.items():
        if name in names.split():
            return f" Did you mean {command!r}?"
    return suggest(name, commands)


def suggest_option(
    command: str, name: str, options: Collection[str], positional: Collection[str] = ()
) -> str:
    """Return advice for an unknown option, with a space before it; "" if none is similar.

    The suggestion is the option that has this name in another program; else the only option that
    ends with the name; else the option with the most similar name.

    Args:
        command: name of the command, possibly with its task: "train rl".
        name: unknown option, with dashes.
        options: options of the command, with dashes.
        positional: names of the command's positional arguments.
    """
    bare = name.removeprefix("--")
    command = command if command in FOREIGN_OPTIONS else command.partition(" ")[0]
    for option, names in FOREIGN_OPTIONS.get(command, {}).items():
        word = option.partition(" ")[0]
        if bare in names.split() and f"--{word}" in options:
            return f" Did you mean '--{option}'?"
        if bare in (*names.split(), word) and word in positional:
            return f" Pass it without a name: bmforge {command} {word.upper()}."
    endings = [name for name in options if name.endswith(f".{bare}")]
    if len(endings) == 1:
        return f" Did you mean {endings[0]!r}?"
    return suggest(name, options)
