"""`specd serve` around the daemon: what is loaded is not collected again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from specd.commands import serve
from specd.config import Config
from tests.daemons import FakeEngine


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


async def test_what_is_loaded_is_out_of_the_collector_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last collections of the process would go through all of it, seconds after `stopped`."""
    engine, seen = FakeEngine(), []

    async def load(config: Config) -> Any:
        seen.append(config)
        return engine

    monkeypatch.setattr(serve, "load_serving_engine", load)
    assert gc.get_freeze_count() == 0
    assert await serve._load(Config()) is engine
    assert seen == [Config()]
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10
