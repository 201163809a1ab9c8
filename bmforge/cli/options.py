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
    ChatSessionConfig,
    EvaluateConfig,
    MemoryOptions,
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
        image: image files for a vision-language model; the chat template puts them before the
            prompt.
        audio: audio file that a speech model such as Whisper transcribes; replaces the prompt.
        language: language of the audio, such as en (if None: detected from the audio).
        transcript_format: format of a transcript: text, or subtitles with times as srt or vtt (if
            None: text).
        document: file for CPM-Bee with one document per line, {"input": "...", "<ans>": ""}; the
            documents are printed with their answers.
        max_new_tokens: maximum number of new tokens, per document with `document`; --max-tokens is
            an alias (if None: 100, or the model's maximum for audio).
        min_new_tokens: minimum number of new tokens (if None: no minimum).
        num_beams: number of beams; 1 disables beam search (if None: 1, or 3 for CPM-Ant and
            CPM-Bee).
        length_penalty: beam search divides the score of a sequence by its length to the power of
            this value (if None: 1).
        num_return_sequences: number of continuations to print; above 1 it requires sampling, or at
            least as many beams (if None: 1).
        do_sample: sample the tokens instead of greedy decoding (if None: off, or on for CPM-1).
        temperature: sampling temperature; 0 means greedy decoding (if None: 1, or 0.9 for
            CPM-1 and CPM-Ant).
        top_k: sample from only the k most probable tokens (if None: from all tokens).
        top_p: sample from the smallest set of most probable tokens whose probabilities sum to at
            least this value (if None: 1, or 0.9 for CPM-Ant).
        min_p: sample only from tokens with at least this fraction of the highest token probability
            (if None: no minimum).
        repetition_penalty: factor above 1 that makes tokens that already occurred less probable (if
            None: 1).
        presence_penalty: value subtracted from the logit of every token that was already generated
            (if None: 0).
        frequency_penalty: value subtracted from a token's logit for each time that the token was
            generated (if None: 0).
        no_repeat_ngram_size: size of n-grams that may occur only once (if None: no limit).
        stop_strings: strings at which generation ends; they are not printed.
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
    config: Annotated[ChatSessionConfig, tyro.conf.arg(name="")] = field(
        default_factory=ChatSessionConfig
    )
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
        source: directory, hub id or short name of a Hugging Face model; a GGUF file; a directory
            with ModelCenter's pytorch_model.pt and config.json; or a directory of Megatron shards
            (CPM-1, CPM-2, EVA).
        target: output directory, or output file if the name ends in .gguf; --out is an alias.
        type: tensor type of the weight matrices in a GGUF file (if None: q8_0).
        dtype: dtype of the written weights (if None: the dtype in the source).
        max_file_gb: maximum size of a weight file in GB (1e9 bytes).
        family: family of a ModelCenter checkpoint, such as Llama (if None: detected from the names
            of the tensors).
        allow_unknown: names of fields in the model's config.json to ignore although bmforge does
            not know them.
        preset: preset with the model sizes of Megatron shards (if None: detected from the tensor
            shapes).
        megatron_degree: number of Megatron shards to write instead of Hugging Face's format (if
            None: Hugging Face's format).
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
        target: output directory; --out is an alias.
        scheme: integer format of the weights: "int8" and "int4" have one scale per 32 columns,
            "int4-128" has one per 128 columns, and "int8-dynamic" has one per row; "keep" keeps the
            integers of a GGUF, GPTQ or AWQ model.
        float_activations: keep the activations in floating point instead of quantizing them to
            int8.
        outlier_ratio: fraction of the input columns, from 0 to 1, that stays in 16 bits; the
            columns with the largest quantization error are selected. Not supported for models with
            experts.
        dtype: dtype of the unquantized weights (if None: the dtype in the source).
        max_file_gb: maximum size of a weight file in GB (1e9 bytes).
        allow_unknown: names of fields in the model's config.json to ignore although bmforge does
            not know them.
        report: text files or directories on which the original and the quantized model are compared
            afterwards (if empty: no comparison).
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
        out: output directory of the merged model.
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
        shell: shell to print the script for.
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
        script: launch script, such as run_gpt2.sh, a command line in quotes, or a .yaml config of
            OpenPrompt; scripts and command lines are not executed.
        out: TOML file to write (if None: the script's name with the ending .toml, in the current
            directory).
    """

    script: Annotated[str, tyro.conf.Positional]
    out: Path | None = None


@dataclass(kw_only=True)
class ReportCommand:
    """Write the HTML report of a run.

    Args:
        run: run directory.
    """

    run: Annotated[Path, tyro.conf.Positional]


@dataclass(kw_only=True)
class InfoCommand:
    """Show the size, compute and config of a model, or the model card of an adapter.

    Args:
        name: name of a preset, or a model or adapter directory; without it, all presets are listed.
        seq_len: sequence length in tokens for which the FLOPs of attention are computed (if None:
            the model's maximum).
        json: print the result as JSON.
        backend: implementation of the architecture: "native" (bmforge's), "transformers", or "auto"
            ("native" if bmforge supports the architecture, else "transformers").
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    seq_len: int | None = None
    json: bool = False
    backend: Literal["auto", "native", "transformers"] = "auto"
