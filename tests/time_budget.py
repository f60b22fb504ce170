"""A pytest plugin for a machine that is there for minutes: as many tests as a time allows, and which were not reached.

    python -m pytest -p tests.time_budget --require-gpu -m "gpu or interpreter" -n 16 --dist load --maxschedchunk 4 \
        --total-limit 480 --file-limit 60 --record FILE.json --known 'benchmarks/results/native/*.json'

Tests that passed in the files of ``--known`` come last, so that each run goes on where those ended. After
``--total-limit`` seconds no further test starts, nor one of a file on which this process has spent ``--file-limit``
seconds: it neither passes nor fails. ``--record`` is rewritten every few seconds.
"""

from __future__ import annotations

import glob
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

REWRITE_S = 5.0
OUTCOMES = ("passed", "skipped")
Tree = dict[str, dict[str, list[str]]]  # {file: {test: [parameters, ...]}}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("time budget")
    group.addoption("--total-limit", type=float, default=480.0, help="seconds until no further test starts")
    group.addoption("--file-limit", type=float, default=60.0, help="seconds that one process spends on one file")
    group.addoption("--record", type=Path, help="file to write: what passed, failed and was not reached")
    group.addoption("--known", action="append", default=[], help="pattern of earlier records, whose tests come last")


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)  # of a process that pytest-xdist started
    end = time.time() + config.getoption("--total-limit") if given is None else given["time_budget_end"]
    config.pluginmanager.register(Budget(end, config.getoption("--file-limit")))
    if given is None:
        config.pluginmanager.register(Recorder(config.getoption("--record"), end))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the tests that are known to have passed to the end."""
    paths = [path for pattern in config.getoption("--known") for path in sorted(glob.glob(pattern))]
    known = {name for path in paths for name in names(json.loads(Path(path).read_text())["passed"])}
    items.sort(key=lambda item: item.nodeid in known)


class Budget:
    """In a process that runs tests: leaves out those that would begin too late."""

    def __init__(self, end: float, file_limit: float) -> None:
        """``end`` is a value of ``time.time()``, which all processes share."""
        self.end, self.file_limit = end, file_limit
        self.spent: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """True, which says that the test was dealt with, for one that must not start."""
        if time.time() < self.end and self.spent[file_of(item.nodeid)] < self.file_limit:
            return None
        item.session._setupstate.teardown_exact(nextitem)  # fixtures of the last test that ran; no public name
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.spent[file_of(report.nodeid)] += report.duration


class Recorder:
    """In the process that the user started: keeps and writes what is reported."""

    def __init__(self, path: Path | None, end: float) -> None:
        self.path, self.end, self.start, self._written = path, end, time.time(), 0.0
        self.collected: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self._machine: dict[str, Any] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process of pytest-xdist when to end."""
        node.workerinput["time_budget_end"] = self.end

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = list(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = self.collected or [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome; a test that passed may still fail when its fixtures end."""
        self.seconds[file_of(report.nodeid)] += report.duration
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.failures[report.nodeid] = str(report.longrepr)[-1500:]
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(report.nodeid, report.outcome)
        if time.time() - self._written > REWRITE_S:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        left = Counter(file_of(name) for name in self.missing())
        terminalreporter.section(f"not reached: {left.total()} of {len(self.collected)} tests")
        for file, number in left.most_common():
            terminalreporter.line(f"{number:5} {file}")

    def missing(self) -> list[str]:
        return [name for name in self.collected if name not in self.outcomes]

    def write(self) -> None:
        self._written = time.time()
        if self.path is None:
            return
        import torch  # here, so that processes that run tests import no more than without this plugin

        from benchmarks.machine import describe_machine
        from qframework.files import write_text

        self._machine = self._machine or describe_machine("cuda" if torch.cuda.is_available() else "cpu")
        by_outcome = {which: [name for name, each in self.outcomes.items() if each == which] for which in OUTCOMES}
        document = {
            "what": "Tests on a machine with a GPU, as many as a time allowed (tests/time_budget.py).",
            "machine": self._machine,
            "wall_s": round(self._written - self.start, 1),
            "seconds_of_files": {file: round(took, 1) for file, took in sorted(self.seconds.items())},
            "failed": self.failures,
            "passed": tree(by_outcome["passed"]),
            "skipped": tree(by_outcome["skipped"]),
            "not_reached": tree(self.missing()),
        }
        write_text(self.path, json.dumps(document) + "\n")


def file_of(name: str) -> str:
    return name.partition("::")[0]


def tree(found: Iterable[str]) -> Tree:
    """Names of tests by file and function, each once."""
    result: Tree = {}
    for name in found:
        file, _, rest = name.partition("::")
        test, _, parameters = rest.partition("[")
        result.setdefault(file, {}).setdefault(test, []).append(parameters.removesuffix("]"))
    return result


def names(found: Tree) -> Iterator[str]:
    """What ``tree`` was made of."""
    for file, tests in found.items():
        for test, parameters in tests.items():
            yield from (f"{file}::{test}" + (f"[{each}]" if each else "") for each in parameters)
