"""Accuracy of quantized models whose weights someone else trained: images, texts and speech.

Packages carry the weights (benchmarks/pretrained_models.py, benchmarks/pretrained_speech.py) and the data
(benchmarks/pretrained_data.py); a synthesizer speaks the sentences for Whisper. Each
configuration is calibrated with several seeds, which choose crops or docstrings; the evaluated ones are always the same
and none of them is used for calibration, but crops come from the same 17 photographs. Nothing is timed but the
preparation: converted graphs run in PyTorch on the CPU, with the same integers as the kernels.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from benchmarks import pretrained_models, pretrained_speech
from benchmarks.accuracy_cases import MAIN
from benchmarks.harness import argument_parser, comma_separated
from benchmarks.machine import describe_machine
from benchmarks.pretrained_data import crops, docstrings
from benchmarks.pretrained_tasks import image_figures, speech_figures, text_figures
from qframework.conversion.exported import FloatAndConverted, quantize_copy
from qframework.errors import FileFormatError, QFrameworkError
from qframework.evaluation.comparison import Configuration
from qframework.evaluation.sqnr import layer_sqnr
from qframework.files import write_text
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    Recipe,
    dynamic_int8,
    static_attention,
    static_int8,
)

SCHEMA = 1
EVALUATED = {"dinov2": "crops", "minilm": "texts", "splade": "texts", "whisper": "recordings"}
"""The size that says how much of a model's data is evaluated."""
MODELS = tuple(EVALUATED)
EVALUATION_SEED = 1_000_000
_BATCH = 8
_RECORDINGS = 4  # in a batch: 30 seconds each
_STATIC = QuantizationConfig(static_int8())
_STATIC_ATTENTION = QuantizationConfig(static_int8(), static_attention())
_DYNAMIC = QuantizationConfig(dynamic_int8())
BEST = Recipe.best("cuda")
"""Spends run time by the prices of a GPU, whose speed the targets are about."""
STEPS = {
    "INT8 (best recipe)": Configuration(_STATIC, BEST),
    "INT8, rotation": Configuration(_STATIC, Recipe(rotate=True)),
    "INT8, rotation, zero points": Configuration(_STATIC, Recipe(rotate=True, zero_points=True, guard=True)),
    "INT8 + attention (best recipe, dynamic_share=0)": Configuration(_STATIC_ATTENTION, replace(BEST, dynamic_share=0)),
    "INT8 + attention (best recipe, reach)": Configuration(_STATIC_ATTENTION, replace(BEST, reach=True)),
    "INT8-D (best recipe, Hadamard)": Configuration(_DYNAMIC, replace(BEST, hadamard=True)),
}
"""The best recipe without quantized attention, two steps that cost nothing at run time, and the best recipe with static
scales alone, with scales by the reach of channels, and with Hadamard transforms; measured with one seed."""
CONFIGURATIONS = {
    **{name: MAIN[name] for name in ("INT8", "INT8 + attention", "INT8-D")},
    "INT8 + attention (best recipe)": Configuration(_STATIC_ATTENTION, BEST),
    "INT8-D (best recipe)": Configuration(_DYNAMIC, BEST),
}


@dataclass(frozen=True)
class Row:
    """One configuration of one model with one calibration.

    Attributes:
        figures: see benchmarks/pretrained_tasks.py; of the float model compared with itself for ``"FP32"``.
        seconds: for recipe, calibration and conversion, on the threads and the load that the machine had.
        layers: SQNR in dB of each linear's output unless it is exact, for the first seed.
    """

    model: str
    configuration: str
    seed: int
    figures: dict[str, float]
    seconds: float
    layers: dict[str, float]


class Subject(NamedTuple):
    """A float graph, its calibration batches for a seed, and the figures of a graph."""

    name: str
    exported: fx.GraphModule
    calibration: Callable[[int], list[Any]]
    figures: Callable[[fx.GraphModule], dict[str, float]]
    example: Any


