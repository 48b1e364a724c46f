"""The one loop over accepted tokens: everything that follows from one more token happens here. No torch.

A block of five tokens must be indistinguishable from five blocks of one: stops, caps, text, logprobs, penalties'
history, usage and origins are all decided token by token, and what stands behind the end is dropped from all of them.
"""

from __future__ import annotations

import dataclasses
import time

from specd.errors import GrammarError, NonFiniteLogitsError, SpecdError
from specd.request import DraftedToken, FinishReason, SequenceDelta, TokenLogprob, TokenOrigin
from specd.sequence import Sequence
from specd.step import AcceptanceReport, DraftSource


@dataclasses.dataclass(frozen=True, slots=True)
class RowReport:
    """One row of an AcceptanceReport. `tokens` are the num_accepted + 1 emitted ones, empty when it emits none."""

    tokens: tuple[int, ...]
    num_accepted: int
    num_drafts: int
    failed: bool
    logprobs: tuple[TokenLogprob, ...] | None  # one per token, when the row asked
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens after those that the row computed
    drafts: tuple[DraftedToken, ...] = ()  # what was verified, when the row asked


def row_report(
    report: AcceptanceReport,
    row: int,
    *,
    num_drafts: int,
    num_logprobs: int | None,
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
    tells_drafts: bool = False,
) -> RowReport:
    """Row `row` of the batch's report; num_logprobs as in SamplingParams.logprobs."""
    num_accepted = int(report.num_accepted[row])
    tokens = tuple(token for token in report.tokens[row, : num_accepted + 1].tolist() if token >= 0)
    logprobs = None
    if num_logprobs is not None and report.logprobs is not None:
        logprobs = tuple(_logprob(report, row, i, token, num_logprobs) for i, token in enumerate(tokens))
    drafts = _drafts(report, row, num_drafts) if tells_drafts else ()
    return RowReport(tokens, num_accepted, num_drafts, bool(report.failed[row]), logprobs, prompt_logprobs, drafts)


def _drafts(report: AcceptanceReport, row: int, count: int) -> tuple[DraftedToken, ...]:
    """Without a drafter in the step, what was verified is proposers': they are certain."""
    probs = [1.0] * count if report.draft_probs is None else report.draft_probs[row, :count].tolist()
    return tuple(DraftedToken(*pair) for pair in zip(report.drafts[row, :count].tolist(), probs, strict=True))


def _logprob(report: AcceptanceReport, row: int, position: int, token: int, count: int) -> TokenLogprob:
    assert report.logprobs is not None
    top: tuple[tuple[int, float], ...] = ()
    if count and report.top_ids is not None and report.top_logprobs is not None:
        ids = report.top_ids[row, position, :count].tolist()
        top = tuple(zip(ids, report.top_logprobs[row, position, :count].tolist(), strict=True))
    return TokenLogprob(token, float(report.logprobs[row, position]), top)


def commit(
    sequence: Sequence, row: RowReport, *, source: DraftSource, step: int, num_predicted: int = 0
) -> SequenceDelta:
    """Appends a row's tokens to its sequence until one of them ends it.

    num_predicted: of the row's planned drafts, the leading ones that are out of the request's prediction.
    Modifies tokens, text state and counts of the sequence, nothing else: pages and KV lengths are the scheduler's.
    """
    sequence.text_s = 0.0
    if row.failed:
        return failure(sequence, _why_failed(sequence))
    text: list[str] = []
    emitted = 0
    scored = sequence.num_output == 0 and sequence.sampling.prompt_logprobs is not None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    for token in row.tokens:
        emitted += 1
        sequence.append(token)
        start = time.perf_counter()
        finish, stop_reason, piece = _advance(sequence, token)
        sequence.text_s += time.perf_counter() - start
        text.append(piece)
        if finish is not None:
            break
        if sequence.grammar is not None:
            sequence.grammar.advance(token)
    for proposer in sequence.proposers:
        proposer.extend(row.tokens[:emitted])
    if row.num_drafts:
        sequence.speculation.record(
            drafted=row.num_drafts,
            accepted=min(row.num_accepted, emitted),
            detailed=sequence.request.speculation.detail == "detailed",
            predicted=min(num_predicted, row.num_drafts),
        )
    return SequenceDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=row.tokens[:emitted],
        text="".join(text),
        logprobs=None if row.logprobs is None else row.logprobs[:emitted],
        origins=tuple((_origin(row, source, i), step, i) for i in range(emitted)),
        drafts=(*row.drafts[:emitted], *[None] * (emitted - len(row.drafts)))
        if sequence.request.speculation.detail == "tokens"
        else (),
        finish_reason=finish,
        stop_reason=stop_reason,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if scored else None,
        stats=sequence.stats() if finish is not None or sequence.request.running_stats else None,
    )


