"""Launches Triton kernels; repeated launches skip Triton's argument binding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from qframework.compat.triton import (
    argument_names,
    compile_ahead,
    finished,
    launch_of_addresses,
    launcher,
)
from qframework.kernels.runtime.ahead import collected
from qframework.kernels.runtime.overlap import overlap
from qframework.kernels.runtime.replay import recording

# Fused multiply-add, explicitly: Triton 3.10 turns it off by default.
OPTIONS = {"enable_fp_fusion": True}


def warm_up(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """``kernel[grid]`` that compiles the kernel for ``launch`` without running it; tensors may be on "meta".

    Returns the compiled kernel, or Triton's future of it under ``triton.AsyncCompileMode``. Options have the same order
    as in ``launch``, because Triton's cache distinguishes kernels by the order of options.
    """

    def compile(*arguments: Any, **constants: Any) -> Any:
        more, options = overlap(kernel)
        return compile_ahead(kernel, grid, arguments, {**constants, **more, **options, **OPTIONS})

    return compile


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; ``triton.cdiv`` takes microseconds per call on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile_of_rows(channels: int) -> tuple[int, int, int]:
    """Rows and channels of a program, and its number of warps.

    A program has 2,048 values, or one longer row; a warp has 1,024 of them, or the whole row of 513 to 2,048 values.
    Measured on an H100 (``other/2026-11-27-h100-norm-quantize.json``): within 9 percent of the best at every size.
    Programs with a single row of up to 1,024 values take 50 percent longer.
    """
    block_c = max(power_of_2(channels), 16)
    warps = 1 if 512 < block_c <= 2048 else max(block_c // 1024, 2)
    return max(2048 // block_c, 1), block_c, warps


class Relaunch:
    """Launches a compiled kernel on a grid again."""

    def __init__(self, compiled: Any, grid: tuple[int, ...]) -> None:
        self._compiled, self._grid = compiled, (*grid, 1, 1)[:3]
        self._run = launcher(compiled, self._grid)

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def bind(self, arguments: tuple[Any, ...]) -> Callable[..., None] | None:
        """A launch with the addresses that ``arguments`` have now, in a fraction of the time; None if impossible."""
        return launch_of_addresses(self._compiled, self._grid, arguments)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}  # compiled kernels, and their constants in order


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``kernel[grid]``; the second launch of a kind calls the compiled kernel, without Triton's argument binding.

    Two launches are of one kind if they agree in everything that Triton may specialize on.
    """

    def run(*arguments: Any, **constants: Any) -> None:
        if (kernels := collected()) is not None:
            kernels.append(warm_up(kernel, grid)(*arguments, **constants))
            return
        again, rest = start(arguments, constants)
        if (recorded := recording()) is not None:
            recorded.launch(again, (*arguments, *rest))

    def start(arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Launch. Returns a function that launches again, and the arguments it takes after ``arguments``."""
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        first = getattr(first, "base", first)  # of a tensor descriptor
        if not (isinstance(first, torch.Tensor) and first.is_cuda):  # interpreted
            kernel[grid](*arguments, **constants)
            return functools.partial(kernel[grid], **constants), ()
        device = torch.cuda.current_device()
        key = (id(kernel), device, *constants.items(), *map(specialization, arguments))
        found = _compiled.get(key)
        if found is None:
            more, options = overlap(kernel)
            compiled = kernel[grid](*arguments, **constants, **more, **options, **OPTIONS)
            if compiled is None:  # the interpreter compiles nothing
                return functools.partial(kernel[grid], **constants, **more, **options, **OPTIONS), ()
            values = constants | more
            found = finished(compiled), tuple(values[name] for name in argument_names(kernel)[len(arguments) :])
            _compiled[key] = found
            return Relaunch(found[0], grid), found[1]
        compiled, rest = found
        again = Relaunch(compiled, grid)
        again(*arguments, *rest)
        return again, rest

    return run


def specialization(argument: Any) -> Any:
    """What Triton may specialize a kernel on for this argument; at least as fine as Triton's own rules."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "base"):  # a tensor descriptor: block shape, layout, padding
        named = vars(argument).items()
        kind = [str(value) for name, value in named if name not in ("base", "shape", "strides")]
        return type(argument), argument.base.dtype, *kind
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, tuple):
        return tuple(map(specialization, argument))
    return type(argument), argument if isinstance(argument, bool) else None
