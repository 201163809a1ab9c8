"""Built-in reward functions for verifiable answers: 1 for correct, 0 for wrong answers.

The module has no heavy imports, since `reward_worker` runs verifiers in a separate process: a
user's regular expression may take exponential time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from bmforge.align.reward_calls import LOG_ARGUMENTS, STATE_ARGUMENT
from bmforge.errors import ConfigError, MissingDependencyError

__all__ = ["COLUMN_KINDS", "VERIFIERS", "make_verifier", "missing_column", "text_of"]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CHOICE = re.compile(r"(?<![A-Za-z0-9])([A-Za-z])(?![A-Za-z0-9])")

# Kinds of verifiers whose argument is a column of the data set.
COLUMN_KINDS = frozenset(("exact", "number", "choice"))
# Arguments of a reward function that are not columns of the data set.
_ARGUMENTS = frozenset(("prompts", "completion_ids", STATE_ARGUMENT, *LOG_ARGUMENTS))

Reward = Callable[..., list[float | None]]


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is a string or a list of messages."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def make_verifier(kind: str, argument: str) -> Reward:
    """Create the reward function of a built-in verifier.

    Args:
        kind: key of `VERIFIERS`.
        argument: column of the data set with the correct answers; or the pattern, length or file
            that the verifier requires.

    Raises:
        ConfigError: the argument is missing or invalid.
    """
    if not argument:
        raise ConfigError(f"--reward {kind} needs {VERIFIERS[kind][1]} after a colon ({kind}:...).")
    return VERIFIERS[kind][0](argument)


def missing_column(column: str, columns: Iterable[str]) -> ConfigError:
    """Return the error for a column that no prompt has."""
    return ConfigError(
        f"the prompts have no column {column!r} (columns: {', '.join(sorted(columns)) or 'none'}). "
        "Name one of these columns, or add the column to the data."
    )


def _compare(column: str, is_right: Callable[[str, Any], bool]) -> Reward:
    """Return a reward function that compares answers with a column of the data set."""

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if column not in columns:
            raise missing_column(column, set(columns) - _ARGUMENTS)
        pairs = zip(completions, columns[column], strict=True)
        return [
            None if right is None else float(is_right(text_of(answer), right))
            for answer, right in pairs
        ]

    return reward


def _is_exact(answer: str, right: Any) -> bool:
    return answer.strip() == str(right).strip()


def _read_number(text: str) -> Decimal | None:
    """Return the last number in a text; None if there is no number."""
    numbers = [match.group() for match in _NUMBER.finditer(text)]
    numbers = [number for number in numbers if any(c.isdigit() for c in number)]
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def _is_number(answer: str, right: Any) -> bool:
    expected = _read_number(str(right))
    return expected is not None and _read_number(answer) == expected


def _is_choice(answer: str, right: Any) -> bool:
    letters = _CHOICE.findall(answer)
    return bool(letters) and letters[-1].upper() == str(right).strip().upper()


def _matches(pattern: str) -> Reward:
    """Return a reward function that returns 1 if a regular expression matches in the answer."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"--reward regex:{pattern} is not a valid regular expression ({error}). Correct the "
            "expression."
        ) from None
    return lambda completions, **_: [float(bool(compiled.search(text_of(c)))) for c in completions]


def _is_short(limit: str) -> Reward:
    """Return a reward for length: 1 up to `limit` tokens, falling linearly to 0 at 2 x `limit`."""
    if not limit.isdecimal() or int(limit) < 1:
        raise ConfigError(f"--reward length:{limit} needs a number of tokens, as in length:256.")
    most = int(limit)

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [min(1.0, max(0.0, 2 - len(ids) / most)) for ids in completion_ids]

    return reward


def _fits_schema(file: str) -> Reward:
    """Return a reward function that returns 1 if the answer is JSON that matches a JSON schema."""
    try:
        import jsonschema
    except ImportError as error:
        raise MissingDependencyError("jsonschema", "align", "the reward json_schema") from error
    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8"))
        checker = jsonschema.validators.validator_for(schema)
        checker.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        raise ConfigError(
            f"the JSON schema of --reward json_schema:{file} is not valid ({error}). Pass a file "
            "with a JSON schema."
        ) from None
    validator = checker(schema)

    def score(answer: str) -> float:
        try:
            return float(validator.is_valid(json.loads(answer)))
        except ValueError:
            return 0.0

    return lambda completions, **_: [score(text_of(c)) for c in completions]


# Name -> (function that creates the reward function from the argument, name of the argument).
VERIFIERS: Mapping[str, tuple[Callable[[str], Reward], str]] = {
    "exact": (lambda column: _compare(column, _is_exact), "a column with the right answer"),
    "number": (lambda column: _compare(column, _is_number), "a column with the right number"),
    "choice": (lambda column: _compare(column, _is_choice), "a column with the right letter"),
    "regex": (_matches, "a regular expression"),
    "length": (_is_short, "a number of tokens"),
    "json_schema": (_fits_schema, "a file with a JSON schema"),
}
