"""Inductor. Imported only when it is needed: it starts processes, which takes seconds."""

from __future__ import annotations

from typing import Any

from qframework.compat.missing import explained

with explained():
    from torch._inductor import compile_fx as _compiler
    from torch._inductor import list_mode_options, list_options
    from torch._inductor.decomposition import select_decomp_table


@explained()
def compile_graph(gm: Any, example_inputs: list[Any], config: dict[str, Any], decompositions: dict[Any, Any]) -> Any:
    """Compile a graph with this configuration."""
    return _compiler.compile_fx(gm, example_inputs, config_patches=config or None, decompositions=decompositions)


def keep_whole(operators: list[Any]) -> None:
    """Register Inductor's default fallback, with the layout constraint of each operator, so that it does not warn."""
    with explained():
        from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
        from torch._library.utils import get_layout_constraint_tag

    for target in operators:
        if target not in lowerings:
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(target, with_default=True))
            make_fallback(target, layout_constraint=constraint, warn=False)


__all__ = ["compile_graph", "keep_whole", "list_mode_options", "list_options", "select_decomp_table"]
