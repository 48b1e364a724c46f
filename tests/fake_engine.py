"""A scripted engine behind `specd/server/protocol.py`, and a byte-level tokenizer with real special tokens.

It says what its script says, token by token, with the stops and caps of the request, and groups the tokens into deltas
as told: answers must not depend on that grouping.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specd.errors import NonFiniteLogitsError
from specd.request import (
    DraftedToken,
    FinishReason,
    Grammar,
    Request,
    SequenceDelta,
    SequenceStats,
    TokenLogprob,
    TokenOrigin,
)
from specd.status import EngineInfo, EngineState, EngineStats, PageMap, RequestStatus
from specd.text import Detokenizer, PaddedTokens, StopMatcher, Tokenizer

SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")
MAX_DRAFT = 4
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, bos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """256 byte tokens, one merge ("he"), three special tokens; <|im_end|> is eos."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    vocabulary["he"] = len(vocabulary)
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    ids = {text: backend.get_vocab_size(with_added_tokens=True) - len(SPECIAL) + i for i, text in enumerate(SPECIAL)}
    assert all(backend.token_to_id(text) == number for text, number in ids.items())
    return Tokenizer(
        backend,
        eos_ids=(ids["<|im_end|>"],),
        bos_id=ids["<|bos|>"] if bos else None,
        add_bos=bos,
        chat_template=chat_template,
    )


def make_info(tokenizer: Tokenizer, **changes: Any) -> EngineInfo:
    info = EngineInfo(
        model="tiny",
        served_names=("tiny", "org/alias"),
        weight_bytes=1000,
        dtype="float32",
        max_len=512,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        drafter="ngram",
        max_draft=MAX_DRAFT,
        acceptance="exact",
        kv_tokens=4096,
        page_size=16,
        max_running=8,
        fingerprint="fp_0123456789",
        generation_defaults={"temperature": 0.6, "top_k": 40},
        created=1_700_000_000,
    )
    return dataclasses.replace(info, **changes)


def no_stats() -> EngineStats:
    return EngineStats(
        state=EngineState.READY,
        uptime_s=1.0,
        last_progress_s=0.0,
        running=0,
        waiting=0,
        pages_total=256,
        pages_free=256,
        pages_cached=0,
        accepted_requests=0,
        finished_requests={},
        prompt_tokens=0,
        cached_tokens=0,
        generation_tokens=0,
        preemptions=0,
        steps=0,
        drafts={"drafter": 0, "ngram": 0, "prediction": 0},
        draft_tokens={"drafter": 0, "ngram": 0, "prediction": 0},
        accepted_tokens={"drafter": 0, "ngram": 0, "prediction": 0},
        accepted_per_position=(0,) * MAX_DRAFT,
        drafted_per_position=(0,) * MAX_DRAFT,
    )


@dataclasses.dataclass(slots=True)
class Script:
    """What the engine says and how it misbehaves."""

    text: Callable[[Request, int], str] = lambda request, index: "hello world"
    blocks: Sequence[int] = (1,)  # tokens per delta, repeated for ever
    delay_s: float = 0.0  # before each delta
    fail_after: int | None = None  # deltas, then FinishReason.ERROR
    abort_after: int | None = None  # deltas, then FinishReason.ABORT
    raise_after: int | None = None  # deltas, then the iterator raises
    hang_after: int | None = None  # deltas, then nothing for ever
    stop_short_after: int | None = None  # deltas, then the stream ends without a finish reason
    refuse: Exception | None = None  # raised by submit
    refuse_grammar: Exception | None = None  # raised by prepare_grammar
    finish: bool = True  # ends with eos; else repeats its text up to the cap


class FakeEngine:
    """EngineProtocol without a model. `live`, `aborted` and `requests_seen` say what happened to it."""

    def __init__(self, script: Script | None = None, *, tokenizer: Tokenizer | None = None, **info: Any) -> None:
        self.script = script or Script()
        self.tokenizer = tokenizer or byte_tokenizer()
        self.info = make_info(self.tokenizer, **info)
        self.state = EngineState.READY
        self.snapshot = no_stats()
        self.change: Callable[[SequenceDelta], SequenceDelta] = lambda delta: delta  # last word on every delta
        self.live: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.requests_seen: list[Request] = []
        self.grammars: list[Grammar] = []  # what was to be prepared
        self.admitted: list[tuple[bytes, int]] = []  # what `admit` was asked

    def admit(self, tenant: bytes, requests: Sequence[Request] = ()) -> None:
        self.admitted.append((tenant, len(requests)))

    async def prepare_grammar(self, request: Request) -> None:
        if request.sampling.grammar is None:
            return
        self.grammars.append(request.sampling.grammar)
        if self.script.refuse_grammar is not None:
            raise self.script.refuse_grammar

    def submit(self, request: Request) -> AsyncIterator[SequenceDelta]:
        if self.script.refuse is not None:
            raise self.script.refuse
        assert request.request_id not in self.live, "ids must be unique among live requests"
        self.live[request.request_id] = request
        self.requests_seen.append(request)
        return self._run(request)

    async def _run(self, request: Request) -> AsyncIterator[SequenceDelta]:
        try:
            for number, delta in enumerate(self._interleave(request)):
                await asyncio.sleep(self.script.delay_s)
                await self._misbehave(number)
                if number == self.script.stop_short_after:
                    return
                if number == self.script.fail_after:
                    yield self._end(delta, FinishReason.ERROR, NonFiniteLogitsError("secret detail"))
                    return
                if number == self.script.abort_after:
                    yield self._end(delta, FinishReason.ABORT, None)
                    return
                yield self.change(delta)
            self.live.pop(request.request_id, None)
        finally:
            self.abort(request.request_id)

    async def _misbehave(self, number: int) -> None:
        if number == self.script.hang_after:
            await asyncio.Event().wait()
        if number == self.script.raise_after:
            raise RuntimeError("/secret/path exploded")

    @staticmethod
    def _end(delta: SequenceDelta, reason: FinishReason, error: NonFiniteLogitsError | None) -> SequenceDelta:
        return SequenceDelta(delta.request_id, delta.index, finish_reason=reason, error=error)

    def _interleave(self, request: Request) -> Iterator[SequenceDelta]:
        """The deltas of all choices in turn, as a batch would give them."""
        sources = [group(say(request, i, self.script, self.tokenizer), self.script.blocks) for i in range(request.n)]
        while sources:
            for source in list(sources):
                delta = next(source, None)
                if delta is None:
                    sources.remove(source)
                else:
                    yield delta

    def abort(self, request_id: str) -> bool:
        if self.live.pop(request_id, None) is None:
            return False
        self.aborted.append(request_id)
        return True

    def stats(self) -> EngineStats:
        return dataclasses.replace(self.snapshot, state=self.state, running=len(self.live))

    def requests(self, most: int | None = None) -> list[RequestStatus]:
        return [
            RequestStatus(name, 0, "decoding", 0.5, len(request.prompt_ids), 1, 1, 2, 4, 2)
            for name, request in itertools.islice(self.live.items(), most)
        ]

    def page_map(self) -> PageMap:
        return PageMap(1, "uscc" + "." * 252)

    def trace(self, seconds: float) -> dict[str, Any]:
        return {"traceEvents": [], "seconds": seconds}


