"""What PyTorch's caches of compiled graphs must know of this package: part of the key of every entry that it makes.

PyTorch's keys hold the graph, its inputs, the configuration and the versions of PyTorch and Triton. The code of an
entry also depends on the decompositions of this package's operators.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

import torch

from qframework.backend.options import BackendOptions
from qframework.kernels.runtime.triton import INTERPRET


def cache_key(options: BackendOptions) -> str:
    """Equal in all processes that would generate the same code from a graph, and different from any other package's.

    It holds the version, a hash of all files of the package (passes, decompositions, tables for each chip), the options
    of the backend, whether Triton interprets its kernels, and the CPU's instructions that PyTorch uses, by which
    products are chosen. Inductor's own options are part of PyTorch's keys.
    """
    from qframework import __version__

    attention = options.attention if isinstance(options.attention, str) else sorted(options.attention.items())
    ours = (options.linear, options.freeze_weights, options.experts, attention)
    chosen = (*ours, INTERPRET, torch.backends.cpu.get_cpu_capability())
    return f"qframework {__version__} {hash_of_package()} {chosen!r}"


@functools.cache
def hash_of_package() -> str:
    """A hash of the names and contents of all files of the installed package; takes about 10 ms, once per process."""
    found = hashlib.sha256()
    for name, content in sorted(_contents(files("qframework"), "")):
        found.update(f"{name}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def _contents(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for each in folder.iterdir():
        if each.is_file():
            yield f"{name}/{each.name}", each.read_bytes()
        elif each.name != "__pycache__":
            yield from _contents(each, f"{name}/{each.name}")
