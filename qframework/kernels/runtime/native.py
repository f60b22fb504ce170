"""C++ of the package for x86 processors: the instruction sets, and libraries that are compiled at their first use.

Headers that families share are in native/, sources in the folder native/ of each family. Each instruction set is a
library of its own, since compilers may use every instruction that they are allowed.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import torch

from qframework.compat.cpp_compiler import load_cpp

_AVX2 = "avx2,fma,f16c"
_AVX512 = f"{_AVX2},avx512f,avx512bw,avx512vl,avx512dq"
_AVX512_VNNI = f"{_AVX512},avx512vnni"
_AMX = f"{_AVX512_VNNI},amx-tile,amx-int8,amx-bf16"
_SHARED = ("vectors.h", "floats.h", "instructions.h", "tile.h", "pack.h")


class Instructions(NamedTuple):
    """What a library is compiled for."""

    needs: tuple[str, ...]  # of ``torch.cpu.get_capabilities``
    bits: int  # of a vector
    group: int  # INT8 values in 32 bits of it: 4, or 2 which are widened to INT16
    tiles: int  # whether AMX multiplies
    target: str

    def source(self, family: str, files: tuple[str, ...]) -> str:
        """The text of a library: the shared headers, then ``files`` of ``family``."""
        kernels = resources.files("qframework.kernels")
        paths = [("runtime", name) for name in _SHARED] + [(family, name) for name in files]
        texts = [kernels.joinpath(folder, "native", name).read_text("utf-8") for folder, name in paths]
        named = {"BITS": self.bits, "GROUP": self.group, "AMX": self.tiles, "TARGET": f'"{self.target}"'}
        return "\n".join([*(f"#define QFRAMEWORK_{name} {value}" for name, value in named.items()), *texts])


_VNNI = ("avx512_vnni", "avx512_bw", "avx512_vl", "avx512_dq")
SETS = {
    "amx": Instructions(("amx_int8", "amx_bf16", "amx_tile", *_VNNI), 512, 4, 1, _AMX),
    "vnni": Instructions(_VNNI, 512, 4, 0, _AVX512_VNNI),
    "avx512": Instructions((), 512, 2, 0, _AVX512),
    "avx2": Instructions((), 256, 2, 0, _AVX2),
}
NATIVE = ("amx", "vnni", "multiply_add")
"""The implementations here: with AMX, with VNNI, or by 16-bit multiply-add for processors without INT8 instructions."""


def instructions_of(implementation: str) -> str:
    """The instruction set of an implementation on this processor. Raises NotImplementedError if it has none."""
    capability = torch.backends.cpu.get_cpu_capability()  # what PyTorch uses, at most what the processor has
    if implementation == "multiply_add":
        if capability not in ("AVX2", "AVX512"):
            raise NotImplementedError(f"the processor has neither AVX2 nor AVX-512: its capability is {capability}")
        return capability.lower()
    found = torch.cpu.get_capabilities()
    missing = [name for name in SETS[implementation].needs if not found.get(name)]
    if capability != "AVX512" or missing:
        lacking = missing[0] if missing else "AVX-512"
        raise NotImplementedError(f"the processor has no {lacking}, or PyTorch may not use it")
    return implementation


def library(instructions: str, family: str, *files: str) -> Any:
    """The library of a family's sources for an instruction set; callers keep it.

    Raises NotImplementedError where the operating system forbids AMX, RuntimeError or OSError where C++ cannot be
    compiled.
    """
    found = load_cpp(SETS[instructions].source(family, files))
    if not found.available():
        raise NotImplementedError("the operating system does not let this process use AMX")
    return found
