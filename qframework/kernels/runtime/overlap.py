"""Programmatic dependent launch (sm_90 and newer): a kernel is set up while the one before it still runs.

A launch costs a kernel of a few microseconds a good part of its time: programs are placed and set up, and the
multiprocessors are idle meanwhile. Launched this way, a kernel is set up as soon as the one before it in the stream has
room, and waits before it touches memory; the wait ends when everything before it is done and visible. So the order of
reads and writes stays what the stream says, also beside kernels that know nothing of this.

A kernel takes part by a last parameter ``OVERLAP: tl.constexpr = False``, with which it calls
``wait_for_previous_kernel`` before its first load or store. ``launch.py`` sets it where the chip can.
"""

from __future__ import annotations

from typing import Any

from qframework.compat.triton import argument_names, current_target, gdc_launch_dependents, gdc_wait
from qframework.kernels.runtime.triton import INTERPRET, tl, triton


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """Nothing before this call may read or write global memory. From here on, the next kernel may be set up."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlap(kernel: Any) -> tuple[dict[str, bool], dict[str, bool]]:
    """What launches of ``kernel`` on the current device are to be given for it: constants, and options of Triton's."""
    if "OVERLAP" not in argument_names(kernel):
        return {}, {}
    if INTERPRET or gdc_wait is None:
        return {"OVERLAP": False}, {}
    target = current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {"OVERLAP": False}, {}
    return {"OVERLAP": True}, {"launch_pdl": True}