class Rows:
    """The rows of one run; the file is rewritten after each row, and a run resumes what its file holds."""

    def __init__(self, path: Path | None, smoke: bool, sizes: Mapping[str, int]) -> None:
        self.path, self.smoke, self.sizes = path, smoke, dict(sizes)
        self.configurations: dict[str, Any] = {}
        self.machine = describe_machine("cpu")
        self.rows: list[Row] = []
        if path is not None and path.exists() and not smoke:
            self.machine, held, self.rows = load_rows(path)
            self.configurations = json.loads(path.read_text())["configurations"]
            if held != self.sizes:
                raise QFrameworkError(
                    f"benchmarks.pretrained: {path} holds a run with the sizes {held}, got {self.sizes}"
                )

    def holds(self, model: str, configuration: str, seed: int) -> bool:
        """Whether there is such a row."""
        return any((row.model, row.configuration, row.seed) == (model, configuration, seed) for row in self.rows)

    def add(self, row: Row) -> None:
        """Append, print and write."""
        self.rows.append(row)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in row.figures.items())
        print(f"{row.model:7} {row.seed} {row.configuration:42} {figures}  {row.seconds:.0f} s", flush=True)
        if self.path is not None:
            write_text(self.path, json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        head = {"schema": SCHEMA, "benchmark": "pretrained", "smoke": self.smoke, "machine": self.machine}
        rows = [asdict(row) for row in self.rows]
        return {**head, "sizes": self.sizes, "configurations": self.configurations, "rows": rows}


def load_rows(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Row]]:
    """Machine, sizes and rows of a file of ``Rows``; no rows of a smoke run. Raises FileFormatError for other files."""
    try:
        document = json.loads(path.read_text())
        if (document["schema"], document["benchmark"]) != (SCHEMA, "pretrained"):
            raise FileFormatError(
                f"{path}: schema and benchmark must be {SCHEMA} and 'pretrained', got {document['schema']!r} and "
                f"{document['benchmark']!r}"
            )
        rows = [Row(**row) for row in document["rows"]]
        return document["machine"], document["sizes"], [] if document["smoke"] else rows
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise FileFormatError(f"{path} is not a result file of benchmarks.pretrained: {error!r}") from error


# Subjects -------------------------------------------------------------------------------------------------------------


def dinov2_subject(evaluated: int, calibration: int) -> Subject:
    """DINOv2 ViT-S/14 on crops of photographs."""
    model = pretrained_models.dinov2()
    size = pretrained_models.IMAGE_SIZE
    return images_subject("dinov2", model, model.model, evaluated, calibration, size)


def images_subject(
    name: str, model: nn.Module, preprocessed_for: nn.Module, evaluated: int, calibration: int, size: int
) -> Subject:
    """A model from images to tokens."""
    data = crops(evaluated, EVALUATION_SEED, preprocessed_for, size)
    exported = torch.export.export(model, (data.images[:2],), dynamic_shapes=({0: Dim.DYNAMIC},)).module()
    batches = list(data.images.split(_BATCH))
    expected = _outputs(exported, batches)
    return Subject(
        name,
        exported,
        lambda seed: list(crops(calibration, seed, preprocessed_for, size).images.split(_BATCH)),
        lambda graph: image_figures(expected, _outputs(graph, batches), data.photograph),
        batches[0],
    )


def minilm_subject(evaluated: int, calibration: int) -> Subject:
    """all-MiniLM-L6-v2 on docstrings."""
    return docstrings_subject(
        "minilm", pretrained_models.minilm(), pretrained_models.minilm_folder(), evaluated, calibration
    )


def splade_subject(evaluated: int, calibration: int) -> Subject:
    """A small SPLADE model on docstrings."""
    return docstrings_subject(
        "splade", pretrained_models.splade(), pretrained_models.splade_folder(), evaluated, calibration
    )


def docstrings_subject(name: str, model: nn.Module, tokenizer: Path, evaluated: int, calibration: int) -> Subject:
    """A model from docstrings to one vector for each; ``tokenizer`` is the folder of its tokenizer."""
    data = docstrings(evaluated, EVALUATION_SEED)

    def encoded(texts: list[str]) -> list[dict[str, Tensor]]:
        return _batched(pretrained_models.tokenized(texts, tokenizer))

    def calibration_batches(seed: int) -> list[dict[str, Tensor]]:
        return encoded(_others(docstrings(2 * calibration, seed).texts, data.texts)[:calibration])

    return texts_subject(name, model, encoded(data.texts), data.module, calibration_batches)


def _others(drawn: Sequence[str], evaluated: Sequence[str]) -> list[str]:
    """The texts drawn for calibration that are not evaluated."""
    kept = set(evaluated)
    return [text for text in drawn if text not in kept]


