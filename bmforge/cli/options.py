"""The options of the commands: what `--help` shows. Nothing heavy is imported here.

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
        document: for CPM-Bee: a file with one document per line, {"input": "...", "<ans>": ""},
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
        """Return the fields of `GenerationConfig` that were given."""
        others = {"model", "prompt", "chat", "document", "seed", "adapter", "memory"}
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in given.items()
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
    """Serve a model: to programs that speak OpenAI's protocol, and to a person at a page.

    Args:
        model: directory, hub id or short name of a model, with its tokenizer.
        config: where to listen, and the limits.
        adapter: adapter directories to attach to the model; DIR=0.5 scales one.
            NAME=DIR lets requests choose one by that name, as they name a model; others have none.
        context: longest row in tokens, prompt and answer; none takes 1,024, or what the model has
            positions for.
        max_num_seqs: answers that are written at once; more wait.
        speculate: guess tokens that repeat what was there before, and check several at once.
        draft: a small model of the same vocabulary that guesses tokens, which are checked likewise.
        embedding_model: a second model, that embeds, within the same budget.
        unload_after_s: give the model's memory back after so many seconds without a request, and
            open it again for the next one.
        memory: how much the model may take.
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
    """Measure a model on texts and tasks; --layout.* divide it over processes, as in `train`.

    Args:
        model: directory or hub id of a model, a run's directory, or a preset with --weights.
        config: on what.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[EvaluateConfig, tyro.conf.arg(name="")] = field(
        default_factory=EvaluateConfig
    )


@dataclass(kw_only=True)
class ConvertCommand:
    """Write a checkpoint in Hugging Face's form, or as a GGUF file.

    Args:
        source: directory, hub id or short name: a Hugging Face model, or ModelCenter's
            pytorch_model.pt with its config.json, or Megatron's shards (CPM-1, CPM-2, EVA); or a
            GGUF file.
        target: directory to make, or a file that ends in .gguf.
        type: of the matrices in a GGUF file; none is q8_0.
        dtype: of the weights; none keeps the file's.
        max_file_gb: size (1e9 bytes) above which the weights are divided over several files.
        family: of a ModelCenter checkpoint, where its tensors do not tell.
        allow_unknown: config fields to accept unread.
        preset: which model Megatron's shards are, where their sizes do not tell.
        megatron_degree: write so many of Megatron's shards instead.
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
    """Write a model with its weights packed as integers.

    Args:
        source: directory or hub id of a Hugging Face model, or a GGUF file.
        target: directory to make.
        scheme: int8 and int4 have a scale for every 32 columns, int4-128 for every 128, and
            int8-dynamic for every row; keep takes the integers of a GGUF file, of GPTQ or of AWQ.
        float_activations: multiply with what goes in as it is, instead of rounding it to int8.
        outlier_ratio: share of the input columns that stays in 16 bits, where most of the error
            comes from; not for models with experts.
        dtype: of what stays floats; none keeps the file's.
        max_file_gb: size (1e9 bytes) above which the weights are divided over several files.
        allow_unknown: config fields to accept unread.
        report: files or directories of text, on which both models are measured afterwards.
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
class DoctorCommand:
    """Show versions, device, threads, memory and extras of this installation, and what is missing.

    Args:
        json: print JSON instead of a table.
    """

    json: bool = False


@dataclass(kw_only=True)
class MigrateCommand:
    """Turn a start script of CPM-Pretrain, or a config of OpenPrompt, into the config of a run.

    Args:
        script: run_gpt2.sh or run_t5.sh, or a whole command line in quotes, of which nothing is
            run; or a .yaml of OpenPrompt.
        out: TOML file to write; by default the script's name with .toml, in this directory.
    """

    script: Annotated[str, tyro.conf.Positional]
    out: Path | None = None


@dataclass(kw_only=True)
class ReportCommand:
    """Draw a run's report.

    Args:
        run: the run's directory.
    """

    run: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class InfoCommand:
    """Describe a model.

    Args:
        name: a preset's name or a model's directory.
        seq_len: length of the rows for the FLOPs of attention; none takes the longest context.
        json: print JSON: the config and the figures, or an adapter's config.
        backend: implementation of the architecture: native for the families of bmforge,
            transformers for that library, auto for a native family where there is one.
    """

    name: Annotated[str, tyro.conf.Positional]
    seq_len: int | None = None
    json: bool = False
    backend: Literal["auto", "native", "transformers"] = "auto"


@dataclass(kw_only=True)
class PlanCommand:
    """Say which layouts of a model fit on machines that are not here, and how fast they are.

    Args:
        model: a preset's name or a model's directory.
        set: fields of its config to change, field=value each.
        changes: what is put beside its layers or in their place: JSON or a file, as `train` takes.
        freeze_base: whether nothing but these changes is trained.
        adapter: train an adapter of this kind, such as lora, on all linear layers.
        adapter_rank: rank of the adapter (default: 8).
        base_dtype: quantize the frozen base of the adapter (QLoRA); none keeps the precision.
        gpus: how many.
        gpu: which; an unknown one needs gpu_memory and gpu_tflops.
        gpu_memory: GiB of one, over the table's.
        gpu_tflops: dense half-precision peak of one, over the table's.
        gpus_per_node: GPUs that share a node.
        interconnect: between nodes: a name such as ib-200, or Gb/s per GPU.
        host_memory: GiB of a node, for offloading.
        batch: rows of an optimizer step over all GPUs; none takes as many a GPU, 8 at least in all.
        seq: tokens of a row; none takes the model's longest, 4,096 at most.
        precision: none takes bf16 where the GPU has it, else fp16.
        offload: whether the optimizer may leave the GPUs.
        compile: whether blocks are compiled.
        tokens: train on so many; gives hours and cost.
        price: of one GPU for one hour.
        currency: of the price.
        rows: lines of the table.
        plot: write the memory of these lines as an SVG.
    """

    model: Annotated[str, tyro.conf.Positional]
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
