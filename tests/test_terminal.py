"""What `generate` and `chat` write: tokens coloured by origin, and the summary."""

from __future__ import annotations

import io

from specd.commands.terminal import TextPrinter, summary, wants_color
from specd.request import FinishReason, SequenceDelta, SequenceStats
from tests.test_cli import B, D, FakeTokenizer, T, delta


def test_colours_follow_origins() -> None:
    out = io.StringIO()
    printer = TextPrinter(out, FakeTokenizer(), color=True)  # type: ignore[arg-type]
    printer.push(delta("ab", T, D))
    printer.push(delta("c\0", B, T, finish=FinishReason.STOP))
    assert out.getvalue() == "a\x1b[32mb\x1b[0m\x1b[33mc\x1b[0m"
    assert printer.text == "abc\0"
    assert "target 2" in printer.legend()
    assert "drafter 1" in printer.legend()


def test_an_id_of_a_padded_head_has_no_text() -> None:
    out = io.StringIO()
    printer = TextPrinter(out, FakeTokenizer(), color=True)  # type: ignore[arg-type]
    padding = SequenceDelta("r", 0, token_ids=(FakeTokenizer.vocab_size,), origins=((T, 0, 0),))
    for item in (delta("a", T), padding, delta("b", T, finish=FinishReason.LENGTH)):
        printer.push(item)
    assert out.getvalue() == "ab"


def test_without_colour_the_released_text_is_written() -> None:
    out = io.StringIO()
    printer = TextPrinter(out, FakeTokenizer(), color=False)  # type: ignore[arg-type]
    printer.push(delta("ab", T, D))
    assert out.getvalue() == "ab"
    assert "\x1b" not in printer.legend()


def test_colour_is_for_terminals() -> None:
    assert not wants_color("auto", io.StringIO())
    assert wants_color("always", io.StringIO())


def test_summary_without_speculation() -> None:
    plain = SequenceStats(
        prompt_tokens=7,
        cached_tokens=4,
        completion_tokens=1,
        num_spec_steps=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        acceptance_histogram=(),
        per_step_drafted=(),
        per_step_accepted=(),
        num_preemptions=0,
        queue_s=0.0,
        ttft_s=0.5,
        total_s=0.5,
    )
    assert summary(plain) == "7 prompt tokens (4 cached), 1 new, no decode, first token after 0.50 s"
