"""Options of the commands, as `--help` shows them. Nothing heavy is imported here.

Options of `train` are the fields of its recipes' configs; see `train.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bmforge.serve.settings import ServeConfig
from bmforge.settings import (
    EvaluateConfig,
    MemoryOptions,
    TalkConfig,
)

__all__ = [
    "ChatCommand",
    "CompletionCommand",
    "ConvertCommand",
    "DoctorCommand",
    "QuantizeCommand",
    "EvaluateCommand",
    "GenerateCommand",
    "InfoCommand",
    "MergeCommand",
    "MigrateCommand",
    "PlanCommand",
    "ReportCommand",
    "ServeCommand",
]

Inputs = Annotated[tuple[str, ...], tyro.conf.Positional]
Memory = Annotated[MemoryOptions, tyro.conf.arg(name="")]


@dataclass(kw_only=True)
class GenerateCommand:
    """Continue a text, or fill the answers of documents.

    Sampling options that are not given are those of the model's generation_config.json.

    Args:
        model: directory or hub id of a model with its tokenizer.
        prompt: the text; none reads standard input.
        chat: render the prompt with the model's chat template and print the answer alone.
        document: file for CPM-Bee with one document per line, {"input": "...", "<ans>": ""},
            which are printed with their answers.
        max_new_tokens: maximum number of new tokens; for documents, per answer.
        min_new_tokens: minimum number of new tokens before an end token.
        num_beams: number of beams of a beam search; 1 is none (default 1; CPM-Ant and CPM-Bee: 3).
        length_penalty: exponent of the length by which beam scores are divided (default 1).
        num_return_sequences: number of continuations; needs sampling or as many beams (default 1).
        do_sample: sample instead of greedy decoding (default off; on for CPM-1).
        temperature: sampling temperature (default 1; CPM-1 and CPM-Ant: 0.9).
        top_k: sample from the k most probable tokens.
        top_p: sample from the most probable tokens whose probabilities sum to this (default 1;
            CPM-Ant: 0.9).
        min_p: sample from tokens with at least this fraction of the highest probability.
        repetition_penalty: above 1, tokens that occurred become less probable (default 1).
        presence_penalty: subtracted from the score of every token that was generated before.
        frequency_penalty: subtracted from a token's score once per time it was generated.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice.
        stop_strings: texts in front of which the continuation ends.
        seed: random seed of sampling.
        adapter: adapter directories to attach to the model; DIR=0.5 scales one.
        memory: how much memory the model may take.
    """

    model: Annotated[str, tyro.conf.Positional]
    prompt: str | None = None
    chat: bool = False
    document: Path | None = None
    max_new_tokens: int = 100
    min_new_tokens: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    num_return_sequences: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    adapter: tuple[str, ...] = ()
    memory: Memory = field(default_factory=MemoryOptions)

    def options(self) -> dict[str, Any]:
        """Return the given fields of `GenerationConfig`."""
        others = {"model", "prompt", "chat", "document", "seed", "adapter", "memory"}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items()
                if name not in others and value not in (None, ())}  # fmt: skip


@dataclass(kw_only=True)
class ChatCommand:
    """Talk to a model in the terminal; /help lists the commands.

    Args:
        model: directory, hub id or short name of a model that generates text, a run's directory, or
            an adapter directory.
        config: how it answers.
        adapter: adapter directories to attach to the model; DIR=0.5 scales one.
        hide_thoughts: leave out the text between <think> and </think>.
        memory: memory limits of the model.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[TalkConfig, tyro.conf.arg(name="")] = field(default_factory=TalkConfig)
    adapter: tuple[str, ...] = ()
    hide_thoughts: bool = False
    memory: Memory = field(default_factory=MemoryOptions)


