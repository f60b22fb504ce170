"""Triton's launchers of Inductor's kernels, compiled while Inductor writes the kernels that follow.

Up to 3.6, Triton compiles a launcher in C for each signature that kernels have, which takes 0.2 s and more. Inductor
needs them for kernels that are launched early, and would compile one after the other when it loads its code.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_NAME = "__triton_launcher"  # as Triton names the compiled launcher in its cache


def _in_c() -> Any:
    """Triton's module with the source of launchers in C; None if its launcher is the same for all kernels."""
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.backends.nvidia import driver

    return driver if hasattr(driver, "make_launcher") else None


class Launchers:
    """Compiles launchers in threads, until its scope ends.

    Triton finds them in its cache. One that is not done when Triton asks for it, or failed, is compiled then.
    """

    def __init__(self) -> None:
        self._started: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def compile(self, signature: Mapping[str, str]) -> None:
        """Compile the launcher of kernels with this signature, the type of each argument by its name."""
        driver = _in_c()
        if driver is None or (source := driver.make_launcher({}, signature, None)) in self._started:
            return
        self._started.add(source)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(thread_name_prefix="qframework-launchers")
        self._pool.submit(_compile, driver, source)


def _compile(driver: Any, source: str) -> None:
    with contextlib.suppress(Exception):  # Triton compiles it again, and raises
        driver.compile_module_from_src(source, _NAME, driver.library_dirs(), driver.include_dirs, driver.libraries)
