"""Programmatic dependent launch of Inductor's kernels (``triton.enable_pdl``), where each first waits for those before.

As Inductor writes them, kernels wait only before they access what the kernel before them wrote. One that reads nothing
may then end before that kernel does, and the next one, which waits for it alone, starts too early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from qframework.compat.launchers import Launchers
from qframework.compat.missing import explained, note_missing

with explained():
    from torch._inductor.codegen.triton import TritonKernel

_OPTION = "triton.enable_pdl"
_FILTER = "_filter_pdl"  # the last change of a kernel's code


def early_launch(config: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration that adds early launches where CUDA graphs run, which launch a kernel in less time than it takes.

    Elsewhere the host would take longer for each launch: Triton's launcher replaces Inductor's.
    """
    if not config.get("triton.cudagraphs"):
        return {}
    if not hasattr(TritonKernel, _FILTER):
        note_missing(f"torch._inductor.codegen.triton.TritonKernel.{_FILTER}")
        return {}
    return {_OPTION: True}


@contextlib.contextmanager
def waiting_first() -> Iterator[None]:
    """Kernels that are generated inside and launched early wait before they do anything else.

    Their launchers are compiled in threads.
    """
    original = getattr(TritonKernel, _FILTER, None)
    if original is None:
        yield
        return
    with Launchers() as launchers:

        def finish(kernel: Any, code: Any) -> None:
            _wait_first(kernel, code)
            if kernel._enable_pdl_codegen() and kernel.triton_meta:
                launchers.compile(kernel.triton_meta["signature"])

        setattr(TritonKernel, _FILTER, finish)
        try:
            yield
        finally:
            setattr(TritonKernel, _FILTER, original)


def _wait_first(kernel: Any, code: Any) -> None:
    """Replace all waits in the body of a kernel, and signals to the next kernel, by one of each at its beginning."""
    marks = (kernel.GDC_WAIT, kernel.GDC_LAUNCH)
    lines = [line for line in code._lines if not (isinstance(line, str) and any(mark in line for mark in marks))]
    code._lines = [*marks, *lines] if kernel._enable_pdl_codegen() else lines
