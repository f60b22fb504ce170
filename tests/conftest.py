"""Fixtures and marks shared by all tests."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from importlib.metadata import version

import hypothesis
import pytest
import torch

MINIMUM_CAPABILITY = (8, 0)

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@cache
def why_no_gpu() -> str | None:
    """The reason why tests marked ``gpu`` cannot run; None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < MINIMUM_CAPABILITY:
        return f"compute capability {torch.cuda.get_device_capability()} is below {MINIMUM_CAPABILITY}"
    return None


def why_no_interpreter() -> str | None:
    """The reason why Triton's interpreter cannot run loops, if any: before 3.7 it needs NumPy below 2.4."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of Triton {version('triton')} needs NumPy below 2.4, this is {version('numpy')}"
    return None


def why_no_triton() -> str | None:
    """The reason why Triton kernels cannot be launched, interpreted or on a GPU; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return why_no_interpreter()
    if why_no_gpu() is None:
        return None
    return f"TRITON_INTERPRET is not 1 and there is {why_no_gpu()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="refuse to start without a usable GPU, and count every skipped test as failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-gpu") and (reason := why_no_gpu()) is not None:
        raise pytest.UsageError(f"--require-gpu: {reason}")


if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter  # needs Triton

    interpreter.make_faster()
    interpreter.repair()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, reason in (("gpu", why_no_gpu), ("interpreter", why_no_triton)):
        if item.get_closest_marker(mark) is not None and (why := reason()) is not None:
            pytest.skip(why)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases outside the sample of a test marked ``sample`` as ``full``: see turns.py."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        for case in outside_sample(name, cases, *mark.args):
            case.add_marker("full")


def outside_sample(name: str, cases: list[pytest.Function], share: float) -> list[pytest.Function]:
    """The cases outside a sample that is the same in every run and holds every value of each parameter."""
    shuffled = random.Random(name).sample(cases, len(cases))
    seen: set[tuple[str, str]] = set()
    repeated = []
    for case in shuffled:
        values = {(parameter, repr(value)) for parameter, value in case.callspec.params.items()}
        if values <= seen:
            repeated.append(case)
        seen |= values
    return repeated[max(0, round(share * len(cases)) - (len(cases) - len(repeated))) :]


@pytest.fixture(autouse=True)
def _as_with_int8_instructions() -> Iterator[None]:
    """On CPUs without INT8 instructions the backend leaves layers of few rows in float, as tests have, or all."""
    float_linear = sys.modules.get("qframework.backend.float_linear")  # importing it here would change other tests
    if float_linear is None:
        yield
        return
    known, float_linear.cpu_implementation = float_linear.cpu_implementation, lambda: "vnni"  # type: ignore[attr-defined]
    yield
    float_linear.cpu_implementation = known  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, which runs in full for each compiled INT8 model."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """nanobind reports objects that are still frozen at exit as leaked."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_skipped(report, collector.config)
    return report


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """Under ``--require-gpu``, turn a skip into a failure that says why it was skipped."""
    if report.skipped and config.getoption("--require-gpu"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {reason}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test once per device; the CUDA half is marked ``gpu``."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Fail a test that leaves gradients switched off, instead of the tests after it."""
    yield
    left_off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert not left_off, "gradients are still switched off after the test"


@pytest.fixture(autouse=True)
def seed() -> None:
    """Same random tensors in every run and in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo before and after the test, so that tests share no cache or limits."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
