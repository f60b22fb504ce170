"""Griffe extension: ``::`` before an indented block of a docstring becomes ``:``, which is what Markdown expects."""

import re
from typing import Any

import griffe

_DOUBLE_COLON = re.compile(r"::(?=\n\n {4})")


class LiteralBlocks(griffe.Extension):
    """Rewrites every docstring of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _DOUBLE_COLON.sub(":", obj.docstring.value)
