"""The phases of a compiled vision transformer's first call, in seconds, for each provider in a new process.

Phases are PyTorch's own (``torch._dynamo.utils.compile_times``), the passes of the backend, and the compilation of our
kernels in threads beside Inductor, in wall-clock time and CPU time of the thread. Phases are nested and run in parallel
threads and processes, so rows do not add up. Compilation caches are empty. ``--cprofile`` profiles single functions,
which slows all of them down.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import models
from benchmarks.models import Forward
from benchmarks.profile_vit import profile_each, profile_parser
from benchmarks.tables import number, table
from benchmarks.vit_gpu import cold_caches
from benchmarks.vit_gpu_cases import PROVIDERS, Subject, inference, prepare
from qframework.outputs import output_folder

DEFAULT = ("fp16_compiled", "qframework_static")
WHOLE = "torch.compile and first call"
LEAST_S = 0.01  # shorter phases are only in the file, not in the printed table

_BACKEND = "qframework.backend.compile"
_PASSES = "qframework.backend.passes"
# Module, function, phase.
TIMED = (
    *((_BACKEND, name, f"qframework: {name}") for name in ("release_prepared_models", "run_passes")),
    ("qframework.backend.warm_up", "_in_forks", "qframework: forks begin"),
    ("qframework.backend.warm_up", "_compile", "qframework's kernels, all"),
    ("triton.compiler", "compile", "qframework's kernels, each"),
)


@dataclass
class Phase:
    """Sums over all calls of a phase."""

    calls: int = 0
    s: float = 0.0
    cpu_s: float | None = None  # CPU time of the thread; None for PyTorch's phases

    def add(self, s: float, cpu_s: float) -> None:
        self.calls, self.s, self.cpu_s = self.calls + 1, self.s + s, (self.cpu_s or 0.0) + cpu_s

    def to_json(self) -> dict[str, Any]:
        cpu = {} if self.cpu_s is None else {"cpu_s": round(self.cpu_s, 4)}
        return {"calls": self.calls, "s": round(self.s, 4), **cpu}


@dataclass
class Clock:
    """Seconds by phase."""

    phases: dict[str, Phase] = field(default_factory=lambda: defaultdict(Phase))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took, cpu = time.perf_counter() - start, time.thread_time() - cpu_start
            with self._lock:
                self.phases[name].add(took, cpu)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.measure(name):
                return function(*args, **kwargs)

        return run

    def waiting(self, name: str, manager: Callable[..., Any]) -> Callable[..., Any]:
        """A context manager whose exit is a phase."""

        @contextlib.contextmanager
        def managed(*args: Any, **kwargs: Any) -> Iterator[None]:
            inner = manager(*args, **kwargs)
            inner.__enter__()
            try:
                yield
            finally:
                with self.measure(name):
                    inner.__exit__(*sys.exc_info())

        return managed


@contextlib.contextmanager
def timed_functions(clock: Clock) -> Iterator[None]:
    """Measure ``TIMED``, every pass and the wait for our kernels inside the block."""
    with contextlib.ExitStack() as patches:
        for module, name, phase in TIMED:
            with contextlib.suppress(ImportError):  # Triton, on some machines
                _replace(patches, importlib.import_module(module), name, functools.partial(clock.timed, phase))
        passes = importlib.import_module(_PASSES)
        for name in ("LOWERING", "FOR_INDUCTOR"):
            _replace(patches, passes, name, lambda each: [clock.timed(f"qframework: {p.__name__}", p) for p in each])
        backend = importlib.import_module(_BACKEND)
        _replace(patches, backend, "warm_up", functools.partial(clock.waiting, "qframework: wait for its kernels"))
        yield


def _replace(patches: contextlib.ExitStack, module: Any, name: str, change: Callable[..., Any]) -> None:
    original = getattr(module, name)
    patches.callback(setattr, module, name, original)
    setattr(module, name, change(original))


def first_call(
    compile: Callable[[], Forward], images: Tensor, cprofile: Path | None = None
) -> tuple[Tensor, dict[str, Phase]]:
    """The output of the first call of what ``compile`` returns, and the phases of both; restores all patches."""
    from torch._dynamo.utils import compilation_time_metrics

    clock, profiler = Clock(), cProfile.Profile()
    compilation_time_metrics.clear()
    with timed_functions(clock):
        with clock.measure(WHOLE), profiler if cprofile else contextlib.nullcontext():
            with clock.measure("torch.compile"):
                forward = compile()
            output = forward(images).cpu()
        with clock.measure("second call"):
            forward(images).cpu()
    if cprofile:
        profiler.dump_stats(cprofile)
    theirs = {f"torch: {name}": Phase(len(took), sum(took)) for name, took in compilation_time_metrics.items()}
    return output, {**clock.phases, **theirs}


def profile_provider(
    name: str, model: str, batch: int, device: str, smoke: bool, cprofile: Path | None = None
) -> dict[str, Phase]:
    """One provider's phases; checks the output."""
    provider = PROVIDERS[name]
    subject = Subject.build(model, batch, device, smoke)
    images = subject.images.to(device, provider.dtype)
    module = prepare(subject, provider, images)
    compile = functools.partial(provider.compile, module) if provider.compile else lambda: module
    with inference(provider):
        output, phases = first_call(compile, images, cprofile)
    models.accuracy(output, subject.reference, provider.precision)
    return phases


def _in_this_process(caches: str, *arguments: Any) -> dict[str, Phase]:
    os.environ.update(cold_caches(caches))
    return profile_provider(*arguments)


def profile_in_a_new_process(*arguments: Any) -> dict[str, Phase]:
    """``profile_provider`` without anything compiled or imported before."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as caches, ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(_in_this_process, caches, *arguments).result()


def show(phases: dict[str, Phase]) -> str:
    """A table, the longest first."""
    rows = [
        [name, str(phase.calls), number(phase.s), number(phase.cpu_s)]
        for name, phase in sorted(phases.items(), key=lambda item: -item[1].s)
        if phase.s >= LEAST_S
    ]
    return table(["phase", "calls", "s", "on a core, s"], rows)


# Command line ---------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Print a table for each provider; returns the exit status."""
    parser = profile_parser("profile_first_call", __doc__, DEFAULT)
    parser.add_argument("--cprofile", type=output_folder, metavar="FOLDER", help="write PROVIDER.prof here, for pstats")
    arguments = parser.parse_args(argv)

    def profile(name: str, model: str, batch: int, device: str) -> dict[str, Any]:
        stats = None
        if arguments.cprofile is not None:
            arguments.cprofile.mkdir(parents=True, exist_ok=True)
            stats = arguments.cprofile / f"{name}.prof"
        phases = profile_in_a_new_process(name, model, batch, device, arguments.smoke, stats)
        print(f"{name}, {model}, batch {batch}\n\n{show(phases)}", flush=True)
        return {phase: took.to_json() for phase, took in phases.items()}

    profile_each(arguments, profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
