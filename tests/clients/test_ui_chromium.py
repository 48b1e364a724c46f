"""The page at /ui in a real browser, on the real model: Chromium without a window."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.clients.chromium import Page, browser, find
from tests.clients.served import KEY, MODEL, Served

pytestmark = [
    pytest.mark.clients,
    pytest.mark.real,
    pytest.mark.skipif(find() is None, reason="no chromium is installed"),
]

PROMPT = "Repeat this line five times: the cat sat on the mat, the cat sat on the mat."
NUM_TOKENS = 28
_WAIT_S = 180.0  # the machine may be busy
_KEPT = ".tok.o-d, .tok.o-n, .tok.o-p"
_PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drafting(served: Served) -> Iterator[Served]:
    """Every step drafts: what adaptive lengths would save by resting is not what is looked at here."""
    served.control("PATCH", "/v1/speculation", {"k": 3})
    yield served
    served.control("PATCH", "/v1/speculation", {})


@contextlib.asynccontextmanager
async def page_of(served: Served, folder: Path) -> AsyncIterator[Page]:
    async with browser(folder / "profile") as tab, tab() as page:
        await page.shape(1400, 900)
        await page.open(f"{served.url}/ui")
        yield page


async def unlock(page: Page, key: str) -> None:
    """Types the key where the page asks for one: it has been refused by then, which the browser notes as an error."""
    await page.until("document.querySelector('#key-dialog').open")
    await page.evaluate("document.querySelector('#key').focus()")
    await page.type(key)
    await page.press("Enter")
    refused = [error for error in page.errors if "401" in error]
    assert page.errors == refused
    page.errors.clear()


async def text(page: Page, selector: str) -> str:
    return str(await page.evaluate(f"document.querySelector({selector!r}).innerText"))


async def ask(page: Page, prompt: str, **settings: str) -> None:
    for name, value in settings.items():
        await page.evaluate(f"document.querySelector('#{name}').value = {value!r}")
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.type(prompt)
    await page.press("Enter")


async def test_a_prompt_with_and_without_speculation(drafting: Served, tmp_path: Path) -> None:
    async with page_of(drafting, tmp_path) as page:
        await unlock(page, KEY)
        await page.until("document.querySelector('#state').dataset.state === 'ready'", seconds=_WAIT_S)
        assert MODEL in await text(page, "#facts")

        await ask(page, PROMPT, max_tokens=str(NUM_TOKENS))
        await page.until(f"document.querySelector('{_KEPT}')", seconds=_WAIT_S)
        await page.screenshot(tmp_path / "during.png")
        await page.until("document.querySelector('.verdict').childElementCount", seconds=_WAIT_S)
        assert await page.evaluate("document.querySelectorAll('.verdict .equal').length") == 1
        with_drafts, without = await text(page, "[data-mode=auto] .output"), await text(page, "[data-mode=off] .output")
        assert with_drafts == without
        assert len(with_drafts.split()) > 4
        assert await page.evaluate(f"document.querySelectorAll('[data-mode=off] :is({_KEPT})').length") == 0
        for side in ("auto", "off"):
            assert "tokens/s" in await text(page, f"[data-mode={side}] .speed")
            assert "(prompt cached)" in await text(page, f"[data-mode={side}] .stats"), "neither computes it alone"

        await page.point(f"[data-mode=auto] :is({_KEPT})")
        await page.until("!document.querySelector('#tip').hidden")
        tip = await text(page, "#tip")
        assert "step" in tip
        assert "position 1 of its block" in tip
        assert tip.count("%") >= 2, "the target's probability and the drafter's"
        await page.evaluate("document.querySelector('[data-mode=off] .output').focus()")
        await page.press("ArrowRight")
        assert "the target's own" in await text(page, "#tip")
        await page.press("Escape")
        assert await page.evaluate("document.querySelector('#tip').hidden")

        await page.until("document.querySelector('#acceptance').ariaLabel?.startsWith('Drafts kept: position 1')")
        assert await page.evaluate("document.querySelectorAll('#timeline rect.s-verify').length") > 0
        assert await page.evaluate("document.querySelector('#pages').ariaLabel.endsWith('free')")

        for name, width, dark in (("wide", 1400, False), ("wide-dark", 1400, True), ("narrow", 400, False)):
            await page.shape(width, 900, dark=dark)
            await page.screenshot(tmp_path / f"{name}.png", whole=True)
            assert (tmp_path / f"{name}.png").read_bytes()[:8] == _PNG
            assert await page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
        assert page.errors == []
        assert {url.partition("/ui")[0].partition("/v1")[0] for url in page.urls} == {drafting.url}


async def test_what_goes_wrong_is_said(served: Served, tmp_path: Path) -> None:
    async with page_of(served, tmp_path) as page:
        await unlock(page, "sk-nobody")
        await page.until("!document.querySelector('#key-refused').hidden", seconds=_WAIT_S)
        await unlock(page, KEY)
        await page.until("document.querySelector('#facts b')", seconds=_WAIT_S)
        await ask(page, "hello", temperature="9")
        await page.until("document.querySelector('.failed')", seconds=_WAIT_S)
        assert "temperature" in await text(page, "[data-mode=auto] .failed")
        assert "not run" in await text(page, "[data-mode=off] .output")
        assert await page.evaluate("document.querySelector('#prompt').value") == "hello", "it can be sent again"
        assert await page.evaluate("document.querySelector('#send').textContent") == "Run"
        assert [error for error in page.errors if "400" not in error and "401" not in error] == []
