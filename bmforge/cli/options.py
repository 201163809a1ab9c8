"""Options of the commands, as `--help` shows them. Nothing heavy is imported here.

The options of `train` are the fields of its recipes' configs; see `train.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

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
]

Inputs = Annotated[tuple[str, ...], tyro.conf.Positional]
Memory = Annotated[MemoryOptions, tyro.conf.arg(name="")]
# A group of options: it is a panel of the help, but not a prefix of the options' names.
Panel = tyro.conf.OmitArgPrefixes


@dataclass(kw_only=True)
class GenerateCommand:
    """Continue a text, answer a message with images, or fill in the answers of documents.

    Generation options that are not set default to the model's generation_config.json.

    Args:
        model: directory or hub id of the model, with its tokenizer.
        prompt: text to continue (if None: standard input).
        chat: render the prompt with the model's chat template, and print only the answer.
        image: image files that the prompt asks about; the prompt is then rendered with the chat
            template of a vision-language model, after the images.
        audio: audio file that a speech model such as Whisper transcribes, instead of a prompt.
        language: language of the audio, such as en (if None: detected).
        transcript_format: format of a transcript: text, or subtitles with times as srt or vtt (if
            None: text).
        document: file of documents for CPM-Bee, one {"input": "...", "<ans>": ""} per line;
            they are printed with their answers.
        max_new_tokens: maximum number of new tokens; with documents, per answer (if None: 100, or
            the model's maximum for audio). --max-tokens is the same option.
        min_new_tokens: minimum number of new tokens before an EOS token.
        num_beams: number of beams; 1 means no beam search (if None: 1, or 3 for CPM-Ant and
            CPM-Bee).
        length_penalty: exponent of the length by which beam scores are divided (if None: 1).
        num_return_sequences: number of continuations; needs sampling, or at least as many beams
            (if None: 1).
        do_sample: sample instead of greedy decoding (if None: off, or on for CPM-1).
        temperature: sampling temperature; 0 means greedy decoding (if None: 1, or 0.9 for
            CPM-1 and CPM-Ant).
        top_k: sample from the k most probable tokens.
        top_p: sample from the most probable tokens whose probabilities sum to this value
            (if None: 1, or 0.9 for CPM-Ant).
        min_p: sample from tokens with at least this fraction of the highest probability.
        repetition_penalty: values above 1 make tokens that already occurred less probable
            (if None: 1).
        presence_penalty: value subtracted from the score of every token that was already generated.
        frequency_penalty: value subtracted from a token's score each time it was generated.
        no_repeat_ngram_size: size of n-grams that may occur only once (if None: no limit).
        stop_strings: strings that end the continuation; they are not part of it.
        seed: random seed of sampling.
        adapter: adapter directories to attach to the model; DIR=0.5 scales the adapter's
            output by 0.5.
        allow_other_base: accept adapters that were trained on a base model with other weights.
        memory: memory limits of the model.
    """

    model: Annotated[str, tyro.conf.Positional]
    prompt: str | None = None
    chat: bool = False
    image: tuple[Path, ...] = ()
    audio: Path | None = None
    language: str | None = None
    transcript_format: Literal["text", "srt", "vtt"] | None = None
    document: Path | None = None
    max_new_tokens: int | None = None
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
    allow_other_base: bool = False
    memory: Memory = field(default_factory=MemoryOptions)

    def options(self) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` that the user set."""
        others = {"model", "prompt", "chat", "image", "audio", "language", "document", "seed"}
        others |= {"transcript_format", "adapter", "memory", "allow_other_base"}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.max_new_tokens is None and self.audio is None:
            values["max_new_tokens"] = 100
        return {name: value for name, value in values.items()
                if name not in others and value not in (None, ())}  # fmt: skip


@dataclass(kw_only=True)
class ChatCommand:
    """Chat with a model in the terminal; /help lists the commands.

    Args:
        model: directory, hub id or short name of a model that generates text, a run's
            directory, or an adapter directory.
        config: generation options.
        adapter: adapter directories to attach to the model; DIR=0.5 scales the adapter's
            output by 0.5.
        allow_other_base: accept adapters that were trained on a base model with other weights.
        hide_thoughts: do not print the text between <think> and </think>.
        memory: memory limits of the model.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[TalkConfig, tyro.conf.arg(name="")] = field(default_factory=TalkConfig)
    adapter: tuple[str, ...] = ()
    allow_other_base: bool = False
    hide_thoughts: bool = False
    memory: Memory = field(default_factory=MemoryOptions)


@dataclass(kw_only=True)
class EvaluateCommand:
    """Evaluate a model on texts and tasks; --layout.* options distribute it, as in `train`.

    Args:
        model: directory or hub id of a model, a run directory, or a preset with --weights.
        allow_other_base: accept an adapter that was trained on a base model with other weights.
        config: texts and tasks to evaluate on.
    """

    model: Annotated[str, tyro.conf.Positional]
    allow_other_base: bool = False
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
        target: output directory, or a file that ends in .gguf; may also be given as --out.
        type: tensor type of the matrices in a GGUF file (if None: q8_0).
        dtype: dtype of the written weights (if None: as in the file).
        max_file_gb: maximum size of a weight file in GB (1e9 bytes).
        family: family of a ModelCenter checkpoint, if its tensors are ambiguous.
        allow_unknown: names of unknown config fields to ignore.
        preset: preset that gives the sizes of the model in Megatron's shards, if their shapes are
            ambiguous.
        megatron_degree: write this many Megatron shards instead of Hugging Face's format.
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
        target: output directory; may also be given as --out.
        scheme: "int8" and "int4" have one scale per 32 columns, "int4-128" has one per 128 columns,
            and "int8-dynamic" has one per row; "keep" uses the integers of a GGUF, GPTQ or AWQ
            file.
        float_activations: keep activations in floating point instead of rounding them to int8.
        outlier_ratio: fraction of the input columns, those with the largest error, that stays in
            16 bits; not supported for models with experts.
        dtype: dtype of the unquantized weights (if None: as in the file).
        max_file_gb: maximum size of a weight file in GB (1e9 bytes).
        allow_unknown: names of unknown config fields to ignore.
        report: text files or directories on which the original and the quantized model are
            evaluated afterwards.
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
    """Merge an adapter into its base model and save the result as a normal model directory.

    Args:
        adapter: adapter directory, or the directory of a run that trained an adapter.
        out: output directory.
        base: directory, hub id or short name of the base model (if None: the model named in the
            adapter's config). If the adapter was trained on a quantized model, pass the 16-bit
            model.
        dtype: dtype of the written weights (if None: that of the base model).
        allow_other_base: accept a base model whose weights differ from those that the adapter was
            trained on, such as a later version of the model.
    """

    adapter: Annotated[str, tyro.conf.Positional]
    out: Path
    base: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    allow_other_base: bool = False


@dataclass(kw_only=True)
class CompletionCommand:
    """Print a script that makes a shell complete commands, tasks and options.

    Bash: add `eval "$(bmforge completion bash)"` to ~/.bashrc. Zsh: add the same line with zsh to
    ~/.zshrc, after compinit. Fish: add `bmforge completion fish | source` to config.fish.

    Args:
        shell: name of the shell.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


@dataclass(kw_only=True)
class DoctorCommand:
    """Show this installation's versions, device, threads, memory, extras, and what is missing.

    Args:
        json: print JSON instead of a table.
    """

    json: bool = False


@dataclass(kw_only=True)
class MigrateCommand:
    """Convert a launch script of CPM-Pretrain, or a config of OpenPrompt, to a bmforge config.

    Args:
        script: launch script, such as run_gpt2.sh, or a command line in quotes (neither is
            executed); or a .yaml file of OpenPrompt.
        out: TOML file to write (if None: the script's name with .toml, in the current directory).
    """

    script: Annotated[str, tyro.conf.Positional]
    out: Path | None = None


@dataclass(kw_only=True)
class ReportCommand:
    """Write the HTML report of a run.

    Args:
        run: directory of the run.
    """

    run: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class InfoCommand:
    """Show the size, compute and config of a model, or the model card of an adapter.

    Args:
        name: name of a preset, or a model directory; without it, all presets are listed.
        seq_len: sequence length in tokens, for the FLOPs of attention (if None: the model's
            maximum).
        json: print the config and the measurements, or an adapter's config, as JSON.
        backend: implementation of the architecture: "native" (bmforge's), "transformers", or "auto"
            ("native" if bmforge supports the architecture, else "transformers").
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    seq_len: int | None = None
    json: bool = False
    backend: Literal["auto", "native", "transformers"] = "auto"


@dataclass(kw_only=True)
class PlanCommand:
    """Estimate which parallel layouts of a model fit on given GPUs, and their speed.

    Args:
        model: name of a preset, or a model directory.
        task: task whose training step is planned. With preferences and reward, a sequence is a
            pair of answers; rl and distill also generate rollouts.
        reference: reference model of preferences, or of rl with rl.beta above 0: adapter (the
            base model without the adapter), copy or precomputed (if None: the task's default).
        reference_dtype: dtype of the reference copy of preferences: int8 or int4 (if None: fp32).
        reference_offload: keep the reference copy of preferences in host memory during steps.
        value_model: include the value model of --task rl with --method ppo.
        teacher: teacher model of --task distill: a preset, or a model directory.
        distill_top_k: value of distill_top_k for --task distill (0: the whole vocabulary).
        max_num_seqs: number of answers that rl and distill generate at once (if None: 64).
        set: fields of the model's config to change, each as field=value.
        changes: structural changes to the model, such as adapters or pruning, as JSON text or a
            JSON file, as in `train`.
        freeze_base: train only the modules that `changes` adds; freeze the other weights.
        adapter: kind of adapter to train on all linear layers, such as lora.
        adapter_rank: rank of the adapter (if None: 8).
        base_dtype: dtype of the frozen base model of the adapter: int8 or int4 for QLoRA (if None:
            that of the computation).
        gpus: number of GPUs.
        gpu: GPU model; a model that is not in the table of GPUs needs gpu_memory and gpu_tflops.
        gpu_memory: memory of a GPU in GiB, instead of the value in the table.
        gpu_tflops: dense half-precision peak of a GPU in TFLOP/s, instead of the value in the
            table.
        gpus_per_node: GPUs per node.
        interconnect: network between nodes: a name such as ib-200, or Gb/s per GPU.
        host_memory: host memory of a node in GiB, for offloading.
        batch: sequences per optimizer step over all GPUs (if None: the smallest number of at
            least 8 that divides evenly among the GPUs).
        seq: tokens per sequence (if None: the model's maximum, but at most 4,096).
        precision: precision of the computation (if None: bf16 if the GPU supports it, else fp16).
        offload: also consider offloading the optimizer states.
        compile: assume that the blocks are compiled with torch.compile.
        tokens: training tokens of the whole run, to estimate hours and cost.
        price: price of one GPU hour.
        currency: currency of the price.
        rows: number of rows in the printed table.
        plot: SVG file to write, with a chart of the memory of the layouts in the table.
        json: print all estimates as JSON, in bytes and seconds.
    """

    model: Annotated[str, tyro.conf.Positional]
    task: Literal["pretrain", "conversations", "preferences", "reward", "rl", "distill"] = (
        "pretrain"
    )
    reference: Literal["adapter", "copy", "precomputed"] | None = None
    reference_dtype: Literal["int8", "int4"] | None = None
    reference_offload: bool = False
    value_model: bool = False
    teacher: str | None = None
    distill_top_k: int = 0
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
