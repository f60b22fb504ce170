"""A pytest plugin with which long tests take turns, as in ``make test``.

    python -m pytest -p tests.turns --turn 5 -m "not gpu and not interpreter"

A turn is a hexadecimal digit; ``make test`` takes the last one of the commit's id. Most tests run at every turn. A test
whose cases take more than half a second each, by ``tests/costs.json``, runs at one turn in two, four or eight:
the longer it takes, the less often. Tests marked ``full`` run at one turn in 16. The SHA-256 of a test's id decides at
which turns it runs, so adding tests does not change that. Tests of a file that share a long setup run together.

``--record-costs FILE`` adds to a file what the tests of a run took; ``make test-costs`` writes ``tests/costs.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import pytest

COSTS = Path(__file__).with_name("costs.json")
DIGITS = "0123456789abcdef"
CHEAP_S = 0.5
SHARED_S = 2.0  # a setup this long is that of a fixture which the tests of a file share
RAREST = 8
ALL = "*"  # all tests of a file
Costs = dict[str, dict[str, float]]  # {file: {test: seconds of a case}}


def period(seconds: float) -> int:
    """A test whose cases take ``seconds`` each runs at one turn in this many."""
    turns = 1
    while turns < RAREST and turns * CHEAP_S < seconds:
        turns *= 2
    return turns


def is_its_turn(turn: str, name: str, turns: int) -> bool:
    """Whether a test, or a file of tests, that runs at one turn in ``turns`` runs at this one."""
    return (int(turn, 16) - int(hashlib.sha256(name.encode()).hexdigest()[0], 16)) % turns == 0


def runs_at(turn: str, test: str, full: bool, costs: Costs) -> bool:
    """Whether the test with this id runs."""
    if full:
        return is_its_turn(turn, test, len(DIGITS))
    file, function = parts(test)
    known = costs.get(file, {})
    if ALL in known:
        return is_its_turn(turn, file, period(known[ALL]))
    return is_its_turn(turn, test, period(known.get(function, 0.0)))


def parts(test: str) -> tuple[str, str]:
    """The file of a test's id, and its function without parameters."""
    file, _, function = test.partition("[")[0].partition("::")
    return file, function


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turns")
    group.addoption("--turn", choices=list(DIGITS), help="leave out long tests that run at other turns than this")
    group.addoption("--record-costs", type=Path, metavar="FILE", help="add what the tests took to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record-costs")
    if path is not None and not hasattr(config, "workerinput"):  # not in a process that pytest-xdist started
        config.pluginmanager.register(Recorder(path))


def pytest_report_header(config: pytest.Config) -> str | None:
    turn = config.getoption("--turn")
    return None if turn is None else f"turn {turn} of 0 to f for long tests; again: make test TURN={turn}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn = config.getoption("--turn")
    if turn is None:
        return
    costs = json.loads(COSTS.read_text())
    kept, others = [], []
    for item in items:
        full = item.get_closest_marker("full") is not None
        (kept if runs_at(turn, item.nodeid, full, costs) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


class Recorder:
    """Writes what tests cost."""

    def __init__(self, path: Path) -> None:
        """``path`` may hold what other runs recorded."""
        self.path = path
        self.cases: dict[str, float] = defaultdict(float)
        self.setups: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cases[report.nodeid] += report.duration
        if report.when == "setup":
            file, _ = parts(report.nodeid)
            self.setups[file] = max(self.setups[file], report.duration)

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.path.write_text(json.dumps(costs_of(self.cases, self.setups, known), indent=1, sort_keys=True) + "\n")


def costs_of(cases: dict[str, float], setups: dict[str, float], known: Costs) -> Costs:
    """The costs to store of ``cases``, seconds by id, and the longest setup of each file, beside those ``known``."""
    functions: dict[tuple[str, str], list[float]] = defaultdict(list)
    for test, seconds in cases.items():
        functions[parts(test)].append(seconds)
    costs: Costs = defaultdict(dict, {file: dict(tests) for file, tests in known.items()})
    for (file, function), seconds in functions.items():
        mean = round(sum(seconds) / len(seconds), 1)
        if mean > CHEAP_S and ALL not in costs[file]:
            costs[file][function] = max(mean, costs[file].get(function, 0.0))
    for file, seconds in setups.items():
        if seconds > SHARED_S:
            costs[file] = {ALL: round(sum(each for test, each in cases.items() if parts(test)[0] == file), 1)}
    return {file: tests for file, tests in costs.items() if tests}
