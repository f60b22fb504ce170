"""The rows of a comparison: saved to a file after each, shown as a table, JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from qframework.errors import FileFormatError, QFrameworkError
from qframework.evaluation.distributed import Processes
from qframework.files import open_regular, write_text

SCHEMA = 1
_NAMES = {"top1": "top-1 %", "top5": "top-5 %", "miou": "mIoU %", "pixel_iou": "pixel IoU %"}
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        configuration: its name.
        figures: in percent, the most important first.
        counts: the integers that ``figures`` are computed from.
        damaged: ``[path, reason]`` of each image that was skipped.
        lowered_linears: linear layers that run in INT8.
        linears: all linear layers.
        lowered_attentions: attentions that run in INT8.
        weight_bytes: of parameters and buffers.
        peak_bytes: ``weight_bytes`` and the peak of activations for one batch.
        images_per_second: of the module alone, summed over the processes.
        processes: number of processes.
    """

    configuration: str
    figures: dict[str, float]
    counts: dict[str, int]
    damaged: list[list[str]]
    lowered_linears: int
    linears: int
    lowered_attentions: int
    weight_bytes: int
    peak_bytes: int
    images_per_second: float
    processes: int

    def to_json(self) -> dict[str, Any]:
        """JSON-able; values that differ from run to run are under ``timing``."""
        values = asdict(self)
        timing = {name: values.pop(name) for name in ("images_per_second", "processes")}
        return {**values, "timing": timing}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """Inverse of ``to_json``."""
        return cls(**{name: value for name, value in values.items() if name != "timing"}, **values["timing"])


@dataclass(frozen=True)
class Partial:
    """The counts of a configuration after its first ``batches`` batches."""

    configuration: str
    batches: int
    counts: dict[str, int]
    damaged: list[list[str]]


