"""Pages generated from results: writes them with their plots, and finds stale files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Plot(NamedTuple):
    """A plot: the mark of its results and code, which its file contains, and the function that draws it."""

    mark: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Page:
    """A page and its plots in ``assets/`` beside it; other files there that match ``pattern`` are leftovers."""

    path: Path
    text: str
    plots: Mapping[str, Plot] = field(default_factory=dict)  # by file name
    pattern: str = ""

    @property
    def _assets(self) -> Path:
        return self.path.parent / "assets"

    def _leftovers(self) -> list[Path]:
        found = self._assets.glob(self.pattern) if self.pattern else ()
        return sorted(set(found) - {self._assets / name for name in self.plots})

    def stale(self) -> list[Path]:
        """The page and plots that are missing or differ from the results, and leftovers."""
        stale = [] if self.path.exists() and self.path.read_text() == self.text else [self.path]
        plots = {self._assets / name: plot.mark.encode() for name, plot in self.plots.items()}
        stale += [path for path, mark in plots.items() if not (path.exists() and mark in path.read_bytes())]
        return stale + self._leftovers()

    def write(self) -> None:
        """Write the page, redraw stale plots and remove leftovers."""
        stale = self.stale()
        self._assets.mkdir(parents=True, exist_ok=True)
        for name, plot in self.plots.items():
            if self._assets / name in stale:
                plot.draw(self._assets / name)
        for path in self._leftovers():
            path.unlink()
        self.path.write_text(self.text)
