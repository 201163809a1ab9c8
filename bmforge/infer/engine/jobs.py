"""Accepted requests with their answers, and the step loop of the requests that are batched."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bmforge.infer.engine.answers import Answer
from bmforge.infer.engine.batch_choice import TokenChoice, choose_batch
from bmforge.infer.engine.changes import Changes
from bmforge.infer.engine.draft import Draft
from bmforge.infer.engine.packed_step import PackedStep
from bmforge.infer.engine.paged_cache import StepRow
from bmforge.infer.engine.pages import Pages, pages_of
from bmforge.infer.engine.prefix import PrefixKeys
from bmforge.infer.engine.prompts import PreparedRequest
from bmforge.infer.engine.request import FinishReason, Handle, RequestsConfig
from bmforge.infer.engine.rows import UnbatchedRunner
from bmforge.infer.engine.scheduler import Scheduler, Sequence, SequenceChunk
from bmforge.infer.engine.speculate import DraftSpeculator, NgramSpeculator
from bmforge.memory.packed import packed_bytes
from bmforge.tune.delta.selection import DeltaNames, tell_choice

__all__ = ["Job", "PackedJobs"]


KV_CACHE_DTYPES = {
    None: None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}


def _weigh(model: Any) -> int:
    """Return the approximate number of weight bytes that one step of a model reads."""
    return sum(packed_bytes(tensor) for tensor in model.parameters())


class Job:
    """Accepted request and its answers.

    Args:
        number: arrival number.
        ready: prepared request.
        now_s: current time in seconds.

    Attributes:
        handle: the caller's handle.
        rows: runner of an unbatched request; None for a batched request.
        sequences: sequences of a batched request, with their answers.
        is_running: whether the request has started.
    """

    def __init__(self, number: int, ready: PreparedRequest, now_s: float) -> None:
        self.number, self.ready = number, ready
        self.handle = Handle(len(ready.answers))
        self.rows: UnbatchedRunner | None = None
        self.sequences: dict[Sequence, Answer] = {}
        self.is_running = False
        deadline = ready.request.deadline_s
        self._deadline_s = None if deadline is None else now_s + deadline

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return self.handle.done

    def over(self, now_s: float) -> FinishReason | None:
        """Return "cancelled" or "deadline" if the job must end for that reason, otherwise None."""
        if self.handle.is_cancelled:
            return "cancelled"
        late = self._deadline_s is not None and now_s >= self._deadline_s
        return "deadline" if late else None

    def tell(self, finished: bool = False) -> None:
        """Send the new output of every answer to the handle; if `finished`, end all answers."""
        for answer in self.ready.answers:
            if finished and answer.finish_reason is None:
                answer.end("length")
            piece = None if answer.is_delivered else answer.piece()
            if piece is None:
                continue
            answer.is_delivered = piece.finish_reason is not None
            completion = answer.completion(len(self.ready.ids)) if answer.is_delivered else None
            try:
                self.handle.put(piece, completion)
            except Exception as error:  # the callback is user code
                self.handle.fail(error)

    def end(self, reason: FinishReason) -> None:
        """End all unfinished answers for the given reason."""
        if self.rows is not None:
            self.rows.stop()
        for answer in self.ready.answers:
            answer.end(reason)
        self.tell()

    def fail(self, error: Exception) -> None:
        """End the job with an error."""
        if self.rows is not None:
            self.rows.stop()
        self.handle.fail(error)


class PackedJobs:
    """Runs the batched requests: every model step computes tokens of several requests.

    Args:
        model: model that the engine runs.
        config: limits of batched requests.
        total_tokens: capacity of the KV cache in tokens.
        draft: draft model for speculative decoding; None if there is none.
        is_shared: whether the caller has a reference to the model and may change its weights.

    Attributes:
        jobs: unfinished jobs.
        pages: page allocator of the KV cache.
        weights_version: number of detected changes of the model.
    """

    def __init__(
        self,
        model: Any,
        config: RequestsConfig,
        total_tokens: int,
        draft: Any = None,
        is_shared: bool = True,
    ) -> None:
        self._model, self._config, self._small = model, config, draft
        self._draft: Draft | None = None
        self._cost = 0.0 if draft is None else _weigh(draft) / _weigh(model)
        self.pages = Pages(pages_of(total_tokens))
        self.jobs: list[Job] = []
        self._step: PackedStep | None = None
        self._changes = Changes(model, is_shared)
        self.weights_version = 0
        self._scheduler = Scheduler(self.pages, config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def running(self) -> int:
        """Number of sequences with allocated pages of the KV cache."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for free pages of the KV cache."""
        return len(self._scheduler.waiting)

    def check(self, tokens: int) -> None:
        """Raise `ConfigError` if a sequence of this length exceeds the KV cache."""
        self._scheduler.check(tokens)

    def add(self, job: Job) -> None:
        """Add a job; if there are no other jobs, check for changes of the model first."""
        if not self.jobs:  # the model may have changed while idle
            self.notice_changes()
        ready = job.ready
        choice = repr(self._model.config) + tell_choice(self._model, ready.deltas)
        keys = PrefixKeys(choice, ready.request.cache_salt)
        longest = len(ready.ids) + ready.config.max_new_tokens
        ngrams = NgramSpeculator() if self._config.use_speculation else None
        lookup = ngrams if self._small is None else DraftSpeculator(self._cost, ngrams)
        scores_prompt = ready.config.prompt_logprobs is not None
        sequence = Sequence(
            (job.number, 0), list(ready.ids), keys, longest, lookup, scores_prompt=scores_prompt
        )
        job.sequences[sequence] = ready.answers[0]
        self._scheduler.add(sequence)
        self.jobs.append(job)

    def remove(self, job: Job) -> None:
        """Remove a job and free its pages; unknown jobs are ignored."""
        if job in self.jobs:
            self.jobs.remove(job)
            for sequence in job.sequences:
                self._scheduler.remove(sequence)
            job.sequences.clear()

    def release(self) -> None:
        """Free the KV cache and all cached prefixes if there are no jobs."""
        if not self.jobs:
            self._step = self._draft = None
            self.pages.forget()

    def notice_changes(self, has_changed: bool = False) -> None:
        """Drop the KV cache if the model changed; running sequences are recomputed.

        The draft model is checked in the next step.

        Args:
            has_changed: True if the caller knows that the weights changed.
        """
        if self._changes.since_last() or has_changed:
            self._scheduler.preempt_all()
            self.pages.forget()
            self._step = None  # dtype and device may have changed too
            self.weights_version += 1
        for step in (self._step, self._draft):
            if step is not None:
                step.check_for_changes()

    def step(self) -> None:
        """Run one model step for all sequences and advance their answers."""
        if not self.jobs:
            return
        if self._step is None:
            dtype = KV_CACHE_DTYPES[self._config.kv_cache_dtype]
            self._step = PackedStep(self._model, self.pages.count, dtype)
            if self._small is not None:
                self._draft = Draft(self._small, self.pages.count)
        cut = self._step.cut()
        shares = cut.shares and self._config.enable_prefix_caching
        self._scheduler.cut = replace(cut, shares=shares)
        parts = self._scheduler.plan()
        for source, target in self._scheduler.copies:
            self._step.cache.copy_page(source, target)
            if self._draft is not None:
                # The draft model's cache uses the same page tables.
                self._draft.copy_page(source, target)
        owners = {sequence: job for job in self.jobs for sequence in job.sequences}
        jobs = [owners[part.sequence] for part in parts]
        now = time.monotonic()
        for job in jobs:
            job.handle.note_start(now)
        try:
            parts = parts if self._draft is None else self._draft.fill(parts)
            logits = self._compute(self._step, parts, [job.ready.deltas for job in jobs])
        except Exception as error:
            for job in dict.fromkeys(jobs):
                self._fail(job, error)
            return
        chosen = _choose_together(jobs, parts, logits)
        for job, part, scores in zip(jobs, parts, logits, strict=True):
            if job in self.jobs:
                # A job with several sequences may have failed at an earlier one in this loop.
                self._advance(job, part, scores, chosen)
        for job in dict.fromkeys(jobs):
            job.is_running = True
            job.tell()
            if job.is_done:
                self.remove(job)

    def _compute(
        self, step: PackedStep, parts: list[SequenceChunk], deltas: list[DeltaNames]
    ) -> list[Tensor]:
        rows = [StepRow(part.sequence.pages, part.start, part.end) for part in parts]
        counts = [_count_logits(part) for part in parts]
        return step.run(rows, [part.tokens for part in parts], counts, deltas)

    def _advance(
        self, job: Job, part: SequenceChunk, scores: Tensor, chosen: dict[Answer, TokenChoice]
    ) -> None:
        """Choose a sequence's next tokens from a chunk's logits; an error ends the job."""
        if _reads_prompt(part):
            job.sequences[part.sequence].score_prompt(part.start, scores)
            scores = scores[-1:]
        if not part.is_last:
            self._scheduler.finish(part)
            return
        try:
            self._choose(job, part, scores, chosen)
        except Exception as error:
            self._fail(job, error)
            return
        for sequence in [
            s for s, answer in job.sequences.items() if answer.finish_reason is not None
        ]:
            del job.sequences[sequence]
            self._scheduler.remove(sequence)

    def _choose(
        self, job: Job, part: SequenceChunk, scores: Tensor, chosen: dict[Answer, TokenChoice]
    ) -> None:
        """Choose a sequence's next tokens; after the prompt, one first token for each answer."""
        sequence, answers = part.sequence, job.ready.answers
        answer = job.sequences[sequence]
        for number, row in enumerate(scores):
            if not answer.ids:
                answer.weights_version = self.weights_version
            token = answer.choose(row, None if part.guessed else chosen.get(answer))
            sequence.tokens.append(0 if token is None else token)
            # The token after the accepted draft tokens is valid too: its logits depend only on
            # them.
            is_right = number < len(part.guessed) and token == part.guessed[number]
            if not is_right or answer.finish_reason is not None:
                break
        # After the tokens were appended: `finish` derives from their number how many draft tokens
        # were accepted.
        self._scheduler.finish(part)
        if sequence.lookup is not None and part.guessed:
            sequence.lookup.record_acceptance(len(sequence.tokens), len(part.guessed), number)
        answer.cached = sequence.cached or 0
        is_first = len(sequence.tokens) == sequence.prompt_length + 1 and answer.index == 0
        for other in answers[1:] if is_first else ():
            own = other.choose(scores[0], chosen.get(other))
            other.cached, other.weights_version = answer.cached, answer.weights_version
            if other.finish_reason is None and own is not None:
                twin = self._scheduler.fork(sequence, (job.number, other.index))
                twin.tokens[-1] = own
                job.sequences[twin] = other

    def _fail(self, job: Job, error: Exception) -> None:
        self.remove(job)
        job.fail(error)


def _reads_prompt(part: SequenceChunk) -> bool:
    """Return True if a chunk's logits are needed for log-probabilities of prompt tokens."""
    return part.sequence.scores_prompt and part.start < part.sequence.prompt_length


def _count_logits(part: SequenceChunk) -> int:
    """Return the number of trailing tokens of a chunk whose logits are needed."""
    if _reads_prompt(part):
        return part.end - part.start
    return 1 + len(part.guessed) if part.is_last else 0


def _choose_together(
    jobs: list[Job], parts: list[SequenceChunk], scores: list[Tensor]
) -> dict[Answer, TokenChoice]:
    """Choose the next tokens of all answers whose options do not depend on their text."""
    answers, draws = [], []
    for job, part, rows in zip(jobs, parts, scores, strict=True):
        if not part.is_last or part.guessed:
            continue
        first = job.sequences[part.sequence]
        is_first = part.end == part.sequence.prompt_length and first.index == 0
        for answer in (first, *job.ready.answers[1:]) if is_first else (first,):
            draw = answer.draw(rows[-1])
            if draw is not None:
                answers.append(answer)
                draws.append(draw)
    chosen = zip(answers, choose_batch(draws), strict=True)
    return {answer: choice for answer, choice in chosen if choice is not None}
