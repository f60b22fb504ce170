"""Real data that packages carry: crops of photographs, docstrings of the standard library.

Photographs come from scikit-image and scikit-learn, docstrings from the sources of the running Python, which are parsed
and not imported. Equal seeds give equal data with equal versions.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.evaluation.images import read_image

_OF_SCIKIT_IMAGE = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png"),
    *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png"),
    *("retina.jpg", "rocket.jpg"),
)
_OF_SCIKIT_LEARN = ("china.jpg", "flower.jpg")
_SMALLEST_CROP = 0.3  # of the shorter side
_SHORTEST, _LONGEST = 60, 2000  # characters of a docstring
_FROM_EACH_MODULE = 8


class Crops(NamedTuple):
    """Crops ``(n, 3, S, S)`` float32, preprocessed, and the photograph that each is from, ``(n,)`` int64."""

    images: Tensor
    photograph: Tensor


def photographs() -> list[Path]:
    """The files of 17 photographs."""
    import skimage.data
    import sklearn.datasets

    folders = {
        Path(skimage.data.__file__).parent: _OF_SCIKIT_IMAGE,
        Path(sklearn.datasets.__file__).parent / "images": _OF_SCIKIT_LEARN,
    }
    return [folder / name for folder, names in folders.items() for name in names]


def crops(count: int, seed: int, model: Any, size: int) -> Crops:
    """``count`` random square crops, as many of each photograph as possible, in timm's preprocessing for ``model``.

    They have ``size`` x ``size`` pixels.
    """
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({"input_size": (3, size, size)}, model=model)
    transform: Any = create_transform(**{**config, "crop_pct": 1.0}, is_training=False)
    draw = random.Random(seed)
    files = photographs()
    loaded: dict[int, Any] = {}
    images, labels = [], []
    for index in range(count):
        label = index % len(files)
        if label not in loaded:
            loaded[label] = read_image(files[label])
        photograph = loaded[label]
        shorter = min(photograph.size)
        side = round(shorter * draw.uniform(_SMALLEST_CROP, 1.0))
        left, top = (draw.randint(0, length - side) for length in photograph.size)
        images.append(transform(photograph.crop((left, top, left + side, top + side))))
        labels.append(label)
    return Crops(torch.stack(images), torch.tensor(labels))


class Texts(NamedTuple):
    """Docstrings and the module that each is from, ``(n,)`` int64."""

    texts: list[str]
    module: Tensor


def docstrings(count: int, seed: int) -> Texts:
    """``count`` docstrings of functions and classes, at least two from each module, in random order.

    Raises:
        QFrameworkError: the standard library's sources hold fewer.
    """
    draw = random.Random(seed)
    by_module = [found for path in sources() if len(found := docstrings_of(path)) >= _FROM_EACH_MODULE]
    draw.shuffle(by_module)
    pairs = [
        (text, module)
        for module, texts in enumerate(by_module[: -(-count // _FROM_EACH_MODULE)])
        for text in draw.sample(texts, _FROM_EACH_MODULE)
    ][:count]
    if len(pairs) < count:
        raise QFrameworkError(f"benchmarks.pretrained: --texts must be at most {len(pairs)}, got {count}")
    draw.shuffle(pairs)
    return Texts([text for text, _ in pairs], torch.tensor([module for _, module in pairs]))


def sources() -> Sequence[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))


@cache
def docstrings_of(path: Path) -> list[str]:
    """The docstrings of functions and classes in a source file, each once."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in dict.fromkeys(found) if _SHORTEST <= len(text) <= _LONGEST]
