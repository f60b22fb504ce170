"""Where Dynamo could not capture code in a graph, and why: graph breaks, and functions that it skips."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.fx import GraphModule

from qframework.compat.missing import explained, note_missing

_STEP = "step_unsupported"  # the reason of a graph behind which the rest of its function runs without torch.compile
_EXPLANATION, _HINT = "Explanation: ", "Hint: "
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class GraphBreak:
    """What Dynamo did not capture.

    ``reason`` is Dynamo's explanation with its first hint, ``place`` the function, file and line, empty if unknown.
    ``skipped`` tells that the rest of the function, or all of it, runs without ``torch.compile``.
    """

    reason: str
    place: str = ""
    skipped: bool = False


def break_behind(gm: GraphModule) -> GraphBreak | None:
    """The graph break that ended a graph of Dynamo; None if it ended with the function's result."""
    why = getattr(gm, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return None
    # Some reasons are names of Dynamo's own steps. What it met then is what it has counted since its last function.
    text = why.reason if _EXPLANATION in why.reason else (_counted_anew() or why.reason)
    return GraphBreak(_short(text), _place(why.user_stack), skipped=why.reason == _STEP)


@contextmanager
def recorded_breaks() -> Iterator[list[GraphBreak]]:
    """What Dynamo does not capture inside of the scope, except what ``break_behind`` tells of graphs.

    The list is complete when the scope ends. Functions that are skipped as a whole come first.
    """
    found: list[GraphBreak] = []
    kinds = "unimplemented", "graph_break"
    before = _unsupported(*kinds)
    stop = when_skipped(lambda skipped, _: found.append(skipped))
    try:
        yield found
    finally:
        stop()
        new = (_short(text) for text, count in _unsupported(*kinds).items() if count > before[text])
        known = {each.reason for each in found}
        found += [GraphBreak(reason) for reason in dict.fromkeys(new) if reason not in known]


def when_skipped(function: Callable[[GraphBreak, Any], None]) -> Callable[[], None]:
    """Call ``function(graph_break, backend)`` whenever Dynamo skips a function as a whole.

    Returns:
        What ends that. So does ``torch._dynamo.reset()``.
    """
    with explained():
        from torch._dynamo.callback import callback_handler

    def compiled(_: Any) -> None:
        _counted_anew()
        error = sys.exc_info()[1]  # with which Dynamo has just given up a function; None if it has not
        stack = getattr(error, "real_stack", None)
        if error is not None and stack:
            function(GraphBreak(_short(str(error)), _place(stack), skipped=True), _backend(error.__traceback__))

    def stop() -> None:
        if compiled in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(compiled)

    callback_handler.register_end_callback(compiled)
    return stop


def _backend(trace: TracebackType | None) -> Any:
    """The backend for which Dynamo was compiling, a local variable of its functions; None if there is none."""
    while trace is not None:
        if "compiler_fn" in trace.tb_frame.f_locals:
            return trace.tb_frame.f_locals["compiler_fn"]
        trace = trace.tb_next
    note_missing("compiler_fn")
    return None


def _unsupported(*kinds: str) -> Counter[str]:
    """How often Dynamo met what it does not support, by its explanation.

    Dynamo counts as "graph_break" what only splits a graph. No graph tells of it if nothing was captured before it.
    """
    with explained():
        from torch._dynamo.utils import counters
    return sum((Counter(counters[kind]) for kind in kinds), Counter())


_counted: Counter[str] = Counter()  # as it was when Dynamo was done with the last function


def _counted_anew() -> str | None:
    """What Dynamo met last since the last call of this function; None if nothing."""
    global _counted
    before, _counted = _counted, _unsupported("unimplemented")
    return next(reversed([text for text, count in _counted.items() if count > before[text]]), None)


def _short(text: str) -> str:
    """Dynamo's explanation and its first hint, of a text of many lines; else its first line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    explanation, hint = (_after(lines, label) for label in (_EXPLANATION, _HINT))
    return " ".join(part if part.endswith(".") else f"{part}." for part in (explanation or lines[0], hint) if part)


def _after(lines: list[str], label: str) -> str:
    return next((line.removeprefix(label) for line in lines if line.startswith(label)), "")


def _place(stack: Any) -> str:
    """The innermost function of a stack outside of PyTorch, with its file and line."""
    own = [frame for frame in stack if not frame.filename.startswith(_TORCH)] or list(stack)
    return f"{own[-1].name}, {own[-1].filename}:{own[-1].lineno}" if own else ""
