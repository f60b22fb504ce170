"""Attention's kernel for Hopper compiles without spilling and within shared memory, in every form."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_compile_targets import MAX_STACK, compile_for, serializes_wgmma, stack_bytes

from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.specialized import NOTHING, Added
from qframework.kernels.attention.variants import resolve
from qframework.kernels.runtime.gluon import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon, which the interpreter does not have")

SPEC = "8-per_block-fp16-fp32"
FP8_STACK = 160  # bytes; the kernel was timed with Triton 3.6, which spills 16 to 112


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize(("width", "kind"), [(64, "fp16"), (64, "bf16"), (128, "fp16"), (128, "bf16")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp"])
def test_compiles_for_sm_90_without_spilling(width, kind, causal, variant, tmp_path) -> None:
    """A spill in the loop costs more than the two warpgroups gain."""
    _compiles_without_spilling(width, kind, causal, variant, False, tmp_path)


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("width", "kind"), [(64, "fp16"), (128, "bf16"), (96, "bf16")])
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp"])
def test_compiles_that_stores_the_log_sum_exp(width, kind, causal, variant, tmp_path) -> None:
    _compiles_without_spilling(width, kind, causal, variant, False, tmp_path, lse=True)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("variant", [SPEC, "unquantized", "integer_exp"])
def test_compiles_with_a_mask(width, variant, tmp_path) -> None:
    _compiles_without_spilling(width, "fp16", False, variant, True, tmp_path)


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("variant", ["sage2_int8", "8-per_block-fp8-fp32", "8-per_thread-fp16-fp32"])
def test_compiles_with_scales_per_thread_and_fp8_values(variant, width, causal, masked, tmp_path) -> None:
    """With 128 channels of FP8 values, whose products have registers of their own, some are spilled."""
    allowed = 0
    if width > 64 and "fp16" not in variant:
        allowed = FP8_STACK
    _compiles_without_spilling(width, "fp16", causal, variant, masked, tmp_path, allowed=allowed)


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("variant", ["unquantized", "integer_exp"])
def test_compiles_for_packed_sequences(variant, width, causal, tmp_path) -> None:
    """With 256 channels and the integer exponential, two registers may be spilled once in a tile of queries.

    Triton 3.6, with which it was timed, does so.
    """
    allowed = 8 if width == 256 and variant == "integer_exp" else 0
    _compiles_without_spilling(width, "bf16", causal, variant, False, tmp_path, allowed=allowed, packed=True)


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("width", [80, 96, 160, 192, 256])
def test_compiles_for_other_widths(width, masked, tmp_path) -> None:
    _compiles_without_spilling(width, "fp16", not masked, "unquantized", masked, tmp_path)


@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize(
    "added",
    [Added("tile", 2), Added("tile", 4), Added("row", 2), Added("factors", 2, 64), Added("factors", 2, 14)],
    ids=str,
)
def test_compiles_with_a_bias(width, added, tmp_path) -> None:
    """A register or a few may be spilled once in a tile of queries, outside of the loop."""
    if width > 128 and added.itemsize > 2:
        pytest.skip("does not fit shared memory: the general kernel")
    _compiles_without_spilling(width, "bf16", False, "unquantized", False, tmp_path, added, MAX_STACK)


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("variant", [SPEC, "unquantized"])
def test_compiles_that_stores_the_log_sum_exp_beside_a_mask(width, variant, tmp_path) -> None:
    _compiles_without_spilling(width, "bf16", False, variant, True, tmp_path, lse=True)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("what", ["full", "causal", "masked", "bias", "lse", "masked lse"])
def test_compiles_with_a_soft_cap(width, what, tmp_path) -> None:
    added = Added("tile", 2) if what == "bias" else NOTHING
    allowed = MAX_STACK if what == "bias" else 0
    how = (what == "causal", "unquantized", what.startswith("masked"), tmp_path, added, allowed)
    _compiles_without_spilling(width, "bf16", *how, lse=what.endswith("lse"), capped=True)


@pytest.mark.parametrize(("variant", "width"), [("sage2_int8", 64), ("integer_exp", 128)])
def test_compiles_with_three_stages(variant, width, tmp_path, monkeypatch) -> None:
    """benchmarks.attention_parts times them."""
    form_of = specialized.form_of
    monkeypatch.setattr(specialized, "form_of", lambda *given: form_of(*given)._replace(stages=3))
    _compiles_without_spilling(width, "fp16", False, variant, False, tmp_path, allowed=MAX_STACK)


def _triton() -> tuple[int, ...]:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def _keeps_indices(ptx: str) -> bool:
    """Whether pairs of keys have an index each, here a thread's sixth, which takes registers from block to block."""
    return bool(re.search(r"or\.b32\s+%r\d+, %r\d+, 40;", ptx))


