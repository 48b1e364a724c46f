"""Response bodies of OpenAI's shapes, from deltas. Pure: the stream (`sse.py`) and the whole answer share all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from specd.hermes import Text
from specd.request import DraftedToken, FinishReason, SequenceDelta, SequenceStats, TokenLogprob, TokenOrigin
from specd.server.echo import Echo
from specd.server.fields import Endpoint
from specd.server.openai import GenerationCall
from specd.server.parts import PLAIN, Part, PartReader, chat_message, joined, text_of
from specd.status import EngineInfo
from specd.text import Detokenizer, Tokenizer

NO_ECHO = Echo("", ())
_WHOLE = slice(None)
LOGPROB_FLOOR = -9999.0  # OpenAI's value for "never"; JSON has no infinity


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one choice that are written together."""

    parts: tuple[Part, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: tuple[tuple[TokenOrigin, int, int], ...] = ()
    drafts: tuple[DraftedToken | None, ...] = ()

    @property
    def text(self) -> str:
        """The answer's own: without what it thinks and what it calls."""
        return text_of(self.parts)


class ChoiceText:
    """One choice while it grows: `add` deltas, `take` what has gathered since the last time.

    scores_only: the prompt alone is looked at, tokens that follow it are left out.
    reader: what finds the parts of the text; without one it is all text.
    """

    def __init__(self, *, scores_only: bool = False, reader: PartReader | None = None) -> None:
        self._scores_only = scores_only
        self._reader = reader
        self._parts: list[Part] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._origins: list[tuple[TokenOrigin, int, int]] = []
        self._drafts: list[DraftedToken | None] = []
        self.num_tokens = 0  # taken or not
        self.finish_reason: str | None = None  # chat's "tool_calls" among them
        self.stop_reason: str | int | None = None
        self.stats: SequenceStats | None = None
        self.running_stats: SequenceStats | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def num_scored(self) -> int:
        """Tokens with log-probabilities that were not taken yet, the prompt's among them."""
        return len(self._logprobs) + len(self.prompt_logprobs or ())

    @property
    def has_parts(self) -> bool:
        """Whether there is anything to write but tokens."""
        return bool(self._parts)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the thinking; None where none was looked for."""
        return None if self._reader is None else self._reader.num_reasoning_tokens

    def add(self, delta: SequenceDelta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.running_stats = delta.stats or self.running_stats
        if self._scores_only:
            end = delta.finish_reason and FinishReason.LENGTH
            nothing = dataclasses.replace(delta, token_ids=(), text="", logprobs=None, origins=(), stop_reason=None)
            nothing = dataclasses.replace(nothing, drafts=())
            delta = dataclasses.replace(nothing, finish_reason=end)
        if self._reader is not None:
            self._parts += self._reader.read(delta)
        elif delta.text:
            self._parts.append(Text(delta.text))
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self._origins += delta.origins
        self._drafts += delta.drafts
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            reasons = delta.finish_reason, delta.stop_reason
            self.finish_reason, self.stop_reason = self._reader.finish(delta) if self._reader else reasons
            self.stats = delta.stats

    def take(self) -> Piece:
        parts = tuple(joined(self._parts))
        ids, logprobs, origins = tuple(self._token_ids), tuple(self._logprobs), tuple(self._origins)
        piece = Piece(parts, ids, logprobs, origins, tuple(self._drafts))
        for gathered in (self._parts, self._token_ids, self._logprobs, self._origins, self._drafts):
            gathered.clear()
        return piece


class TextOffsets:
    """`text_offset` of completions: characters complete before each token, whatever the grouping of tokens.

    start: characters of an echoed prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, start: int) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._vocab_size = tokenizer.vocab_size
        self._offset = start

    def advance(self, token_id: int) -> int:
        """The token's offset."""
        offset = self._offset
        if token_id < self._vocab_size:
            self._offset += len(self._detokenizer.push(token_id))
        return offset