def _why_failed(sequence: Sequence) -> SpecdError:
    if sequence.grammar is None:
        return NonFiniteLogitsError("the model's output for this request was not finite")
    return sequence.grammar.failure or GrammarError(
        "no token can follow: the grammar and the other parameters (min_tokens, allowed_token_ids, bad_words) leave "
        "none, or the model's output was not finite"
    )


def failure(sequence: Sequence, error: SpecdError) -> SequenceDelta:
    """The last delta of a sequence that could not be computed."""
    return _end(sequence, FinishReason.ERROR, error)


def abortion(sequence: Sequence) -> SequenceDelta:
    """The last delta of a sequence that nobody wants any more."""
    text, _ = sequence.matcher.push(sequence.detokenizer.flush())
    text += sequence.matcher.flush()
    return dataclasses.replace(_end(sequence, FinishReason.ABORT, sequence.abort_error), text=text)


def _end(sequence: Sequence, reason: FinishReason, error: SpecdError | None) -> SequenceDelta:
    return SequenceDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        finish_reason=reason,
        error=error,
        stats=sequence.stats(),
    )


def _advance(sequence: Sequence, token: int) -> tuple[FinishReason | None, str | int | None, str]:
    """What one appended token does: (finish reason, stop reason, released text). A stop comes before the cap."""
    params = sequence.sampling
    checked = sequence.num_output > params.min_tokens  # up to there stops are neither sampled nor looked for
    is_eos = token in sequence.eos_ids and not params.ignore_eos
    if checked and (is_eos or token in params.stop_token_ids):
        reason = None if is_eos else token
        return FinishReason.STOP, reason, _stop_token_text(sequence, token) + sequence.matcher.flush()
    piece = sequence.detokenizer.push(token)
    if checked:
        piece, matched = sequence.matcher.push(piece)
        if matched is not None:
            return FinishReason.STOP, matched, piece
    if len(sequence.tokens) < sequence.limit:
        return None, None, piece
    tail = sequence.detokenizer.flush()
    if checked:
        tail, matched = sequence.matcher.push(tail)
        if matched is not None:
            return FinishReason.STOP, matched, piece + tail
    return FinishReason.LENGTH, None, piece + tail + sequence.matcher.flush()


def _stop_token_text(sequence: Sequence, token: int) -> str:
    """Text that a stop token leaves behind: incomplete characters before it, and its own text where it is asked for."""
    text = sequence.detokenizer.flush()
    if sequence.sampling.include_stop_str_in_output and token in sequence.sampling.stop_token_ids:
        text += sequence.detokenizer.push(token) + sequence.detokenizer.flush()
    text, _ = sequence.matcher.push(text)
    return text


def _origin(row: RowReport, source: DraftSource, position: int) -> TokenOrigin:
    if position < row.num_accepted:
        return source.origin
    kept_all = row.num_drafts > 0 and row.num_accepted == row.num_drafts
    return TokenOrigin.BONUS if kept_all else TokenOrigin.TARGET
