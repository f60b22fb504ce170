"""INT8 values on Hopper: loaded, and converted to float16 by byte permutation and one subtraction for each pair."""

from __future__ import annotations

from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.runtime.gluon import gl, gluon

    @gluon.constexpr_function
    def places_of_values(FORM):
        """A layout of INT8 values (keys, block_dv) in registers, 16 bytes a thread."""
        PER_ROW = FORM.block_dv // 16
        return gl.BlockedLayout([1, 16], [32 // PER_ROW, PER_ROW], [FORM.warpgroups * 4, 1], [1, 0])

    @gluon.jit
    def load_int8_values(ptr, start, KEYS: gl.constexpr, stride, NK, DV, FORM: gl.constexpr):
        """INT8 values (KEYS, block_dv) from ``start`` on, in registers; 0 where there are none."""
        PLACES: gl.constexpr = places_of_values(FORM)
        row = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, PLACES))
        column = gl.arange(0, FORM.block_dv, layout=gl.SliceLayout(0, PLACES))
        inside = (row < NK)[:, None]
        if not FORM.whole_values:
            inside = inside & (column < DV)[None, :]
        return gl.load(ptr + row[:, None] * stride + column[None, :], mask=inside, other=0)

    @gluon.jit
    def store_as_float16(tile, values):
        """INT8 values as float16 in shared memory."""
        tile.reshape((values.shape[0], values.shape[1])).store(as_float16(values))

    @gluon.jit
    def as_float16(values):
        """INT8 values as float16, exactly: a float16 of 1024 and more has integers in its bits."""
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, low, high, offset;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 low, bytes, 0x64646464, 0x4140;
            prmt.b32 high, bytes, 0x64646464, 0x4342;
            sub.f16x2 $0, low, offset;
            sub.f16x2 $1, high, offset;
            }""",
            "=r,=r,r",
            [values],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
