"""f13: remembers every API key that this session makes, and fails the session if the secret part of
one was logged, as our formatter writes it, or printed by a test."""

import logging
import re
from collections.abc import Generator

import pytest

from gateway.telemetry import JsonLines
from gateway.tenants import key_form
from gateway.tenants.key_form import Kind, NewKey

_WORD = re.compile(f"[0-9A-Za-z]{{{key_form.SECRET_CHARACTERS},}}")


def secret_part(key: str) -> str:
    """What must not be seen: the public id and what stands before it may."""
    return key.rpartition("_")[2]


class Planted(logging.Handler):
    """Also sees all that is logged, as our formatter would write it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines())
        self.secrets: set[str] = set()
        self._words: set[str] = set()
        """Long enough to hold a secret, out of everything seen."""

    def make(self, kind: Kind = "sk", environment: str = "") -> NewKey:
        made = _make(kind, environment)
        self.secrets.add(secret_part(made.text.reveal()))
        return made

    def see(self, text: str) -> None:
        self._words.update(_WORD.findall(text))

    def emit(self, record: logging.LogRecord) -> None:
        self.see(self.format(record))

    @property
    def seen(self) -> set[str]:
        """The secrets that were seen."""
        return {secret for secret in self.secrets if any(secret in word for word in self._words)}


_make = key_form.make
PLANTED = pytest.StashKey[Planted]()


def pytest_configure(config: pytest.Config) -> None:
    planted = config.stash[PLANTED] = Planted()
    key_form.make = planted.make
    logging.getLogger().addHandler(planted)


def pytest_unconfigure(config: pytest.Config) -> None:
    key_form.make = _make
    logging.getLogger().removeHandler(config.stash[PLANTED])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.passed:  # one that fails may show its variables
        item.config.stash[PLANTED].see(report.capstdout + report.capstderr)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[PLANTED].seen:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if seen := config.stash[PLANTED].seen:
        ends = ", ".join(sorted(f"…{secret[-4:]}" for secret in seen))
        terminalreporter.write_line(
            f"f13: {len(seen)} API keys of this session were logged or printed: {ends}", red=True
        )
