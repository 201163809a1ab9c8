"""Checks whether a run can put both answers of a pair into one sequence with a shared prompt."""

from __future__ import annotations

from typing import Any

from bmforge.errors import ConfigError
from bmforge.recipes.start import family_of, traits_of, with_changes

__all__ = ["check_prefix_sharing", "check_shared_width", "refuse_prefix_sharing"]


def refuse_prefix_sharing(config: Any, reason: str) -> None:
    """Raise `ConfigError` if `data.prefix_sharing` is set, in a run where it has no effect.

    Args:
        config: config of the run.
        reason: reason why the option has no effect, as the end of a sentence.
    """
    if config.data.prefix_sharing:
        raise ConfigError(f"data.prefix_sharing has no effect {reason}. Leave it out.")


def check_prefix_sharing(config: Any) -> None:
    """Raise `ConfigError` if the model or layout of a preferences run cannot share prefixes.

    A sequence with both answers has its own attention mask and positions. Sliding windows and
    attention biases depend on distances within the sequence, so they are not supported.
    """
    if not config.data.prefix_sharing:
        return
    if config.method == "kto":
        refuse_prefix_sharing(config, "with method=kto, whose answers are not pairs")
    problem = _find_problem(config)
    if problem is not None:
        raise ConfigError(
            f"data.prefix_sharing=True does not work with {problem}. Set data.prefix_sharing=False."
        )


def _find_problem(config: Any) -> str | None:
    if config.layout.is_context_parallel:
        return f"{config.layout}, which shards the tokens of a sequence"
    if config.adapter.kind == "soft-prompt":
        return "adapter.kind='soft-prompt', which is prepended to prompts, not to answers"
    sizes = with_changes(config)
    family = family_of(sizes)
    modules = list(family.from_config(sizes, device="meta").modules())
    attentions: list[Any] = [module for module in modules if hasattr(module, "attention_fn")]
    if not attentions or any(getattr(each, "alibi", False) for each in attentions):
        return f"{family.__name__}, whose attention does not support custom positions and masks"
    windows = [each.window for each in attentions if each.window]
    if windows and min(windows) < 2 * config.data.seq_len:
        return f"the sliding window of {family.__name__}, {min(windows)} tokens"
    return None


def check_shared_width(config: Any, width: int) -> None:
    """Raise `ConfigError` if sequences with both answers exceed the model's maximum length.

    Args:
        config: config of the run.
        width: length of a sequence with both answers, in tokens.
    """
    limit = traits_of(config.model).row_limit(config.model)
    if config.data.prefix_sharing and limit is not None and width > limit:
        raise ConfigError(
            f"data.prefix_sharing needs sequences of {width} tokens, more than model.max_seq_len="
            f"{limit}. Set data.prefix_sharing=False, or reduce data.seq_len."
        )