class ResponseWriter:
    """The parts of one call's answer; holds no text, so that stream and whole answer can share it."""

    def __init__(self, call: GenerationCall, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.call = call
        self._info = info
        self._tokenizer = tokenizer
        skip = call.requests[0].sampling.skip_special_tokens
        self._offsets = [
            TextOffsets(tokenizer, skip_special=skip, start=len(self.echo(i).text)) for i in range(call.num_choices)
        ]

    def head(self, kind: str) -> dict[str, Any]:
        """What every body and chunk begins with."""
        return {
            "id": self.call.response_id,
            "object": kind,
            "created": self.call.created,
            "model": self.call.model,
            "system_fingerprint": self._info.fingerprint,
        }

    def prompt_ids(self, choice: int) -> tuple[int, ...]:
        return self.call.requests[choice // self.call.n].prompt_ids

    def choices(self) -> list[ChoiceText]:
        """Empty ones, for the deltas to come."""
        scores_only = self.call.scores_only
        return [ChoiceText(scores_only=scores_only, reader=self._reader()) for _ in range(self.call.num_choices)]

    def _reader(self) -> PartReader | None:
        return None if self.call.reading == PLAIN else PartReader(self.call.reading, self._tokenizer)

    def echo(self, choice: int) -> Echo:
        """What stands before the text of a choice; empty when nothing is to be repeated."""
        return self.call.echoes[choice // self.call.n] if self.call.echoes else NO_ECHO

    def echo_logprobs(
        self, choice: int, found: Sequence[TokenLogprob] | None, part: slice = _WHOLE
    ) -> dict[str, Any] | None:
        """`logprobs` of an echoed prompt, whose first token has none; found: of the tokens after it; part: of it."""
        if self.call.logprobs is None or not self.call.echoes or found is None:
            return None
        scores = (None, *found)[part]
        return {
            "text_offset": list(self.echo(choice).offsets[part]),
            "token_logprobs": [item and _finite(item.logprob) for item in scores],
            "tokens": [self._token(token_id) for token_id in self.prompt_ids(choice)[part]],
            "top_logprobs": [item and self._top(item) for item in scores],
        }

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any] | None:
        """The `logprobs` of one choice in its endpoint's shape; None when not asked for or without tokens."""
        if self.call.logprobs is None or not piece.logprobs:
            return None
        if self.call.endpoint is Endpoint.CHAT:
            return {"content": [self._chat_logprob(item) for item in piece.logprobs], "refusal": None}
        offsets = self._offsets[choice]
        return {
            "text_offset": [offsets.advance(item.token_id) for item in piece.logprobs],
            "token_logprobs": [_finite(item.logprob) for item in piece.logprobs],
            "tokens": [self._token(item.token_id) for item in piece.logprobs],
            "top_logprobs": [self._top(item) for item in piece.logprobs],
        }

    def _chat_logprob(self, item: TokenLogprob) -> dict[str, Any]:
        top = [self._token_entry(token, logprob) for token, logprob in item.top]
        return {**self._token_entry(item.token_id, item.logprob), "top_logprobs": top}

    def _token_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = list(_token_bytes(self._tokenizer, token_id))
        return {"token": self._token(token_id), "logprob": _finite(logprob), "bytes": data}

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Alternatives by text, the chosen token among them. Tokens with one text are told apart by their ids."""
        names: dict[str, int] = {}
        top: dict[str, float] = {}
        for token_id, logprob in ((item.token_id, item.logprob), *item.top):
            name = self._token(token_id)
            if names.setdefault(name, token_id) != token_id:
                name = f"token_id:{token_id}"
            top.setdefault(name, _finite(logprob))
        return top

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.call.tokens_as_ids else token_name(self._tokenizer, token_id)

    def usage(self, choices: Sequence[ChoiceText]) -> dict[str, Any]:
        """Usage of all choices; a prompt counts once however many choices it has. Cached tokens once they are known."""
        prompt_tokens = sum(len(request.prompt_ids) for request in self.call.requests)
        completion_tokens = sum(choice.num_tokens for choice in choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        firsts = [choice.stats for choice in choices[:: self.call.n]]
        if all(stats is not None for stats in firsts):
            cached = sum(stats.cached_tokens for stats in firsts if stats is not None)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        details = {**self._thought(choices), **self._predicted(choices)}
        return usage | ({"completion_tokens_details": details} if details else {})

    @staticmethod
    def _thought(choices: Sequence[ChoiceText]) -> dict[str, int]:
        """Tokens of the thinking so far, where the model may think."""
        counts = [choice.num_reasoning_tokens for choice in choices]
        return {} if None in counts else {"reasoning_tokens": sum(count or 0 for count in counts)}

    def _predicted(self, choices: Sequence[ChoiceText]) -> dict[str, int]:
        """What became of a prediction, once all choices have ended: its tokens that were verified, kept or not."""
        if self.call.requests[0].prediction is None:
            return {}
        ended = [choice.stats for choice in choices if choice.stats is not None]
        if len(ended) < len(choices):
            return {}
        return {
            "accepted_prediction_tokens": sum(stats.accepted_prediction_tokens for stats in ended),
            "rejected_prediction_tokens": sum(stats.rejected_prediction_tokens for stats in ended),
        }

    def metrics(self, stats: SequenceStats | None) -> dict[str, Any]:
        """`metrics` in vLLM's shape, not with detail "none", and `sglext` in SGLang's when asked for."""
        if stats is None:
            return {}
        drafted, accepted, steps = stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_spec_steps
        summary: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": list(stats.acceptance_histogram),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self._info.max_draft,
        }
        if self.call.detail == "detailed":
            summary["per_step_accepted"] = list(stats.per_step_accepted)
            summary["per_step_drafted"] = list(stats.per_step_drafted)
        found: dict[str, Any] = {} if self.call.detail == "none" else {"metrics": {"speculative_decoding": summary}}
        return found | ({"sglext": {"spec_tokens_details": _sglang(summary)}} if self.call.spec_details else {})

    def timings(self, stats: SequenceStats | None) -> dict[str, Any]:
        """`{"timings": ...}` in llama.cpp's shape when asked for, from the stats so far."""
        if stats is None or not self.call.timings:
            return {}
        prompt_n, prompt_s = stats.prompt_tokens - stats.cached_tokens, stats.ttft_s - stats.queue_s
        predicted_n, predicted_s = stats.completion_tokens, stats.total_s - stats.ttft_s
        found: dict[str, Any] = {
            "cache_n": stats.cached_tokens,
            **_rate("prompt", prompt_n, prompt_s),
            **_rate("predicted", predicted_n, predicted_s),
        }
        if stats.num_draft_tokens:
            found |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
        return {"timings": found}

    def origins(self, piece: Piece) -> dict[str, Any]:
        """`{"specd": {"tokens": [[id, origin, step, position, p, rejected]]}}` with detail "tokens", else {}.

        p: the drafter's probability of what it proposed there; rejected: the text of that, where it was not kept.
        """
        if self.call.detail != "tokens" or not piece.origins:
            return {}
        found = zip(piece.token_ids, piece.origins, piece.drafts, strict=True)
        return {"specd": {"tokens": [[token, *origin, *self._drafted(token, draft)] for token, origin, draft in found]}}

    def _drafted(self, token_id: int, draft: DraftedToken | None) -> tuple[float | None, str | None]:
        if draft is None:
            return None, None
        kept = draft.token_id == token_id
        return draft.prob, None if kept else token_name(self._tokenizer, draft.token_id)

    def whole(self, choices: Sequence[ChoiceText]) -> dict[str, Any]:
        """The body of a request that does not stream, from choices that have finished."""
        chat = self.call.endpoint is Endpoint.CHAT
        body = self.head("chat.completion" if chat else "text_completion")
        pieces = [choice.take() for choice in choices]
        body["choices"] = [self._whole_choice(i, choices[i], piece) for i, piece in enumerate(pieces)]
        body["usage"] = self.usage(choices)
        if chat and self.call.return_token_ids:
            body["prompt_token_ids"] = list(self.prompt_ids(0))
        if len(choices) == 1:
            body |= {**self.metrics(choices[0].stats), **self.timings(choices[0].stats), **self.origins(pieces[0])}
        return body

    def _whole_choice(self, index: int, choice: ChoiceText, piece: Piece) -> dict[str, Any]:
        chat = self.call.endpoint is Endpoint.CHAT
        body: dict[str, Any] = {"index": index}
        if chat:
            body["message"] = chat_message(piece.parts, self.call.reading)
        else:
            body["text"] = self.echo(index).text + piece.text
        body["logprobs"] = _joined(self.echo_logprobs(index, choice.prompt_logprobs), self.logprobs(index, piece))
        body["finish_reason"] = choice.finish_reason
        body["stop_reason"] = choice.stop_reason
        if self.call.return_token_ids:
            body["token_ids"] = list(piece.token_ids)
            if not chat:
                body["prompt_token_ids"] = list(self.prompt_ids(index))
        if self.call.num_choices > 1:
            body |= {**self.metrics(choice.stats), **self.timings(choice.stats), **self.origins(piece)}
        return body


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two `logprobs` of completions as one."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def _sglang(summary: dict[str, Any]) -> dict[str, Any]:
    """The same numbers by SGLang's names (`return_spec_tokens_details`)."""
    return {
        "spec_accept_rate": summary["draft_acceptance_rate"],
        "spec_accept_length": summary["mean_acceptance_length"],
        "spec_num_correct_drafts": summary["num_accepted_draft_tokens"],
        "spec_num_proposed_drafts": summary["num_draft_tokens"],
        "spec_verify_ct": summary["num_spec_steps"],
        "spec_correct_drafts_histogram": summary["acceptance_histogram"],
    }


def _rate(name: str, count: int, seconds: float) -> dict[str, Any]:
    """llama.cpp's four numbers of a phase; a phase that took no time has no speed."""
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """One token as text; ids in the padding of wide logits have none."""
    return tokenizer.token_str(token_id) if token_id < tokenizer.vocab_size else f"token_id:{token_id}"


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Logits may be wider than the vocabulary; ids in the padding have no bytes."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def _finite(logprob: float) -> float:
    return LOGPROB_FLOOR if math.isnan(logprob) else max(logprob, LOGPROB_FLOOR)


def model_card(name: str, info: EngineInfo) -> dict[str, Any]:
    """One entry of /v1/models, with the fields that vLLM adds and UIs read."""
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "specd",
        "root": info.served_names[0],
        "parent": None,
        "permission": [],
        "max_model_len": info.max_len,
        "specd": {"drafters": [] if info.drafter == "none" else [info.drafter], "max_draft": info.max_draft},
    }