@dataclass(kw_only=True)
class ServeCommand:
    """Serve a model with an OpenAI-compatible API and a chat page.

    Args:
        model: directory, hub id or short name of a model, with its tokenizer.
        config: address and limits of the server.
        adapter: adapter directories to attach to the model; DIR=0.5 scales one. NAME=DIR lets
            requests select an adapter by model name; other requests use the base model.
        context: maximum number of tokens of prompt and answer; none takes the model's maximum
            sequence length, or as much of it as fits into memory.
        max_num_seqs: maximum number of concurrent sequences; further requests wait.
        speculate: speculative decoding with tokens guessed by n-gram lookup.
        draft: small draft model with the same vocabulary for speculative decoding.
        embedding_model: second model for embeddings, within the same memory budget.
        unload_after_s: seconds without a request after which the model is unloaded; the next
            request loads it again.
        memory: memory limits of the model.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[ServeConfig, tyro.conf.arg(name="")] = field(default_factory=ServeConfig)
    adapter: tuple[str, ...] = ()
    context: int | None = None
    max_num_seqs: int = 16
    speculate: bool = False
    draft: str | None = None
    embedding_model: str | None = None
    unload_after_s: float | None = None
    memory: Memory = field(default_factory=MemoryOptions)


@dataclass(kw_only=True)
class EvaluateCommand:
    """Evaluate a model on texts and tasks; --layout.* parallelizes it, as in `train`.

    Args:
        model: directory or hub id of a model, a run's directory, or a preset with --weights.
        config: texts and tasks to evaluate on.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[EvaluateConfig, tyro.conf.arg(name="")] = field(
        default_factory=EvaluateConfig
    )


@dataclass(kw_only=True)
class ConvertCommand:
    """Convert a checkpoint to Hugging Face's format, or to a GGUF file.

    Args:
        source: directory, hub id or short name: a Hugging Face model, or ModelCenter's
            pytorch_model.pt with its config.json, or Megatron's shards (CPM-1, CPM-2, EVA); or a
            GGUF file.
        target: directory to write, or a file that ends in .gguf.
        type: tensor type of the matrices in a GGUF file (default: q8_0).
        dtype: dtype of the weights; none keeps the file's.
        max_file_gb: maximum size of a weight file (1e9 bytes).
        family: family of a ModelCenter checkpoint, if its tensors are ambiguous.
        allow_unknown: unknown config fields to accept and ignore.
        preset: model size of Megatron's shards, if their shapes are ambiguous.
        megatron_degree: number of Megatron shards to write instead.
    """

    source: Annotated[str, tyro.conf.Positional]
    target: Annotated[Path, tyro.conf.Positional]
    type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    max_file_gb: float = 4.0
    family: str | None = None
    allow_unknown: tuple[str, ...] = ()
    preset: str | None = None
    megatron_degree: int | None = None


@dataclass(kw_only=True)
class QuantizeCommand:
    """Write a model with weights quantized to packed integers.

    Args:
        source: directory or hub id of a Hugging Face model, or a GGUF file.
        target: directory to write.
        scheme: int8 and int4 have a scale for every 32 columns, int4-128 for every 128, and
            int8-dynamic for every row; keep takes the integers of a GGUF file, of GPTQ or of AWQ.
        float_activations: keep activations in floating point instead of rounding them to int8.
        outlier_ratio: share of the input columns with the largest error that stays in 16 bits; not
            for models with experts.
        dtype: dtype of the unquantized weights; none keeps the file's.
        max_file_gb: maximum size of a weight file (1e9 bytes).
        allow_unknown: unknown config fields to accept and ignore.
        report: text files or directories to evaluate both models on afterwards.
    """

    source: Annotated[str, tyro.conf.Positional]
    target: Annotated[Path, tyro.conf.Positional]
    scheme: Literal["int8", "int8-dynamic", "int4", "int4-128", "keep"] = "int4"
    float_activations: bool = False
    outlier_ratio: float = 0.0
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    max_file_gb: float = 4.0
    allow_unknown: tuple[str, ...] = ()
    report: tuple[str, ...] = ()


@dataclass(kw_only=True)
class MergeCommand:
    """Merge an adapter into its base model and write a plain model directory.

    Args:
        adapter: adapter directory, or the directory of a run that trained one.
        out: directory to make.
        base: base model: directory, hub id or short name (default: the one that the adapter names).
            Give the 16-bit model if the adapter was trained on a quantized one.
        dtype: dtype of the written weights (default: the base's).
    """

    adapter: Annotated[str, tyro.conf.Positional]
    out: Path
    base: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None


