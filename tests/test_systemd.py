"""The unit files: systemd's own checker has nothing to say, and their limits agree with the daemon's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specd import cli
from specd.config import Config
from specd.daemon import EXIT_CONFIG, EXIT_CUT_OFF
from specd.journal import journal_path

UNITS = Path(__file__).parents[1] / "systemd"


def setting(name: str) -> str:
    (value,) = settings(name)
    return value


def settings(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", (UNITS / "specd@.service").read_text(), re.MULTILINE)


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The unit files, with a program that is there: the checker looks for it."""
    shutil.copytree(UNITS, tmp_path / "units")
    service = tmp_path / "units" / "specd@.service"
    service.write_text(service.read_text().replace("/usr/local/bin/specd", sys.executable))
    return tmp_path / "units"


def analyze(units: Path, *words: str) -> tuple[int, str]:
    command = ["systemd-analyze", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=units)
    return result.returncode, result.stdout + result.stderr


@needs_systemd
@pytest.mark.parametrize("unit", ["specd@.service", "specd@.socket", "specd.slice"])
def test_systemd_accepts_the_units(unit: str, units: Path) -> None:
    """An unknown setting is only a warning to systemd: nothing may be printed at all. The drop-in is read as well."""
    assert analyze(units, "verify", str(units / unit)) == (0, "")


@needs_systemd
def test_the_check_sees_a_bad_drop_in(units: Path) -> None:
    (units / "specd@.service.d" / "api-keys.conf").write_text("[Service]\nLoadCredentials=x\n")
    assert "LoadCredentials" in analyze(units, "verify", str(units / "specd@.service"))[1]


@needs_systemd
def test_exposure(units: Path) -> None:
    """2.0 at most, of 10; it is 1.3. What systemd knows no better than to count as open is what a server needs."""
    code, text = analyze(
        units, "security", "--offline=true", "--threshold=20", "--no-pager", str(units / "specd@.service")
    )
    assert code == 0, text


@needs_systemd
def test_the_exposure_check_can_fail(units: Path) -> None:
    service = units / "specd@.service"
    service.write_text(re.sub(r"(?m)^(Private|Protect|Restrict|SystemCall|Capability).*\n", "", service.read_text()))
    assert analyze(units, "security", "--offline=true", "--threshold=20", "--no-pager", str(service))[0] != 0


def test_reload_asks_the_instance() -> None:
    assert setting("ExecReload").endswith("specd ctl --instance %i reload")
    assert setting("RuntimeDirectory") == "specd/%i"  # where --instance looks
    assert cli.build_parser().parse_args(setting("ExecReload").split()[1:]).verb == "reload"


def test_each_instance_has_a_place_for_its_journal() -> None:
    """ProtectSystem=strict leaves nothing else to write to; of the instance, for two daemons cannot share one."""
    assert (setting("StateDirectory"), setting("StateDirectoryMode")) == ("specd/%i", "0700")
    path = journal_path(Config().server.journal, {"STATE_DIRECTORY": "/var/lib/specd/chat"})
    assert path == Path("/var/lib/specd/chat/requests.journal")


def test_threads_may_be_pinned() -> None:
    """@resources is in @system-service and is not taken out again; the control socket may be given to a group."""
    assert settings("SystemCallFilter") == ["@system-service", "~@privileged", "@chown"]


def test_limits_agree_with_the_daemon() -> None:
    assert int(setting("TimeoutStopSec")) > Config().server.drain_timeout_s
    assert setting("RestartPreventExitStatus").split() == ["2", str(EXIT_CONFIG)]
    assert int(setting("SuccessExitStatus")) == EXIT_CUT_OFF
    assert setting("Type") == "notify"


def test_the_configuration_stays_as_private_as_it_was_made() -> None:
    """systemd sets the mode at each start: it must be the one of tmpfiles.d, where keys may lie."""
    (line,) = [
        line for line in (UNITS / "specd.tmpfiles.conf").read_text().splitlines() if line.startswith("d /etc/specd")
    ]
    assert setting("ConfigurationDirectory") == "specd"
    assert setting("ConfigurationDirectoryMode") == line.split()[2] == "0750"


def test_downloads_go_where_the_daemon_may_write() -> None:
    """ProtectHome hides /home: both caches are under the unit's CacheDirectory."""
    assert setting("CacheDirectory") == "specd"
    assert set(settings("Environment")) == {"XDG_CACHE_HOME=%C", "HF_HOME=%C/specd/huggingface"}
