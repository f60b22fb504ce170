"""What features of a quantized model are good for, compared with those of the float model.

Every figure is a function of features alone, so that each is tested without a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.numerics import sqnr_db


def image_figures(expected: Tensor, actual: Tensor, photograph: Tensor) -> dict[str, float]:
    """Figures of the tokens ``(n, N, C)``, class token first, of n crops; ``photograph (n,)`` says where each is from.

    Returns:
        ``sqnr_db`` of all tokens; ``cosine`` and ``worst_cosine`` of the class tokens; ``correspondences``, in percent,
        see ``correspondences``; ``top_1``, in percent: how often the nearest other crop is of the same photograph;
        ``spearman`` of the similarities of class tokens.
    """
    cosine = torch.cosine_similarity(expected[:, 0].double(), actual[:, 0].double(), dim=-1)
    return {
        "sqnr_db": sqnr_db(expected, actual),
        "cosine": float(cosine.mean()),
        "worst_cosine": float(cosine.min()),
        "correspondences": 100 * correspondences(expected[:, 1:], actual[:, 1:], photograph),
        "top_1": 100 * nearest_neighbours(actual[:, 0], photograph),
        "spearman": spearman(similarities(expected[:, 0]), similarities(actual[:, 0])),
    }


def text_figures(expected: Tensor, actual: Tensor, module: Tensor) -> dict[str, float]:
    """``sqnr_db``, ``cosine``, ``worst_cosine``, ``top_1`` and ``spearman`` of vectors ``(n, C)``, as for images."""
    cosine = torch.cosine_similarity(expected.double(), actual.double(), dim=-1)
    return {
        "sqnr_db": sqnr_db(expected, actual),
        "cosine": float(cosine.mean()),
        "worst_cosine": float(cosine.min()),
        "top_1": 100 * nearest_neighbours(actual, module),
        "spearman": spearman(similarities(expected), similarities(actual)),
    }


def speech_figures(
    expected: Tensor,
    actual: Tensor,
    said: Sequence[Sequence[str]],
    heard: Sequence[Sequence[str]],
    found: Sequence[Sequence[str]],
) -> dict[str, float]:
    """Figures of an encoder's states ``(n, N, C)`` and of the words that a decoder found in them.

    Args:
        expected: the float model's states.
        actual: those of the quantized model.
        said: the words of each recording.
        heard: what the decoder finds in ``expected``.
        found: what it finds in ``actual``.

    Returns:
        ``sqnr_db`` of all states; ``cosine``, the mean of all; ``word_errors``, in percent of the words said;
        ``changed_words``, the same relative to what was heard with the float model.
    """
    cosine = torch.cosine_similarity(expected.double(), actual.double(), dim=-1)
    return {
        "sqnr_db": sqnr_db(expected, actual),
        "cosine": float(cosine.mean()),
        "word_errors": 100 * word_error_rate(said, found),
        "changed_words": 100 * word_error_rate(heard, found),
    }


def word_error_rate(said: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> float:
    """Substituted, missing and inserted words of all transcripts as a share of the words said."""
    wrong = sum(_edits(a, b) for a, b in zip(said, found, strict=True))
    return wrong / max(1, sum(map(len, said)))


def _edits(a: Sequence[str], b: Sequence[str]) -> int:
    """The Levenshtein distance of two sequences of words."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def correspondences(expected: Tensor, actual: Tensor, photograph: Tensor) -> float:
    """The share of patches whose most similar patch in another crop is the one that the float model finds.

    The other crop is the next one of the same photograph, whose features are the float model's in both cases.

    Args:
        expected: ``(n, N, C)`` float features of patches.
        actual: the same of the quantized model.
        photograph: ``(n,)`` int64.

    Raises:
        QFrameworkError: no photograph has two crops.
    """
    same = total = 0
    for label in photograph.unique():
        members = (photograph == label).nonzero().flatten().tolist()
        for query, other in zip(members, members[1:] + members[:1], strict=True):
            if query == other:
                continue
            gallery = torch.nn.functional.normalize(expected[other].float(), dim=-1).T
            found = [(features[query].float() @ gallery).argmax(-1) for features in (expected, actual)]
            same += int((found[0] == found[1]).sum())
            total += found[0].numel()
    if total == 0:
        raise QFrameworkError("correspondences: a photograph must have at least two crops, got none that has")
    return same / total


def nearest_neighbours(vectors: Tensor, label: Tensor) -> float:
    """The share of vectors ``(n, C)`` whose most similar other vector has the same label ``(n,)``."""
    similarity = _cosines(vectors).fill_diagonal_(-2.0)
    return float((label[similarity.argmax(-1)] == label).double().mean())


def similarities(vectors: Tensor) -> Tensor:
    """Cosines of all pairs of different vectors ``(n, C)``: ``(n (n - 1) / 2,)`` float64."""
    upper = torch.triu_indices(len(vectors), len(vectors), offset=1)
    return _cosines(vectors)[upper[0], upper[1]]


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two vectors without ties."""
    ranks = [x.argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _cosines(vectors: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return unit @ unit.T