@dataclass(kw_only=True)
class CompletionCommand:
    """Print a script with which a shell completes commands, tasks and options.

    Bash: add `eval "$(bmforge completion bash)"` to ~/.bashrc. Zsh: the same with zsh, in ~/.zshrc
    after compinit. Fish: `bmforge completion fish | source`, in config.fish.

    Args:
        shell: name of the shell.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


@dataclass(kw_only=True)
class DoctorCommand:
    """Show versions, device, threads, memory and extras of this installation, and what is missing.

    Args:
        json: print JSON instead of a table.
    """

    json: bool = False


@dataclass(kw_only=True)
class MigrateCommand:
    """Convert a start script of CPM-Pretrain, or a config of OpenPrompt, to the config of a run.

    Args:
        script: run_gpt2.sh or run_t5.sh, or a whole command line in quotes, neither of which is
            executed; or a .yaml of OpenPrompt.
        out: TOML file to write (default: the script's name with .toml, in this directory).
    """

    script: Annotated[str, tyro.conf.Positional]
    out: Path | None = None


@dataclass(kw_only=True)
class ReportCommand:
    """Write a run's report page.

    Args:
        run: directory of the run.
    """

    run: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class InfoCommand:
    """Describe a model.

    Args:
        name: name of a preset, or a model directory.
        seq_len: row length in tokens for the FLOPs of attention; none takes the longest context.
        json: print JSON: the config and the measurements, or an adapter's config.
        backend: implementation of the architecture: native for the families of bmforge,
            transformers for that library, auto for a native family if there is one.
    """

    name: Annotated[str, tyro.conf.Positional]
    seq_len: int | None = None
    json: bool = False
    backend: Literal["auto", "native", "transformers"] = "auto"


@dataclass(kw_only=True)
class PlanCommand:
    """Estimate which parallel layouts of a model fit on given GPUs, and their speed.

    Args:
        model: name of a preset, or a model directory.
        task: task whose step is planned. A row of preferences and reward is a pair of answers; rl
            and distill write rollouts.
        reference: reference model of preferences, or of rl with rl.beta above 0: adapter (the base
            with the adapter off), copy or precomputed; none takes that of the task's default.
        teacher: model of --task distill: a preset, or a model directory.
        max_num_seqs: answers that rl and distill write at once (default: 64).
        set: fields of the model's config to change, field=value each.
        changes: changes of the model: JSON or a file, as in `train`.
        freeze_base: train only the modules added by changes.
        adapter: train an adapter of this kind, such as lora, on all linear layers.
        adapter_rank: rank of the adapter (default: 8).
        base_dtype: quantize the frozen base of the adapter (QLoRA); none keeps the precision.
        gpus: number of GPUs.
        gpu: GPU model; an unknown one needs gpu_memory and gpu_tflops.
        gpu_memory: memory of a GPU in GiB; replaces the table's.
        gpu_tflops: dense half-precision peak of a GPU; replaces the table's.
        gpus_per_node: GPUs per node.
        interconnect: network between nodes: a name such as ib-200, or Gb/s per GPU.
        host_memory: host memory of a node in GiB, for offloading.
        batch: rows per optimizer step over all GPUs; none plans the same number per GPU, at least 8
            in all.
        seq: tokens of a row; none takes the model's maximum, at most 4,096.
        precision: computation precision; none takes bf16 if the GPU supports it, else fp16.
        offload: allow offloading of the optimizer.
        compile: compile the blocks.
        tokens: training tokens, for hours and cost.
        price: price of one GPU hour.
        currency: currency of the price.
        rows: number of table rows.
        plot: SVG file for a memory chart of these rows.
        json: print all estimates as JSON, in bytes and seconds.
    """

    model: Annotated[str, tyro.conf.Positional]
    task: Literal["pretrain", "conversations", "preferences", "reward", "rl", "distill"] = (
        "pretrain"
    )
    reference: Literal["adapter", "copy", "precomputed"] | None = None
    teacher: str | None = None
    max_num_seqs: int | None = None
    set: tuple[str, ...] = ()
    changes: str | None = None
    freeze_base: bool = False
    adapter: str | None = None
    adapter_rank: int | None = None
    base_dtype: Literal["int8", "int4"] | None = None
    gpus: int = 1
    gpu: str = "a100-80gb"
    gpu_memory: float | None = None
    gpu_tflops: float | None = None
    gpus_per_node: int = 8
    interconnect: str = "ib-200"
    host_memory: float = 1024.0
    batch: int | None = None
    seq: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    offload: bool = True
    compile: bool = False
    tokens: float | None = None
    price: float | None = None
    currency: str = "USD"
    rows: int = 12
    plot: Path | None = None
    json: bool = False
