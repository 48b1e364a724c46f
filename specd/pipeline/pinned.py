"""Rows that draft whatever the length policy says: the self-test's, which would prove nothing without drafts. No torch.

Each function asks the policy, and does not heed it where a row is pinned. Such a row drafts `max_draft` tokens in each
decode step, its drafter keeps up with it, and the drafter goes before a proposer.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from specd.pipeline.draft_length import DraftLength, DraftRequest
from specd.sequence import Sequence
from specd.step import DraftSource


def is_pinned(sequence: Sequence) -> bool:
    return sequence.request.speculation.pinned


def prefers(length: DraftLength, sequence: Sequence, source: DraftSource) -> bool:
    """Whether proposals of `source` are taken where the drafter could draft."""
    return not is_pinned(sequence) and length.prefers(sequence, source, DraftSource.DRAFTER)


def choose(length: DraftLength, requests: Rows[DraftRequest], num_plain: int) -> list[int]:
    """Drafts for each request."""
    lengths = length.choose(requests, num_plain)
    return [
        request.max_drafts if is_pinned(request.sequence) else chosen
        for request, chosen in zip(requests, lengths, strict=True)
    ]


def wants_drafter(length: DraftLength, sequence: Sequence, source: DraftSource) -> bool:
    return is_pinned(sequence) or length.wants_drafter(sequence, source)
