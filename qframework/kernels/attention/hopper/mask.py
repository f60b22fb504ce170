"""The blocks of a bool mask (mask_blocks.py) as Hopper's kernels read them: a tile's entry, and which keys are kept."""

from __future__ import annotations

from qframework.kernels.attention.mask_blocks import BLOCK, WORDS
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.runtime.gluon import gl, gluon

    _BLOCK, _MASK_WORDS = gl.constexpr(BLOCK), gl.constexpr(WORDS)

    @gluon.jit
    def entry_of(tile, h, b, mask):
        """The entry of a tile of queries in ``mask``: (bits, order, counts, batches, heads, tiles)."""
        MASKS, MASK_HEADS, MASK_TILES = mask[3:6]
        return ((b % MASKS * MASK_HEADS + h % MASK_HEADS) * MASK_TILES + tile % MASK_TILES).to(gl.int64)

    @gluon.jit
    def _by_thread(scores):
        """(M, keys) as (M, words, 4, 4, 2): keys of a word in groups of 8, of which a thread holds two neighbours."""
        return gl.reshape(scores, (scores.shape[0], scores.shape[1] // 32, 4, 4, 2))

    @gluon.jit
    def kept_words(bits_ptr, block, first, scores):
        """The bits of rows of a tile and the keys of ``scores`` in ``block`` of the mask, from its ``first`` key on.

        ``bits_ptr`` is that of the first row in the tile's first block.
        """
        WORDS: gl.constexpr = scores.shape[1] // 32
        PLACES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, gl.SliceLayout(4, _by_thread(scores).type.layout)))
        row = gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, PLACES))
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, PLACES))
        start = block.to(gl.int64) * (_BLOCK * _MASK_WORDS) + first // 32
        return gl.load(bits_ptr + start + row[:, None] * _MASK_WORDS + word[None, :])

    @gluon.jit
    def kept_scores(scores, words):
        """FP32 ``scores`` of the keys that the words of ``kept_words`` keep, -inf for the others.

        In two instructions, as the bit of a key is a constant of its register: LLVM packs and unpacks bools instead.
        """
        by_thread = _by_thread(scores)
        LAYOUT: gl.constexpr = by_thread.type.layout
        OF_THREAD: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, LAYOUT))  # (M, words, 4)
        OF_KEY: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, LAYOUT)))  # (4, 2)
        thread = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, OF_THREAD)))
        shifted = gl.expand_dims(words, 2) >> gl.expand_dims(gl.expand_dims(2 * thread, 0), 0)
        group = gl.arange(0, 4, layout=gl.SliceLayout(1, OF_KEY))
        neighbour = gl.arange(0, 2, layout=gl.SliceLayout(0, OF_KEY))
        bit = 1 << (8 * group[:, None] + neighbour[None, :])
        kept = gl.inline_asm_elementwise(
            """{
            .reg .b32 bits;
            .reg .pred keeps;
            and.b32 bits, $2, $3;
            setp.ne.b32 keeps, bits, 0;
            selp.f32 $0, $1, 0fFF800000, keeps;
            }""",
            "=f,f,r,r",
            [
                by_thread,
                gl.expand_dims(gl.expand_dims(shifted, 2), 4),
                gl.expand_dims(gl.expand_dims(gl.expand_dims(bit, 0), 0), 3),
            ],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        return gl.convert_layout(gl.reshape(kept, scores.shape), scores.type.layout, assert_trivial=True)