def whisper_subject(evaluated: int, calibration: int) -> Subject:
    """Whisper's encoder on spoken sentences; its decoder, in float32, finds the words in the encoder's states."""
    model = pretrained_speech.whisper()
    texts = pretrained_speech.sentences(evaluated, EVALUATION_SEED)

    def calibration_batches(seed: int) -> list[Tensor]:
        drawn = pretrained_speech.sentences(evaluated + calibration, seed)
        return list(pretrained_speech.spoken(_others(drawn, texts)[:calibration]).split(_RECORDINGS))

    return speech_subject(
        "whisper",
        pretrained_speech.Encoder(model.model.encoder).eval(),
        pretrained_speech.spoken(texts),
        [pretrained_speech.words(text) for text in texts],
        lambda states: pretrained_speech.transcripts(model, states),
        calibration_batches,
    )


def speech_subject(
    name: str,
    encoder: nn.Module,
    features: Tensor,
    said: list[list[str]],
    words_in: Callable[[Tensor], list[list[str]]],
    calibration: Callable[[int], list[Tensor]],
) -> Subject:
    """An encoder from features to states; ``words_in`` finds the words in states, ``said`` are those spoken."""
    batches = list(features.split(_RECORDINGS))
    exported = torch.export.export(encoder, (batches[0],), dynamic_shapes=({0: Dim.DYNAMIC},)).module()
    expected = _outputs(exported, batches)
    heard = words_in(expected)

    def figures(graph: fx.GraphModule) -> dict[str, float]:
        states = _outputs(graph, batches)
        return speech_figures(expected, states, said, heard, heard if graph is exported else words_in(states))

    return Subject(name, exported, calibration, figures, batches[0])


def texts_subject(
    name: str,
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    label: Tensor,
    calibration: Callable[[int], list[Any]],
) -> Subject:
    """A model from ids and masks to one vector for each text."""
    shapes = {key: {0: Dim.DYNAMIC} for key in batches[0]}
    example = {key: value[:2] for key, value in batches[0].items()}
    exported = torch.export.export(model, (), example, dynamic_shapes=shapes).module()
    expected = _outputs(exported, batches)
    return Subject(
        name, exported, calibration, lambda graph: text_figures(expected, _outputs(graph, batches), label), batches[0]
    )


def _batched(encoded: dict[str, Tensor], size: int = 2 * _BATCH) -> list[dict[str, Tensor]]:
    parts = zip(*(value.split(size) for value in encoded.values()), strict=True)
    return [dict(zip(encoded, values, strict=True)) for values in parts]


@torch.no_grad()
def _outputs(graph: nn.Module, batches: Sequence[Any]) -> Tensor:
    return torch.cat([graph(**batch) if isinstance(batch, dict) else graph(batch) for batch in batches])


_SUBJECTS = {
    "dinov2": dinov2_subject,
    "minilm": minilm_subject,
    "splade": splade_subject,
    "whisper": whisper_subject,
}


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(subject: Subject, configurations: Mapping[str, Configuration], seeds: Sequence[int], rows: Rows) -> None:
    """A row for each configuration and seed that the file does not hold."""
    if not rows.holds(subject.name, "FP32", 0):
        figures = subject.figures(subject.exported)
        rows.add(Row(subject.name, "FP32", 0, _finite(figures), 0.0, {}))
    for seed in seeds:
        missing = {name: each for name, each in configurations.items() if not rows.holds(subject.name, name, seed)}
        batches = subject.calibration(seed) if missing else []
        for name, configuration in missing.items():
            rows.configurations[name] = configuration.to_dict()
            start = time.perf_counter()
            quantized = _quantized(subject, configuration, batches)
            seconds = time.perf_counter() - start
            quantized.float_exported.graph.eliminate_dead_code()  # as conversion does, or layers would differ
            layers = _finite(layer_sqnr(*quantized, subject.example)) if seed == 0 else {}
            rows.add(Row(subject.name, name, seed, subject.figures(quantized.converted), seconds, layers))


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Without those that JSON cannot hold: the SQNR of what is exact."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _quantized(subject: Subject, configuration: Configuration, batches: list[Any]) -> FloatAndConverted:
    assert configuration.config is not None
    quantizer = QFrameworkQuantizer().set_global(configuration.config)
    data = batches if configuration.needs_calibration else None
    return quantize_copy(subject.exported, quantizer, data, recipe=configuration.recipe)


