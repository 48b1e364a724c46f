"""What is shown of a live request: numbers, never what a client wrote."""

from __future__ import annotations

import pytest

from specd.pages import PagePool
from specd.request import Grammar, GrammarKind
from specd.snapshot import page_map, request_detail
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


def test_a_page_map_shows_the_busiest_page_of_each_cell() -> None:
    pool = PagePool(num_pages=8, page_size=16)
    mine, shared, kept = pool.allocate(3)
    pool.publish(shared, b"shared")
    pool.match([b"shared"])
    pool.publish(kept, b"kept")
    pool.release([kept])
    cells = page_map(pool).cells
    assert (page_map(pool).cell_pages, len(cells)) == (1, 8)
    assert (cells[mine], cells[shared], cells[kept]) == ("u", "s", "c")
    assert cells.count(".") == 5

    large = PagePool(num_pages=1201, page_size=16)
    pages = large.allocate(1)
    found = page_map(large)
    assert found.cell_pages == 3
    assert found.cells == "".join("u" if i == pages[0] // 3 else "." for i in range(401))
