"""Inductor. Imported only when it is needed, which takes seconds."""

from __future__ import annotations

import platform
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor

from qframework.compat.compile_pool import forks_until_ready
from qframework.compat.early_launch import waiting_first
from qframework.compat.missing import explained, note_error
from qframework.compat.pytree import treespec_loads
from qframework.compat.subgraphs import one_schema_for_equal_calls

compiler_config: Any = torch.compiler.config  # PyTorch adds patch() at import

with explained():
    from torch._inductor import compile_fx as _compiler
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options, list_options
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V


def start_processes() -> None:
    """Start the processes that compile Triton kernels, once; they are ready seconds later.

    Until then Inductor compiles kernels one after the other in its own process.
    """
    try:
        from torch._inductor.async_compile import maybe_warm_pool
    except ImportError as error:
        note_error(error)
        return
    maybe_warm_pool()


def may_have_processes() -> bool:
    """Whether Inductor may compile in other processes, which a user forbids with one "compile thread"."""
    with explained():
        threads = inductor_config.compile_threads
    return threads is None or threads > 1


def can_call_subgraphs() -> bool:
    """Whether the code that Inductor is configured to write can call a subgraph (``invoke_subgraph``)."""
    with explained():
        return not (inductor_config.cpp_wrapper or inductor_config.fx_wrapper)


def tunes_products(options: Mapping[str, Any]) -> bool:
    """Whether Inductor may write kernels of its own for products, and fuse them with what reads these.

    ``options`` go before Inductor's configuration.
    """
    names = ("max_autotune", "max_autotune_gemm")
    with explained():
        return any(options.get(name, getattr(inductor_config, name)) for name in names)


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

    tagged = compiler_config.patch(cache_key_tag=tag)
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in example_inputs)
    forks = forks_until_ready(on_gpu and may_have_processes() and not tunes_products(config))
    with explained(), tagged, V.set_choices_handler(Choices()), one_schema_for_equal_calls(), waiting_first(), forks:
        return _compiler.compile_fx(
            gm,
            example_inputs,
            inner_compile=compile_inner,
            config_patches=config or None,
            decompositions=decompositions(),
        )


def compile_package(program: Any, path: str, config: dict[str, Any], metadata: dict[str, str]) -> None:
    """Compile an exported program to a package of AOTInductor with this metadata; ``path`` must end in ``.pt2``."""
    with explained():
        from torch._inductor import aoti_compile_and_package

    with V.set_choices_handler(Choices()):
        kept = {_METADATA: {**metadata, **config.get(_METADATA, {})}}
        configs = {**_shared_standard_library(), **config, **kept}
        aoti_compile_and_package(program, package_path=path, inductor_configs=configs)


_METADATA = "aot_inductor.metadata"
_LINKED = "aot_inductor.custom_op_libs"
_STANDARD_LIBRARY = "libstdc++.so.6"


def _shared_standard_library() -> dict[str, Any]:
    """Configuration that links packages to the C++ standard library that PyTorch uses.

    A package with a copy of its own, which a compiler without a shared library for development links, ends the process
    that loads it: the two libraries read each other's locales.
    """
    return {_LINKED: [f":{_STANDARD_LIBRARY}"]} if platform.system() == "Linux" else {}


def load_compiled_package(path: str) -> Any:
    """The function in a package of AOTInductor.

    Raises:
        RuntimeError: the file is not a package, or is for another kind of machine than this one.
    """
    with explained():
        from torch.export.pt2_archive._package import AOTICompiledModel

        loader: Any = torch._C._aoti.AOTIModelPackageLoader
    wrong = _other_machine(loader.load_metadata_from_package(path, "model")) or _own_standard_library(path)
    if wrong is not None:
        raise RuntimeError(wrong)
    # PyTorch's own function also compares the machines, for which it compiles files, and then loads a second time
    # where there is no compiler.
    return AOTICompiledModel(loader(path, "model", False, 1, -1))


def package_structure(run: Any) -> Any:
    """How the inputs of a loaded package are nested: its positional and keyword inputs."""
    with explained():
        return treespec_loads(run.loader.get_call_spec()[0])


def _other_machine(metadata: Mapping[str, str]) -> str | None:
    """Why this machine cannot run a package with this metadata."""
    if metadata.get("AOTI_MACHINE", platform.machine()) != platform.machine():
        return f"it was compiled for {metadata['AOTI_MACHINE']}, and this is {platform.machine()}"
    if metadata.get("AOTI_DEVICE_KEY") == "cuda":
        return _other_gpu(metadata.get("AOTI_COMPUTE_CAPABILITY", ""))
    wanted = next((name for name in ("AVX512", "AVX2") if name in metadata.get("AOTI_CPU_ISA", "").split()), None)
    found = torch.backends.cpu.get_cpu_capability()
    if wanted is not None and found not in (wanted, "AVX512"):
        return f"it was compiled for processors with {wanted}, and this one has {found}"
    return None


def _other_gpu(capability: str) -> str | None:
    """Why this GPU cannot run a package for a compute capability, such as ``"90"``."""
    if not torch.cuda.is_available():
        return "it was compiled for CUDA, and no CUDA device is available"
    major, minor = torch.cuda.get_device_capability()
    if not capability.isdigit() or (capability[:-1] == str(major) and int(capability[-1]) <= minor):
        return None
    wanted = f"{capability[:-1]}.{capability[-1]}"
    return f"it was compiled for GPUs of compute capability {wanted}, and this one has {major}.{minor}"


_HEAD = 2**24  # bytes of a library that hold the names of those that it needs; weights come behind


def _own_standard_library(path: str) -> str | None:
    """Why a package would end this process: its library holds a copy of the C++ standard library."""
    if platform.system() != "Linux":
        return None
    with zipfile.ZipFile(path) as archive:
        heads = (archive.open(each).read(_HEAD) for each in archive.infolist() if each.filename.endswith(".so"))
        if all(_STANDARD_LIBRARY.encode() in head for head in heads):
            return None
    return (
        "its library holds a copy of the C++ standard library, which PyTorch's cannot work with. Write the package "
        "with to_package of this version"
    )


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
    "can_call_subgraphs",
    "compile_graph",
    "compile_package",
    "keep_whole",
    "list_mode_options",
    "list_options",
    "load_compiled_package",
    "may_have_processes",
    "package_structure",
    "select_decomp_table",
    "start_processes",
    "tunes_products",
]
