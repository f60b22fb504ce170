"""The blocks of a mask: which are visited, in which order, and the bits of those kept in part."""

from __future__ import annotations

import pytest
import torch

from qframework.errors import QFrameworkError
from qframework.kernels.attention.mask_blocks import BLOCK, MASK_BLOCKS, MaskSizes, mask_blocks_ref, mask_blocks_triton

pytestmark = pytest.mark.interpreter
kernel_only = pytest.mark.parametrize("implementation", ["triton"], indirect=True)
QUERIES, KEYS = 300, 450


def band(queries: int, keys: int) -> torch.Tensor:
    row, key = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    return ((key - row).abs() <= 40)[None, None]


def padding(batch: int, keys: int) -> torch.Tensor:
    return (torch.arange(keys) < torch.tensor([keys, keys // 3, 0])[:batch, None])[:, None, None]


MASKS = {
    "band": band(QUERIES, KEYS),
    "padding": padding(3, KEYS),
    "padding expanded": padding(2, KEYS),
    "random of heads": torch.rand(2, 3, QUERIES, KEYS) > 0.5,
    "transposed": band(KEYS, QUERIES).transpose(2, 3),
    "causal and padding": torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool).tril() & padding(2, KEYS),
    "one key short of causal": torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool)
    .tril()
    .index_put(tuple(torch.tensor([x]) for x in (0, 0, 140, 129)), torch.tensor(False)),
    "one row in all": torch.ones(1, 1, QUERIES, 1, dtype=torch.bool).index_fill(2, torch.tensor(7), False),
    "all": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    "none": torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.bool),
}


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """(BLOCK, WORDS) to (BLOCK, BLOCK) bool."""
    return (words.cpu()[:, :, None] >> torch.arange(32) & 1).bool().flatten(1)


@kernel_only
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_those_of_the_mask(name: str, causal: bool, place: torch.device) -> None:
    mask = MASKS[name].to(place)
    if "expanded" in name:
        mask = mask.expand(2, 5, QUERIES, KEYS)
    key_heads = 5 if "expanded" in name else mask.shape[1]
    found = mask_blocks_triton(mask, QUERIES, KEYS, causal, key_heads)
    mask = mask.cpu()
    batch, heads, tiles, blocks = found.order.shape
    assert blocks == -(-KEYS // BLOCK)
    assert tiles == (1 if name in ("padding", "padding expanded", "all") and not causal else 3)
    full = mask.expand(*mask.shape[:2], QUERIES, KEYS)
    full = full & torch.ones(QUERIES, KEYS, dtype=torch.bool).tril() if causal else full
    assert torch.equal(found.seen.cpu().bool(), full[:, :heads].any(2))
    for m, h, t in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, tiles))).tolist():
        rows = full[m, h, t * BLOCK : (t + 1) * BLOCK]
        parts = [rows[:, j * BLOCK : (j + 1) * BLOCK] for j in range(blocks)]
        whole = {j for j, part in enumerate(parts) if part.all() and part.shape[1] == BLOCK}
        partial = {j for j, part in enumerate(parts) if part.any()} - whole
        expected = partial if partial | whole else {0}
        count, visited, own = found.counts[m, h, t].tolist()
        order = found.order[m, h, t].tolist()
        here = full[m, h, t * BLOCK : (t + 1) * BLOCK, t * BLOCK : (t + 1) * BLOCK]
        same = mask.shape[2] == 1 and not causal  # in all tiles, which share an entry
        assert own == (t in partial and not same and torch.equal(here, torch.ones_like(here).tril()))
        assert not own or order[0] == t
        assert (count, visited) == (len(expected), len(expected | whole))
        assert (set(order[:count]), set(order[count:visited])) == (expected, whole)
        for j in expected:
            kept = unpacked(found.bits[m, h, t, j])
            assert torch.equal(kept[: len(rows), : parts[j].shape[1]], parts[j])
            assert not kept[:, parts[j].shape[1] :].any()