def _more_by_new_triton(masked: bool, added: Added) -> int:
    """Bytes that Triton 3.9 spills more than 3.6 to 3.8, with masks and biases; never timed."""
    if _triton() < (3, 9):
        return 0
    return 80 if added != NOTHING else 32 if masked else 0


def _compiles_without_spilling(
    width, kind, causal, variant, masked, tmp_path, added=NOTHING, allowed=0, packed=False, lse=False, capped=False
) -> Any:
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8, "fp32": torch.float32}
    dtypes |= {"fp8e4nv": torch.float8_e4m3fn}
    rank = 5 if packed else 4

    def described(kind, rows, channels, rank=rank, lines=1):
        layout = specialized.layout(rows, channels, dtypes[kind], rank, lines)
        return f"tensordesc<{kind}[{'1, ' * (rank - 3)}{lines}, {rows}, {channels}],{layout!r}>"

    form = specialized.form_of(resolve(variant), width, width, masked, added, packed)
    form = form._replace(lse=lse, capped=capped)
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in specialized.kernel.arg_names}
    stored = "i8" if resolve(variant).quantizes_qk else kind
    values = "bf16" if resolve(variant).exponential == "integer" else "fp8e4nv" if form.fp8 else kind
    of_keys, of_values = (form.block_d, form.rest_d), (form.block_dv, form.rest_dv)
    for name, (dtype, rows, (first, rest)) in {
        "q": (stored, specialized.ROWS, of_keys),
        "k": (stored, form.block_n, of_keys),
        "v": (values, form.block_n, of_values),
        "out": (kind, specialized.ROWS, of_values),
    }.items():
        image = (added.held, 5, rows // added.held) if added.padded and name in "kv" else None
        for desc, channels in ((f"{name}_desc", first), (f"{name}_rest_desc", rest or first)):
            types[desc] = (
                described(dtype, image[0], channels, *image[1:]) if image else described(dtype, rows, channels)
            )
    if form.fp8:
        types |= dict.fromkeys(("v_desc", "v_rest_desc"), described(values, form.block_dv, form.block_n))
    bias = "fp32" if added.itemsize == 4 else kind
    columns = {"tile": form.block_n, "factors": form.columns}.get(form.bias, form.block_n)
    types |= {"bias_ptr": f"*{bias}", "bias_desc": described(bias, specialized.ROWS, columns)}
    types |= {"logit_scale": "fp32", "softcap": "fp32", "bits_ptr": "*i32", "order_ptr": "*i32", "counts_ptr": "*i32"}
    types |= {"plan_ptr": "*i32"}
    compiled = compile_for("sm_90", specialized.kernel, types, {"CAUSAL": causal, "FORM": form}, num_warps=4)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert added != NOTHING or form.fp8 or not _keeps_indices(compiled.asm["ptx"])
    assert stack_bytes(compiled, tmp_path) <= allowed + _more_by_new_triton(masked, added)
    assert not serializes_wgmma(compiled, tmp_path)
    assert compiled.metadata.shared <= 227 * 1024
    assert (
        specialized.shared_bytes(form, added)
        <= compiled.metadata.shared
        <= specialized.shared_bytes(form, added) + 1024
    )
    return compiled
