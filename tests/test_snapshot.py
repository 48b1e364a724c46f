"""What is shown of a live request: numbers, never what a client wrote."""

from __future__ import annotations

import pytest

from specd.request import Grammar, GrammarKind
from specd.snapshot import request_detail
from tests.commit_blocks import params_of, sequence_of


@pytest.mark.parametrize(("kind", "text"), [("json_schema", '{"const":"secret"}'), ("regex", "secret")])
def test_nothing_that_a_client_wrote_is_shown(kind: GrammarKind, text: str) -> None:
    sampling = params_of(
        stop=("secret",), logit_bias=((7, 1.0),), bad_words_ids=((7,),), allowed_token_ids=(7, 8),
        grammar=Grammar(kind, text),
    )  # fmt: skip
    params = request_detail(sequence_of(sampling)).params
    assert params["grammar"] == {"kind": kind, "length": len(text)}
    assert [params[name] for name in ("stop", "logit_bias", "bad_words_ids", "allowed_token_ids")] == [1, 1, 1, 2]
    assert "secret" not in repr(params)
    assert request_detail(sequence_of(params_of())).params["grammar"] is None