@dataclass
class Results:
    """The rows of a comparison, by configuration; written to ``path``, if any, after each.

    While a row is being measured, the file also holds its partial counts.
    """

    path: Path | None = None
    description: dict[str, Any] = field(default_factory=dict)
    configurations: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    is_writer: bool = True
    _partial: Partial | None = None

    @classmethod
    def open(cls, path: Path | None, *, restart: bool = False, processes: Processes | None = None) -> Results:
        """Results that are written to ``path``, with the rows it already holds unless ``restart``.

        Args:
            path: a JSON file, which need not exist; None writes nothing.
            restart: discard the rows in the file.
            processes: the first one reads and writes; the others receive the rows from it.

        Raises:
            FileFormatError: the file is not a comparison.
        """
        processes = processes or Processes()
        results = cls(path)
        if path is not None and path.exists() and not restart and processes.is_first:
            results._read(path)
        return replace(processes.gather([results])[0], is_writer=processes.is_first)

    def _read(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                document = json.loads(file.read())  # a metric can be NaN
            if document["schema"] != SCHEMA:
                raise FileFormatError(f"{path}: schema must be {SCHEMA}, got {document['schema']!r}")
            rows = [Row.from_json(row) for row in document["rows"]]
            partial = document.get("partial")
            self._partial = None if partial is None else Partial(**partial)
            self.description, self.configurations = document["description"], document["configurations"]
        except FileFormatError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise FileFormatError(f"{path} is not a file of a comparison: {error!r}") from error
        self.rows = {row.configuration: row for row in rows}

    def begin(self, description: dict[str, Any], configurations: dict[str, Any]) -> None:
        """Set what is measured; keeps the rows and counts of configurations that have not changed.

        Raises:
            QFrameworkError: there are rows that were measured under another description.
        """
        description = json.loads(json.dumps(description))
        configurations = json.loads(json.dumps(configurations))
        if self.rows or self._partial:
            self._check_same(description)
        kept = [name for name in self.rows if self.configurations.get(name) == configurations.get(name)]
        partial = self._partial
        if partial and self.configurations.get(partial.configuration) != configurations.get(partial.configuration):
            self._partial = None
        # Rows of other configurations stay: a file may be filled by several calls.
        others = {name: value for name, value in self.configurations.items() if name not in configurations}
        self.rows = {name: row for name, row in self.rows.items() if name in kept or name in others}
        self.description, self.configurations = description, {**configurations, **others}

    def _check_same(self, description: Mapping[str, Any]) -> None:
        keys = sorted({*description, *self.description})
        apart = [key for key in keys if description.get(key) != self.description.get(key)]
        if apart:
            before = self.description
            differences = "; ".join(f"{key} {before.get(key)!r}, now {description.get(key)!r}" for key in apart)
            raise QFrameworkError(
                f"{self.path} holds another comparison ({differences}). Choose another file, or restart"
            )

    def partial(self, configuration: str, counted: Sequence[str]) -> Partial:
        """The counts of a configuration so far: those of an interrupted run, or zeros."""
        if self._partial is not None and self._partial.configuration == configuration:
            return self._partial
        return Partial(configuration, 0, dict.fromkeys(counted, 0), [])

    def keep(self, partial: Partial) -> None:
        """Write the counts so far."""
        self._partial = partial
        self._write()

    def add(self, row: Row) -> None:
        """Append a row and write."""
        self.rows[row.configuration] = row
        self._partial = None
        self._write()

    def _write(self) -> None:
        if self.path is None or not self.is_writer:
            return
        write_text(self.path, json.dumps(self.to_json(), indent=2) + "\n")

    @property
    def ordered(self) -> list[Row]:
        """The rows in the order of the configurations."""
        return [self.rows[name] for name in self.configurations if name in self.rows]

    def to_json(self) -> dict[str, Any]:
        """The whole file; equal measurements differ only in the ``timing`` of each row."""
        document = {
            "schema": SCHEMA,
            "description": self.description,
            "configurations": self.configurations,
            "rows": [row.to_json() for row in self.ordered],
        }
        return document if self._partial is None else {**document, "partial": asdict(self._partial)}

    def table(self) -> Table:
        """The rows as a table for the terminal."""
        table = Table(title=self._title(), caption="\n".join(self._notes()), caption_justify="left")
        first, *others = self._header()
        table.add_column(first, no_wrap=True)
        for name in others:
            table.add_column(name, justify="right")
        for row in self.ordered:
            table.add_row(*self._cells(row))
        return table

    def markdown(self) -> str:
        """The rows as a Markdown page."""
        header = self._header()
        lines = [f"# {self._title()}", "", _line(header), _line([":---", *["---:"] * (len(header) - 1)])]
        lines += [_line(self._cells(row)) for row in self.ordered]
        return "\n".join([*lines, "", *(f"{note}  " for note in self._notes())]) + "\n"

    def _title(self) -> str:
        return f"{self.description.get('model', 'model')}, {self.description.get('task', 'task')}"

    def _header(self) -> list[str]:
        figures = [_NAMES.get(name, name) for name in self.ordered[0].figures] if self.rows else []
        return ["configuration", *figures, "images/s", "weights MiB", "peak MiB", "INT8 linears", "attentions"]

    def _cells(self, row: Row) -> list[str]:
        return [
            row.configuration,
            *(f"{figure:.2f}" for figure in row.figures.values()),
            f"{row.images_per_second:,.1f}",
            f"{row.weight_bytes / _MIB:,.1f}",
            f"{row.peak_bytes / _MIB:,.1f}",
            f"{row.lowered_linears}/{row.linears}",
            str(row.lowered_attentions),
        ]

    def _notes(self) -> list[str]:
        """How the rows were measured, and what was skipped."""
        data, processes = self.description.get("data") or {}, sorted({row.processes for row in self.ordered})
        where = f"{self.description.get('device')}, {self.description.get('dtype')}, {data.get('images')} images"
        how = "compiled" if self.description.get("compiled") else "eager: INT8 is simulated in float"
        number = " or ".join(map(str, processes))
        notes = [f"{where}, {number} process{'' if processes == [1] else 'es'}, {how}."]
        return notes + self._skipped()

    def _skipped(self) -> list[str]:
        damaged = {tuple(image) for row in self.ordered for image in row.damaged}
        notes = []
        if damaged:
            some = "; ".join(f"{path} ({reason})" for path, reason in sorted(damaged)[:5])
            notes.append(f"{len(damaged)} damaged images skipped: {some}{'; ...' if len(damaged) > 5 else '.'}")
        empty = max((row.counts.get("masks_without_pixels", 0) for row in self.ordered), default=0)
        if empty:
            notes.append(f"{empty} empty annotated masks skipped.")
        nan = {row.configuration: row.counts.get("nan", 0) for row in self.ordered}
        notes += [
            f"{name}: NaN in the logits of {count} images, counted as wrong." for name, count in nan.items() if count
        ]
        return notes


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
