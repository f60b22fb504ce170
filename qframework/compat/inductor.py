"""Inductor. Imported only when it is needed: it starts processes, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config

from qframework.compat.missing import explained

compiler_config: Any = torch.compiler.config  # PyTorch adds patch() at import

with explained():
    from torch._inductor import compile_fx as _compiler
    from torch._inductor import list_mode_options, list_options
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V


MAX_ROW = 1024  # elements; a longer row does not fit into the registers of a few warps


class Choices(InductorChoices):
    """Inductor's choices of kernels, except that a row of up to ``MAX_ROW`` values that becomes INT8 is read once.

    A per-token quantization needs the row's maximum before the row. Where the row is also gathered (windows, images in
    another order), Inductor reads it in a loop, twice or three times, and up to twenty times as slowly.
    """

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        chosen: bool = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        return chosen or (not cooperative_reduction and _quantizes_short_rows(features))


def _quantizes_short_rows(features: Any) -> bool:
    dtypes = {node.node.get_dtype() for node in features.scheduler_nodes() if node.node is not None}
    short = V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_ROW)
    return bool(torch.int8 in dtypes and short)


def compile_graph(
    gm: Any, example_inputs: list[Any], config: dict[str, Any], decompositions: Callable[[], dict[Any, Any]], key: str
) -> Any:
    """Compile a graph with this configuration, or load it from PyTorch's caches of compiled graphs.

    Args:
        gm: the graph; Inductor changes it.
        example_inputs: its inputs.
        config: Inductor's configuration, where it differs from the default.
        decompositions: returns the table of decompositions. It must be a function of a module: PyTorch's keys hold its
            name, since the table itself cannot be pickled.
        key: part of the key of every entry in the caches, those of a backward pass that is compiled later among them:
            it must differ where the code of an equal graph differs.
    """
    tag = " ".join(filter(None, (compiler_config.cache_key_tag, key)))

    def compile_inner(inner_gm: Any, inputs: Any, **kwargs: Any) -> Any:
        if "get_decomp_fn" in kwargs:  # a closure or a table of functions, neither of which can be pickled
            kwargs["get_decomp_fn"] = decompositions
        with compiler_config.patch(cache_key_tag=tag):
            return compile_fx_inner(inner_gm, inputs, **kwargs)

    with explained(), compiler_config.patch(cache_key_tag=tag), V.set_choices_handler(Choices()):
        return _compiler.compile_fx(
            gm,
            example_inputs,
            inner_compile=compile_inner,
            config_patches=config or None,
            decompositions=decompositions(),
        )


def compile_package(program: Any, path: str, config: dict[str, Any]) -> None:
    """Compile an exported program to a package of AOTInductor; ``path`` must end in ``.pt2``."""
    with explained():
        from torch._inductor import aoti_compile_and_package

    with V.set_choices_handler(Choices()):
        aoti_compile_and_package(program, package_path=path, inductor_configs=config)


def load_compiled_package(path: str) -> Any:
    """The function in a package of AOTInductor.

    Raises:
        RuntimeError: the file is not a package, or is for a device that this machine lacks.
    """
    with explained():
        from torch._C._aoti import AOTIModelPackageLoader
        from torch._inductor import aoti_load_package

    if AOTIModelPackageLoader.load_metadata_from_package(path, "model").get("AOTI_DEVICE_KEY") == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("it was compiled for CUDA, and there is no CUDA device")
        torch.cuda.init()  # PyTorch's loader uses the allocator of CUDA, and crashes where nothing has made it yet
    return aoti_load_package(path)


def keep_whole(operators: list[Any]) -> None:
    """Register Inductor's default fallback, with the layout constraint of each operator, so that it does not warn."""
    with explained():
        from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
        from torch._library.utils import get_layout_constraint_tag

    for target in operators:
        if target not in lowerings:
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(target, with_default=True))
            make_fallback(target, layout_constraint=constraint, warn=False)


__all__ = [
    "V",
    "compile_graph",
    "compile_package",
    "keep_whole",
    "list_mode_options",
    "list_options",
    "load_compiled_package",
    "select_decomp_table",
]
