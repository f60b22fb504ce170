"""Programmatic dependent launch (sm_90 and newer): a kernel is set up while the one before it still runs.

Launching a kernel takes a few microseconds, during which the multiprocessors are idle. With programmatic dependent
launch, the GPU starts the programs of the next kernel as soon as the previous one leaves room; they wait until all
earlier work is complete and visible before they access memory. The order of reads and writes therefore stays that of
the stream, also next to kernels that do not use this. Prefetches into L2 may come before the wait: all writes arrive
there, so a line that an earlier kernel writes after the prefetch is not read as it was before.

A kernel opts in with a last parameter ``OVERLAP: tl.constexpr = False``, which it passes to
``wait_for_previous_kernel`` before its first load or store. ``launch.py`` sets it where the chip supports it.
"""

from __future__ import annotations

from typing import Any

from qframework.compat.triton import argument_names, current_target, gdc_launch_dependents, gdc_wait
from qframework.kernels.runtime.triton import INTERPRET, tl, triton


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """Wait for earlier kernels, then allow the next one to start. Only prefetches into L2 may precede this call."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlap(kernel: Any) -> tuple[dict[str, bool], dict[str, bool]]:
    """Constants and Triton options for launches of ``kernel`` on the current device."""
    if "OVERLAP" not in argument_names(kernel):
        return {}, {}
    if INTERPRET or gdc_wait is None:
        return {"OVERLAP": False}, {}
    target = current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {"OVERLAP": False}, {}
    return {"OVERLAP": True}, {"launch_pdl": True}
