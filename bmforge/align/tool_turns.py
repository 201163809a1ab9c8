"""Multi-turn rollouts with tool calls: the model calls functions and reads their results.

The token ids of earlier turns are reused, never decoded and encoded again: a turn begins with the
ids of the prompt, of the answer so far, and of the encoded results. The tokens of results are
masked in the loss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.rollout_batches import RolloutAnswer
from bmforge.align.rollout_config import PromptRow

__all__ = ["FunctionCall", "ToolFunction", "ToolTurns"]


@dataclass(frozen=True)
class FunctionCall:
    """Call of a function in an answer.

    Args:
        name: name of the function; empty if the call cannot be parsed.
        arguments: dict from argument name to value; None if the arguments are not a JSON object.
    """

    name: str
    arguments: Mapping[str, Any] | None


class ToolFunction(Protocol):
    """A function that can be stopped after a time limit."""

    def call(self, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Return the function's result as text; an exception means that the call failed."""

    def close(self) -> None:
        """End the process of the function."""


class ToolTurns:
    """Runs the tool calls in generated answers and continues the answers after the results.

    If a call raises an error, hangs, has wrong arguments, names an unknown function or cannot be
    parsed, the model receives the error as the result.

    Args:
        functions: dict from name to function.
        parse: function that returns the text before the calls of a turn, and the calls.
        encode: function that returns the token ids between two turns, from messages with results,
            the last token id of the turn, and the template options of the prompt.
        decode: function that returns the text for the token ids of a turn.
        max_turns: maximum number of turns that the model writes.
        timeout_s: time limit for a call in seconds.
        decode_special: like `decode`, but with the special tokens, which may delimit calls (if
            None: `decode`).
    """

    def __init__(
        self,
        functions: Mapping[str, ToolFunction],
        parse: Callable[[str], tuple[str, Sequence[FunctionCall]]],
        encode: Callable[[Sequence[Mapping[str, Any]], int, Mapping[str, Any]], list[int]],
        decode: Callable[[Sequence[int]], str],
        max_turns: int,
        timeout_s: float,
        decode_special: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._functions, self._parse, self._encode = functions, parse, encode
        self._decode, self._max_turns, self._timeout_s = decode, max_turns, timeout_s
        self._decode_special = decode_special or decode

    def continue_answers(
        self,
        answers: Sequence[RolloutAnswer],
        rows: Sequence[PromptRow],
        writer: AnswerWriter,
        max_tokens: int,
        seed_of: Callable[[int, int], int],
    ) -> None:
        """Generate the further turns of answers, in place.

        Args:
            answers: answers after their first turn.
            rows: prompt of each answer.
            writer: generator of answers.
            max_tokens: maximum length of a whole answer in tokens, including results.
            seed_of: function (index of the answer, turn) -> random seed of the turn.
        """
        for answer in answers:
            answer.is_written = [True] * len(answer.ids)
            answer.messages = [{"role": "assistant", "content": answer.text}]
        running = list(range(len(answers)))
        for turn in range(1, self._max_turns):
            running = [n for n in running if self._add_results(answers[n], rows[n], max_tokens)]
            if not running:
                return
            written = writer.write_on(
                [[*answers[n].prompt_ids, *answers[n].ids] for n in running],
                [seed_of(n, turn) for n in running],
                [max_tokens - len(answers[n].ids) for n in running],
            )
            for number, completion in zip(running, written, strict=True):
                self._add_turn(answers[number], completion)

    def _add_results(self, answer: RolloutAnswer, row: PromptRow, max_tokens: int) -> bool:
        """Run the last turn's calls and append the results; return False if the answer ends."""
        content, calls = self._read(answer) if answer.finish_reason == "stop" else ("", ())
        if not calls:
            return False
        if all(call.arguments is not None for call in calls):
            answer.messages[-1] = _describe_calls(content, calls)
        results = [self._run(number, call, answer) for number, call in enumerate(calls)]
        ids = self._encode(results, answer.ids[-1], row.template_options)
        if len(answer.ids) + len(ids) >= max_tokens:
            answer.finish_reason = "length"
            return False
        answer.messages += results
        answer.ids += ids
        answer.sampler += [0.0] * len(ids)
        answer.is_written += [False] * len(ids)
        return True

    def _read(self, answer: RolloutAnswer) -> tuple[str, Sequence[FunctionCall]]:
        """Return the text before the calls of the last turn, without special tokens; and calls."""
        written = answer.is_written
        ids = answer.ids[len(written) - ([*written[::-1], False].index(False)) :]
        text = self._decode_special(ids)
        content, calls = self._parse(text)
        if calls and text != answer.text:
            end = text.index(content) + len(content)
            count = bisect_left(
                range(len(ids)), end, key=lambda n: len(self._decode_special(ids[:n]))
            )
            content = self._decode(ids[:count]).strip()
        return content, calls

    def _run(self, number: int, call: FunctionCall, answer: RolloutAnswer) -> dict[str, Any]:
        """Return the message with the result of a call, or with its error."""
        answer.tool_calls += 1
        try:
            text = self._call(call)
        except Exception as error:  # a user's function may raise anything
            answer.tool_failures += 1
            text = f"error: {error}"
        return {
            "role": "tool",
            "name": call.name,
            "tool_call_id": _id_of(number),
            "content": text,
        }

    def _call(self, call: FunctionCall) -> str:
        if not call.name:
            raise ValueError("the call cannot be parsed")
        if call.name not in self._functions:
            names = ", ".join(self._functions)
            raise ValueError(f"the function {call.name!r} does not exist (functions: {names})")
        if call.arguments is None:
            raise ValueError(f"the arguments of {call.name!r} are not a JSON object")
        return self._functions[call.name].call(call.arguments, self._timeout_s)

    def _add_turn(self, answer: RolloutAnswer, completion: Any) -> None:
        answer.ids += completion.ids
        answer.sampler += [token.logprob for token in completion.logprobs or ()]
        answer.is_written += [True] * len(completion.ids)
        answer.finish_reason = completion.finish_reason
        answer.text = self._decode(completion.ids)
        answer.messages.append({"role": "assistant", "content": answer.text})

    def close(self) -> None:
        """End the processes of the functions."""
        for function in self._functions.values():
            function.close()


def _id_of(number: int) -> str:
    """Return the id of a call; Mistral's templates require nine letters or digits."""
    return f"call{number:05d}"


def _describe_calls(content: str, calls: Sequence[FunctionCall]) -> dict[str, Any]:
    """Return the message of a turn with calls, in OpenAI's format, as reward functions expect."""
    described = [
        {
            "id": _id_of(number),
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments or {})},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": described}
