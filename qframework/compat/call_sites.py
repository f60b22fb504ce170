"""How Inductor's Python code calls an operator: through a function of its own at each place. Imported with Inductor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qframework.compat.inductor import V, keep_whole
from qframework.compat.missing import note_error
from qframework.compat.operators import schema, with_dtype
from qframework.compat.pytree import tree_map

DEVICES = ("cuda",)  # whose operators repeat their steps

_registered: set[Any] = set()

FallbackKernel: Any = None  # without it, operators are called through the dispatcher

try:
    from torch._inductor.ir import FallbackKernel, IRNode, TensorBox
    from torch._inductor.lowering import register_lowering
except (ImportError, AttributeError) as error:
    note_error(error)


def call_at_sites(operators: Iterable[tuple[Any, str]], import_line: str, maker: str) -> None:
    """Let code that Inductor generates call operators on a GPU through ``maker('name')``, made once for each place.

    Where a size is symbolic, on other devices and in C++ the operator itself is called.

    Args:
        operators: each an ``OpOverload`` and its name.
        import_line: what imports ``maker``.
        maker: the name of a function of an operator's name that returns what is called, positionally.
    """
    if FallbackKernel is None:
        return
    for target, name in operators:
        if target not in _registered:
            keep_whole([target])
            register_lowering(target, type_promotion_kind=None)(_lowering(target, import_line, f"{maker}({name!r})"))
            _registered.add(target)


def _lowering(target: Any, import_line: str, made_by: str) -> Any:
    """Inductor's fallback for an operator, whose generated code has one more line for each call."""

    class CallSite(FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            device = self.get_device()
            if device is not None and device.type in DEVICES and not V.graph.cpp_wrapper and _is_static(self):
                root = wrapper
                while (parent := getattr(root, "parent_wrapper", None)) is not None:
                    root = parent
                self.python_kernel_name = f"qframework_call_{wrapper.next_kernel_suffix()}"
                root.add_import_once(import_line)
                root.header.writeline(f"{self.python_kernel_name} = {made_by}")
            super().codegen(wrapper)

    def lower(*args: Any, **kwargs: Any) -> Any:
        result = CallSite.create(target, *_positional(target, args, kwargs))
        return tree_map(lambda x: TensorBox.create(x) if isinstance(x, IRNode) else x, result)

    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    return lower


def _positional(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call, without their names, as an implementation takes them."""
    arguments = schema(target).arguments
    rest = [kwargs.get(argument.name, argument.default_value) for argument in arguments[len(args) :]]
    return tuple(with_dtype(argument, x) for argument, x in zip(arguments, (*args, *rest), strict=True))


def _is_static(call: Any) -> bool:
    """Whether sizes, strides and other numbers of a call are known."""
    numbers = list(call.constant_args)
    for operand in call.inputs:
        numbers += [*operand.get_size(), *operand.get_stride(), operand.get_layout().offset]
    return not any(getattr(x, "free_symbols", ()) for x in numbers)
