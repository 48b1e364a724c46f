"""Reading the configuration again: whole or not at all; every option that says it is reloadable is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from specd.config import Config, SchedulerConfig, ServerConfig
from specd.config_loader import options
from specd.errors import ConfigError
from specd.reload import Reloader


def test_one_who_cannot_take_it_keeps_all_from_taking_it() -> None:
    taken: list[Config] = []

    def takes(config: Config) -> Callable[[], None]:
        return lambda: taken.append(config)

    def refuses(config: Config) -> Callable[[], None]:
        raise ConfigError("no such group")

    new = Config(server=ServerConfig(max_stop=9), scheduler=SchedulerConfig(max_running=1, max_waiting=5))
    reloader = Reloader(Config(), lambda: new)
    reloader.add(takes)
    reloader.add(refuses)
    with pytest.raises(ConfigError, match="no such group"):
        reloader.reload()
    assert taken == []
    assert reloader.config == Config()
    reloader._prepares.pop()
    report = reloader.reload()
    assert report.applied == {"server.max_stop": (4, 9), "scheduler.max_waiting": (1024, 5)}
    assert report.needs_restart == {"scheduler.max_running": (16, 1)}
    merged = Config(server=ServerConfig(max_stop=9), scheduler=SchedulerConfig(max_waiting=5))
    assert taken == [merged]
    assert (reloader.config, reloader.successes, reloader.failures) == (merged, 1, 1)


def test_every_option_is_applied_or_named() -> None:
    """A new value for each option alone: in `applied` when it is reloadable, else in `needs_restart`."""
    for option in options():
        section = getattr(Config(), option.section)
        changed = dataclasses.replace(section, **{option.field.name: object()})
        new = dataclasses.replace(Config(), **{option.section: changed})
        reloader = Reloader(Config(), lambda new=new: new)
        try:
            report = reloader.reload(dry_run=True)
        except TypeError:  # check_together compares: only settings that need a restart are in it
            assert not option.field.metadata["reloadable"]
            continue
        found = report.applied if option.field.metadata["reloadable"] else report.needs_restart
        assert found.keys() == {option.key}