def smoke_subjects() -> Iterator[Subject]:
    """Tiny models of both families with random weights, which need no package."""
    import timm
    from transformers import BertConfig, BertForMaskedLM, BertModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 28, "embed_dim": 48, "depth": 2, "num_heads": 2, "init_values": 1.0}
    model = timm.create_model(pretrained_models.DINOV2, pretrained=False, **sizes)
    yield images_subject("dinov2", pretrained_models.Features(model).eval(), model, 34, 4, 28)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config._attn_implementation = "sdpa"
    encoder = pretrained_models.Sentences(BertModel(config)).eval()

    def encoded(count: int, seed: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 50, (count, 12), generator=generator)
        return _batched({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    yield texts_subject("minilm", encoder, encoded(16, 9), torch.arange(16) // 2, lambda seed: encoded(16, seed))
    terms = pretrained_models.Terms(BertForMaskedLM(config)).eval()
    yield texts_subject("splade", terms, encoded(16, 9), torch.arange(16) // 2, lambda seed: encoded(16, seed))
    yield _smoke_speech()


def _smoke_speech() -> Subject:
    """A tiny encoder on noise, the words of which are the largest channels of a few states."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "max_source_positions": 20}
    config = WhisperConfig(d_model=32, num_mel_bins=8, **sizes)
    config._attn_implementation = "sdpa"

    def noise(count: int, seed: int) -> Tensor:
        return torch.randn(count, 8, 40, generator=torch.Generator().manual_seed(seed))

    def words_in(states: Tensor) -> list[list[str]]:
        return [[str(int(state.argmax())) for state in states_of_one[::5]] for states_of_one in states]

    encoder = pretrained_speech.Encoder(WhisperEncoder(config)).eval()
    features = noise(8, 9)
    with torch.no_grad():
        said = words_in(encoder(features))
    calibration = lambda seed: list(noise(8, seed).split(_RECORDINGS))  # noqa: E731
    return speech_subject("whisper", encoder, features, said, words_in, calibration)


def check_smoke(rows: Rows) -> None:
    """Raise QFrameworkError unless INT8 kept most of every output, which random weights without outliers allow."""
    for row in rows.rows:
        if row.configuration != "FP32" and not row.figures["sqnr_db"] > 15:
            raise QFrameworkError(
                f"benchmarks.pretrained: the SQNR of {row.model} with {row.configuration!r} must be above 15 dB, got "
                f"{row.figures['sqnr_db']:.1f} dB"
            )


def _chosen(configurations: Mapping[str, Configuration], only: Sequence[str] | None) -> dict[str, Configuration]:
    return {name: each for name, each in configurations.items() if only is None or name in only}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the CPU; returns the exit status."""
    parser = argument_parser("pretrained", __doc__, "document")
    parser.add_argument("--models", type=comma_separated(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=5, help="of the calibration data (default: 5)")
    parser.add_argument("--crops", type=int, default=256, help="evaluated crops (default: 256)")
    parser.add_argument("--texts", type=int, default=512, help="evaluated docstrings (default: 512)")
    parser.add_argument("--recordings", type=int, default=64, help="evaluated recordings (default: 64)")
    parser.add_argument("--calibration", type=int, default=32, help="examples to calibrate with (default: 32)")
    names = (*CONFIGURATIONS, *STEPS)
    parser.add_argument("--only", choices=names, action="append", help="measure this configuration; may be repeated")
    parser.add_argument("--threads", type=int, default=1, help="float sums depend on it (default: 1)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    sizes = {name: getattr(arguments, name) for name in ("crops", "texts", "recordings", "calibration")}
    if arguments.smoke:
        rows = Rows(arguments.output, True, sizes)
        for subject in smoke_subjects():
            measure(subject, CONFIGURATIONS, [0], rows)
        check_smoke(rows)
        return 0
    try:
        rows = Rows(arguments.output, False, sizes)
        for name in arguments.models:
            subject = _SUBJECTS[name](sizes[EVALUATED[name]], arguments.calibration)
            for configurations, seeds in (
                (CONFIGURATIONS, range(1)),
                (STEPS, range(1)),
                (CONFIGURATIONS, range(1, arguments.seeds)),
            ):
                measure(subject, _chosen(configurations, arguments.only), seeds, rows)
    except QFrameworkError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
