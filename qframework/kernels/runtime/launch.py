"""Launches: on the device of their operands, and cheap from the second call on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from qframework.compat.triton import argument_names, compile_ahead, finished, launcher
from qframework.kernels.runtime.operator import LIBRARY
from qframework.kernels.runtime.overlap import overlap
from qframework.kernels.runtime.replay import recording, replayed

P = ParamSpec("P")
R = TypeVar("R")


cuda_implementations: dict[str, Callable[..., Any]] = {}  # by operator


def cuda_implementation(operator: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as the operator's CUDA implementation, to run on its first argument's device.

    Its calls are replayed: see replay.py.
    """

    def register(implementation: Callable[P, R]) -> Callable[P, R]:
        cuda_implementations[operator] = run = replayed(implementation)
        torch.library.impl(LIBRARY, operator, "CUDA")(on_its_device(run))
        return implementation

    return register


def on_its_device(implementation: Callable[P, R]) -> Callable[P, R]:
    """Make the device of the first argument, a tensor or a list of some, the current one: Triton launches there."""

    @functools.wraps(implementation)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        device: torch.device = (first[0] if isinstance(first, list) else first).device
        if device.index == torch.cuda.current_device():
            return implementation(*args, **kwargs)
        with torch.cuda.device(device):
            return implementation(*args, **kwargs)

    return run


class Launch:
    """A Triton kernel with its grid and constants, called with the arguments before those.

    The first call goes through Triton, which finds out what to compile for; later ones go straight to the compiled
    kernel. That needs calls that agree in what Triton specializes on: the device, dtypes, which pointers and integers
    are multiples of 16, which integers are 1. Where they may not (``alike`` False), every call goes through Triton.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], alike: bool, **options: int
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._constants = constants
        self._alike = alike
        self._options = options  # num_warps, num_stages
        self._direct: tuple[Callable[..., None], tuple[Any, ...]] | None = None  # what to call, its last arguments

    def __call__(self, *arguments: Any) -> None:
        if self._direct is not None:
            run, rest = self._direct
            run(*arguments, *rest)
        else:
            constants, options = overlap(self._kernel)
            all_options = {**self._options, **constants, **options}
            compiled = self._kernel[self._grid](*arguments, *self._constants, **all_options)
            run, rest = functools.partial(self._kernel[self._grid], **all_options), self._constants
            if self._alike and compiled is not None:  # the interpreter compiles nothing
                run, rest = launcher(finished(compiled), self._grid), (*self._constants, *constants.values())
                self._direct = run, rest
        if (recorded := recording()) is not None:
            recorded.launch(run, (*arguments, *rest))

    def warm_up(self, *arguments: Any) -> Any:
        """Have Triton compile what a call with arguments like these needs, and run nothing: "meta" tensors will do.

        Returns the compiled kernel, or under ``triton.AsyncCompileMode`` Triton's promise of it.
        """
        return warm_up(self._kernel, self._grid)(*arguments, *self._constants, **self._options)


def warm_up(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """``kernel[grid]``, compiled as ``launch`` and ``Launch`` have it compiled, and not run.

    Triton tells kernels apart by the order of their options too: it is the same in all three.
    """

    def compile(*arguments: Any, **constants: Any) -> Any:
        more, options = overlap(kernel)
        return compile_ahead(kernel, grid, arguments, {**constants, **more, **options})

    return compile


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own costs microseconds a call on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, and 1."""
    return 1 << max(n - 1, 0).bit_length()


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}  # kernels and their constants, in order


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``kernel[grid]``; the second call of a kind goes straight to the compiled kernel, as ``Launch`` does.

    Calls are of a kind where they agree in all that Triton may specialize on. ``Launch`` is for callers that know;
    this looks at every argument, which takes a fraction of Triton's own binding.
    """

    def run(*arguments: Any, **constants: Any) -> None:
        again, rest = start(arguments, constants)
        if (recorded := recording()) is not None:
            recorded.launch(again, (*arguments, *rest))

    def start(arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Launch; what would launch it again, called with ``arguments`` and the others that are returned."""
        if not (isinstance(arguments[0], torch.Tensor) and arguments[0].is_cuda):  # interpreted
            kernel[grid](*arguments, **constants)
            return functools.partial(kernel[grid], **constants), ()
        device = torch.cuda.current_device()
        key = (id(kernel), device, *constants.items(), *map(specialization, arguments))
        found = _compiled.get(key)
        if found is None:
            more, options = overlap(kernel)
            compiled = kernel[grid](*arguments, **constants, **more, **options)
            if compiled is None:  # the interpreter compiles nothing
                return functools.partial(kernel[grid], **constants, **more, **options), ()
            values = constants | more
            found = finished(compiled), tuple(values[name] for name in argument_names(kernel)[len(arguments) :])
            _compiled[key] = found
            return launcher(found[0], (*grid, 1, 1)[:3]), found[1]
        compiled, rest = found
        again = launcher(compiled, (*grid, 1, 1)[:3])
        again(*arguments, *rest)
        return again, rest

    return run


def specialization(argument: Any) -> Any:
    """What Triton may compile an argument in for: at least as fine as its own rules."""
    if isinstance(argument, torch.Tensor):
        if torch.version.hip:  # there, offsets within small tensors have 32 bits
            return argument.dtype, argument.data_ptr() % 16, argument.untyped_storage().nbytes() < 2**31
        return argument.dtype, argument.data_ptr() % 16
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument), argument if isinstance(argument, bool) else None
