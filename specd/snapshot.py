"""What can be read off a scheduler while it runs: records for the control socket. No torch; changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

from specd.pages import PagePool
from specd.pipeline.schedule import Scheduler
from specd.request import Request
from specd.sequence import Sequence
from specd.status import EngineInfo, KVStatus, PageMap, RequestDetail, RequestStatus

_USER_TEXT = ("stop", "logit_bias", "bad_words_ids", "allowed_token_ids")  # of SamplingParams; shown as counts
_MOST_CELLS = 512  # of a page map


def live_sequences(scheduler: Scheduler) -> Iterator[Sequence]:
    """Every choice that has not ended, running ones first."""
    return itertools.chain(scheduler.running, scheduler.waiting)


def request_status(sequence: Sequence) -> RequestStatus:
    return RequestStatus(
        request_id=sequence.request.request_id,
        index=sequence.index,
        state="decoding" if sequence.decoding else "prefilling" if sequence.slot >= 0 else "waiting",
        age_s=time.monotonic() - sequence.request.arrival_s,
        prompt_tokens=sequence.num_prompt,
        output_tokens=sequence.num_output,
        pages=len(sequence.pages),
        draft_len=sequence.draft_len,
        num_draft_tokens=sequence.speculation.num_drafted,
        num_accepted_tokens=sequence.speculation.num_accepted,
    )


def request_detail(sequence: Sequence) -> RequestDetail:
    return RequestDetail(
        status=request_status(sequence),
        params=_params(sequence.request),
        preemptions=sequence.num_preemptions,
        cached_tokens=sequence.num_cached,
        acceptance_histogram=tuple(sequence.speculation.histogram),
        steps=tuple(sequence.history),
    )


def _params(request: Request) -> dict[str, object]:
    params: dict[str, object] = dataclasses.asdict(request.sampling)
    for name in _USER_TEXT:
        value = getattr(request.sampling, name)
        params[name] = None if value is None else len(value)
    if (grammar := request.sampling.grammar) is not None:
        params["grammar"] = {"kind": grammar.kind, "length": len(grammar.text)}
    return {"n": request.n, **params, "speculation": dataclasses.asdict(request.speculation)}


def page_map(pool: PagePool) -> PageMap:
    """A picture of the pool with a bounded number of cells, each for pages that are neighbours."""
    refs, cached = pool.occupancy()
    size = max(1, -(-pool.num_pages // _MOST_CELLS))
    most = [max(refs[first : first + size]) for first in range(0, pool.num_pages, size)]
    with_prefix = {page // size for page in cached}
    cells = ("s" if m > 1 else "u" if m else "c" if i in with_prefix else "." for i, m in enumerate(most))
    return PageMap(size, "".join(cells))


def kv_status(info: EngineInfo, pool: PagePool, *, prompt_tokens: int, cached_tokens: int) -> KVStatus:
    refs = [pool.refs(page) for page in range(pool.num_pages)]
    return KVStatus(
        page_size=pool.page_size,
        bytes=info.kv_bytes,
        total=pool.num_pages,
        free=pool.num_free - pool.num_cached,
        cached=pool.num_cached,
        owned=sum(count > 0 for count in refs),
        shared=sum(count > 1 for count in refs),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )
