"""What is asked (`Request`) and what comes back (`SequenceDelta`): host records, no torch."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

from specd.errors import SpecdError

_LEAST_TEMPERATURE = 1e-5  # below it logits / temperature leaves fp32; vLLM's limit, and greedy for any model


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words where there is one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenOrigin(enum.StrEnum):
    """Where an emitted token came from.

    DRAFT, NGRAM, PREDICTION, CORPUS and GRAMMAR were proposed and kept; TARGET is the target's own token (plain
    decoding, or the one that replaced a rejected draft); BONUS is the target's token after every draft of the step was
    kept.
    """

    TARGET = "t"
    DRAFT = "d"
    NGRAM = "n"
    PREDICTION = "p"
    CORPUS = "c"
    GRAMMAR = "g"
    BONUS = "b"


GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be, as a whole: a JSON text that a schema allows, a match of a regular expression, one of
    some strings (`text` is their JSON list), or a text of a Lark grammar in llguidance's dialect."""

    kind: GrammarKind
    text: str
    param: str = dataclasses.field(default="structured_outputs", compare=False)  # the field it came from, for errors


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Values are checked at the edge (server, cli); here they are taken as valid.

    The order of processing is: logit bias, penalties, allowed and bad tokens, min_tokens, grammar, then temperature,
    top-k, top-p, min-p (spec: Hugging Face's and vLLM's order). All of them hold at every draft position.
    """

    max_tokens: int
    seed: int  # always resolved: a random one is drawn at the edge when the client gave none
    temperature: float = 1.0  # 0, or next to it, is greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 0 behaves as argmax
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token must never complete them
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()  # special tokens that are text all the same: the server looks for them
    logprobs: int | None = None  # None = off, 0 = the chosen token alone, n = and the n most likely
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens; the first has none
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        """Whether only the most likely token can be drawn (ties: the lowest id). All of specd asks here."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationParams:
    """A request's own wish about speculation (`speculation` in the request body)."""

    mode: Literal["auto", "off"] = "auto"
    max_draft: int | None = None  # None = the engine's maximum
    detail: Literal["none", "summary", "detailed", "tokens"] = "summary"
    pinned: bool = False  # max_draft drafts in every step, whatever the length policy says; no client may ask for it


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt and `n` choices to be generated for it."""

    request_id: str  # unique among live requests
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams = SpeculationParams()
    n: int = 1
    prompt_index: int = 0  # index in a list of prompts; part of what a seed means: (seed, prompt_index, choice)
    prediction: tuple[int, ...] | None = None  # what the output is likely to be; it changes the speed alone
    cache_salt: bytes = b""  # scopes prefix cache and draft sources
    tenant: bytes = b""  # the API key it came with, as a salt: limits and the order of waiting go by it
    weight: int = 1  # of that key among those that wait
    priority: int = 0  # lower is earlier, among the requests of one key
    timeout_s: float | None = None  # from arrival to the last token
    arrival_s: float = 0.0  # time.monotonic()
    running_stats: bool = False  # every delta carries the stats so far, not the last one alone


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw target log-probability (before temperature and penalties) of one emitted token, natural log."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclasses.dataclass(frozen=True, slots=True)
class DraftedToken:
    """What was proposed where an emitted token stands: that token itself, or the one that was rejected there."""

    token_id: int
    prob: float  # under the drafter, before temperature and filters; 1 when a proposer was certain


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceStats:
    """What one choice cost; complete on its last delta."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # every token emitted, a stop token included
    num_spec_steps: int  # steps with at least one draft
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]  # [max_draft + 1]; entry i: steps with a draft that kept i
    per_step_drafted: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    num_preemptions: int
    queue_s: float  # submit to first scheduled
    ttft_s: float  # submit to first token
    total_s: float
    accepted_prediction_tokens: int = 0  # tokens of the request's prediction that were verified and emitted ...
    rejected_prediction_tokens: int = 0  # ... and that were verified in vain


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one step added to one choice. `text` lags `token_ids` while a character or a stop string is incomplete.

    The concatenation of `token_ids`, `text` and `logprobs` over all deltas does not depend on how tokens were grouped
    into steps. `origins` tells that grouping: who proposed a token, in which step, and where in the step's block it
    stood. Exactly one delta per choice has a `finish_reason`; it is the last.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token id when asked for
    origins: tuple[tuple[TokenOrigin, int, int], ...] = ()  # (origin, step, position in the block) per token id
    drafts: tuple[DraftedToken | None, ...] = ()  # one per token id with detail "tokens"
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for eos and length
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of prompt tokens 1.., with the first token
    error: SpecdError | None = None  # with FinishReason.ERROR
    stats: SequenceStats | None = None  # with a finish_reason, or with `Request.running_stats`
