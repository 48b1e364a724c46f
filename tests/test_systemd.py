"""The unit files: systemd's own checker has nothing to say, and their limits agree with the daemon's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specd.config import Config
from specd.daemon import EXIT_CONFIG, EXIT_CUT_OFF

UNITS = Path(__file__).parents[1] / "systemd"


def setting(name: str) -> str:
    (value,) = settings(name)
    return value


def settings(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", (UNITS / "specd@.service").read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["specd@.service", "specd@.socket"])
def test_systemd_accepts_the_units(unit: str, tmp_path: Path) -> None:
    """An unknown setting is only a warning to systemd: nothing may be printed at all."""
    for file in UNITS.glob("specd@.*"):
        text = file.read_text().replace("/usr/local/bin/specd", sys.executable)  # the checker looks for the program
        (tmp_path / file.name).write_text(text)
    result = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_limits_agree_with_the_daemon() -> None:
    assert int(setting("TimeoutStopSec")) > Config().server.drain_timeout_s
    assert int(setting("RestartPreventExitStatus")) == EXIT_CONFIG
    assert int(setting("SuccessExitStatus")) == EXIT_CUT_OFF
    assert setting("Type") == "notify"


def test_downloads_go_where_the_daemon_may_write() -> None:
    """ProtectHome hides /home: both caches are under the unit's CacheDirectory."""
    assert setting("CacheDirectory") == "specd"
    assert set(settings("Environment")) == {"XDG_CACHE_HOME=%C", "HF_HOME=%C/specd/huggingface"}