def say(request: Request, index: int, script: Script, tokenizer: Tokenizer) -> Iterator[SequenceDelta]:
    """One delta per token, until eos, a stop or the cap: what the commit loop of the real engine does."""
    params = request.sampling
    ids = tokenizer.encode(script.text(request, index), add_special=False)
    tokens = PaddedTokens(tokenizer, shown=params.shown_special_ids)
    detokenizer = Detokenizer(tokens, params.skip_special_tokens)
    matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
    finish: FinishReason | None
    reason: str | int | None
    for count in range(1, params.max_tokens + 1):
        ended = script.finish and count > len(ids)
        token = tokenizer.eos_ids[0] if ended else ids[(count - 1) % len(ids)]
        if ended or token in params.stop_token_ids:
            text = matcher.push(detokenizer.flush())[0] + matcher.flush()
            finish, reason = FinishReason.STOP, None if ended else token
        else:
            text, matched = matcher.push(detokenizer.push(token))
            finish, reason = (FinishReason.STOP, matched) if matched is not None else (None, None)
        if finish is None and count == params.max_tokens:
            text += matcher.push(detokenizer.flush())[0] + matcher.flush()
            finish = FinishReason.LENGTH
        yield SequenceDelta(
            request_id=request.request_id,
            index=index,
            token_ids=(token,),
            text=text,
            logprobs=_logprobs(token, params.logprobs, tokenizer),
            origins=((TokenOrigin.DRAFT if count % 2 else TokenOrigin.TARGET, count, 0),),
            drafts=(DraftedToken(token, 0.75) if count % 2 else DraftedToken(104, 0.25),)
            if request.speculation.detail == "tokens"
            else (),
            finish_reason=finish,
            stop_reason=reason,
            prompt_logprobs=_prompt_logprobs(request, tokenizer) if count == 1 else None,
            stats=make_stats(request, count) if finish is not None or request.running_stats else None,
        )
        if finish is not None:
            return


def _logprobs(token: int, count: int | None, tokenizer: Tokenizer) -> tuple[TokenLogprob, ...] | None:
    if count is None:
        return None
    top = tuple(((token + i) % tokenizer.vocab_size, -0.5 - i) for i in range(count))
    return (TokenLogprob(token, -0.5, top),)


def _prompt_logprobs(request: Request, tokenizer: Tokenizer) -> tuple[TokenLogprob, ...] | None:
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return None
    return tuple(item for token in request.prompt_ids[1:] for item in _logprobs(token, wanted, tokenizer) or ())


def make_stats(request: Request, completion_tokens: int) -> SequenceStats:
    return SequenceStats(
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=len(request.prompt_ids) // 2,
        completion_tokens=completion_tokens,
        num_spec_steps=4,
        num_draft_tokens=10,
        num_accepted_tokens=6,
        acceptance_histogram=(1, 1, 1, 1, 0),
        per_step_drafted=(4, 2, 2, 2),
        per_step_accepted=(3, 2, 1, 0),
        num_preemptions=0,
        queue_s=0.001,
        ttft_s=0.01,
        total_s=0.1,
    )


def group(deltas: Iterator[SequenceDelta], blocks: Sequence[int]) -> Iterator[SequenceDelta]:
    """Consecutive deltas of one choice joined into blocks of the given sizes, as steps of several tokens are."""
    position = 0
    block: list[SequenceDelta] = []
    for delta in deltas:
        block.append(delta)
        if len(block) >= blocks[position % len(blocks)]:
            position += 1
            yield join(block)
            block = []
    if block:
        yield join(block)


def join(block: Sequence[SequenceDelta]) -> SequenceDelta:
    last = block[-1]
    return dataclasses.replace(
        last,
        token_ids=tuple(token for delta in block for token in delta.token_ids),
        text="".join(delta.text for delta in block),
        logprobs=None if last.logprobs is None else tuple(item for delta in block for item in delta.logprobs or ()),
        origins=tuple(origin for delta in block for origin in delta.origins),
        drafts=tuple(draft for delta in block for draft in delta.drafts),
        prompt_logprobs=block[0].prompt_logprobs,
    )