@kernel_only
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", MASKS)
def test_words_of_four_bools_tell_the_same(name: str, causal: bool, place: torch.device) -> None:
    """Masks whose keys are a multiple of four are read so where the keys that are seen do not matter."""
    mask = MASKS[name][..., : KEYS // 4 * 4].contiguous()
    given = (QUERIES, KEYS // 4 * 4 if mask.shape[3] > 1 else 448, causal)
    found, expected = mask_blocks_triton(mask.to(place), *given), mask_blocks_ref(mask, *given)
    assert torch.equal(found.counts.cpu(), expected.counts)
    for m, h, t in torch.cartesian_prod(*(torch.arange(n) for n in found.order.shape[:3])).tolist():
        partial, visited, _ = expected.counts[m, h, t].tolist()
        assert torch.equal(found.order[m, h, t, :visited].cpu(), expected.order[m, h, t, :visited])
        for block in expected.order[m, h, t, :partial].tolist():
            assert torch.equal(found.bits[m, h, t, block].cpu(), expected.bits[m, h, t, block])


@kernel_only
def test_grouped_heads_see_together(place: torch.device) -> None:
    mask = torch.rand(2, 6, QUERIES, KEYS) > 0.996
    found = mask_blocks_triton(mask.to(place), QUERIES, KEYS, False, key_heads=2)
    assert torch.equal(found.seen.cpu().bool(), mask.unflatten(1, (2, 3)).any(2).any(2))
    assert mask_blocks_triton(mask.to(place), QUERIES, KEYS, False).seen is None


@kernel_only
def test_shares_what_broadcasts(place: torch.device) -> None:
    """A mask that was expanded takes no more memory than the one it came from."""
    mask = band(QUERIES, KEYS).to(place)
    assert mask_blocks_triton(mask.expand(4, 7, -1, -1), QUERIES, KEYS, False).order.shape[:2] == (1, 1)


def check_equal(found, expected) -> None:
    """Everything that a kernel reads is equal."""
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype == torch.int32
    bits, order, counts, seen = (x.cpu() for x in found)
    other_bits, other_order, other_counts, other_seen = (x.cpu() for x in expected)
    assert torch.equal(counts, other_counts)
    assert torch.equal(seen, other_seen)
    tiles = counts.flatten(0, -2).tolist()
    rows = zip(tiles, *(x.flatten(0, 2) for x in (bits, other_bits, order, other_order)), strict=True)
    for (partial, visited, _), mine, theirs, first, second in rows:
        assert torch.equal(first[:visited], second[:visited])
        visits = first[:partial].long()
        assert torch.equal(mine[visits], theirs[visits])


@kernel_only
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", MASKS)
def test_the_operator_equals_its_reference(name: str, causal: bool, place: torch.device) -> None:
    mask = MASKS[name]
    sizes = [*MaskSizes.of(mask)]
    given = (sizes, QUERIES, KEYS, causal, mask.shape[1])
    check_equal(MASK_BLOCKS.cuda(mask.to(place), *given), MASK_BLOCKS.cpu(mask, *given))


@kernel_only
def test_sizes_tell_what_a_copied_mask_repeats(place: torch.device) -> None:
    mask = MASKS["padding"].expand(3, 5, QUERIES, KEYS)
    sizes = [*MaskSizes.of(mask)]
    assert sizes == [3, 1, 1]
    given = (sizes, QUERIES, KEYS, False, 5)
    found = MASK_BLOCKS.cuda(mask.contiguous().to(place), *given)
    check_equal(found, MASK_BLOCKS.cpu(mask, *given))
    assert found[1].shape == (3, 1, 1, 4)
    assert MASK_BLOCKS.cuda(mask.to(place), sizes, QUERIES, KEYS)[3].numel() == 0


@pytest.mark.parametrize("name", MASKS)
def test_opcheck(name: str) -> None:
    mask = MASKS[name]
    given = (mask, [*MaskSizes.of(mask)], QUERIES, KEYS, False, 1)
    torch.library.opcheck(torch.ops.qframework.mask_blocks.default, given)


ERRORS = [
    ({"mask": torch.ones(2, 3)}, "mask must be one of torch.bool, got torch.float32|mask must have dtype"),
    ({"mask": torch.ones(7, 450, dtype=torch.bool)}, "broadcast to 300 queries and 450 keys, got shape \\(7, 450\\)"),
    ({"sizes": [2, 1, 1]}, "sizes must be 1 or those of the mask \\(1, 1, 300\\), got \\[2, 1, 1\\]"),
    (
        {"mask": torch.ones(1, 6, 300, 450, dtype=torch.bool), "sizes": [1, 6, 1], "key_heads": 4},
        "key_heads must divide",
    ),
]


@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_errors(given: dict, message: str) -> None:
    mask = torch.ones(300, 450, dtype=torch.bool)
    arguments = {"mask": mask, "sizes": [1, 1, 300], "queries": 300, "keys": 450} | given
    with pytest.raises(QFrameworkError, match=message):
        torch.ops.qframework.mask_blocks(**arguments)
