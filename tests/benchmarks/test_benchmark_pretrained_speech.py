"""Whisper for the benchmark on models that others trained: the file of weights, sentences, recordings, word errors."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import pretrained, pretrained_speech, report_pretrained
from benchmarks.pretrained_tasks import speech_figures, word_error_rate
from qframework.errors import FileFormatError, QFrameworkError


def installed() -> None:
    """Skip without the package of weights or the synthesizer."""
    try:
        pretrained_speech.whisper_folder()
        pretrained_speech.spoken(["One."])
    except QFrameworkError as error:
        pytest.skip(str(error))


# Words


def test_word_errors_are_substituted_missing_and_inserted_words() -> None:
    said = [["a", "b", "c", "d"], ["e"]]
    assert word_error_rate(said, said) == 0
    assert word_error_rate(said, [["a", "x", "c", "d"], ["e"]]) == pytest.approx(1 / 5)
    assert word_error_rate(said, [["b", "c", "d"], ["e", "e"]]) == pytest.approx(2 / 5)
    assert word_error_rate(said, [[], []]) == 1
    assert word_error_rate([["a"]], [["b", "c", "d"]]) == 3, "insertions count too"


def test_figures_of_states_and_words() -> None:
    expected = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    figures = speech_figures(expected, 1.1 * expected, [["a", "b"]], [["a", "c"]], [["a", "c"]])
    assert figures["sqnr_db"] == pytest.approx(20.0, abs=1e-3)
    assert figures["cosine"] == pytest.approx(1.0)
    assert (figures["word_errors"], figures["changed_words"]) == (50.0, 0.0)


def test_words_have_no_case_and_no_punctuation() -> None:
    assert pretrained_speech.words(" Don't close, the File.") == ["don't", "close", "the", "file"]


def test_sentences_are_the_same_for_a_seed_and_different() -> None:
    first, again, other = (pretrained_speech.sentences(40, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(set(first)) == 40
    assert all(12 <= len(pretrained_speech.words(text)) <= 30 for text in first)
    with pytest.raises(QFrameworkError, match="--recordings must be at most"):
        pretrained_speech.sentences(10**6, 0)


# The file of weights


def ctranslate2_file(path: Path, arrays: dict[str, np.ndarray], name: str = "WhisperSpec", version: int = 6) -> Path:
    kinds = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    content = struct.pack("<I", version) + text(name) + struct.pack("<II", 3, len(arrays))
    for key, each in arrays.items():
        content += text(key) + struct.pack(f"<B{each.ndim}I", each.ndim, *each.shape)
        content += struct.pack("<BI", kinds[str(each.dtype)], each.nbytes) + each.tobytes()
    path.write_bytes(content + struct.pack("<I", 0))
    return path


def test_arrays_of_a_file_are_read_with_names_shapes_and_dtypes(tmp_path: Path) -> None:
    arrays = {
        "encoder/num_heads": np.array(6, np.int16),
        "encoder/conv1/weight": np.arange(24, dtype=np.float16).reshape(2, 4, 3),
        "decoder/alignment_heads": np.array([1], np.int16),
    }
    found = pretrained_speech.ctranslate2_arrays(ctranslate2_file(tmp_path / "model.bin", arrays))
    assert list(found) == list(arrays)
    for name, expected in arrays.items():
        assert found[name].dtype == expected.dtype
        assert np.array_equal(found[name], expected)


@pytest.mark.parametrize(
    ("other", "seen"), [({"name": "TransformerSpec"}, "'TransformerSpec'"), ({"version": 5}, "got format 5")]
)
def test_files_of_other_models_and_versions_are_refused(tmp_path: Path, other: dict[str, Any], seen: str) -> None:
    path = ctranslate2_file(tmp_path / "model.bin", {}, **other)
    with pytest.raises(FileFormatError, match=seen):
        pretrained_speech.ctranslate2_arrays(path)


def random_arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)

    def linear(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
        return {f"{name}/weight": draw.normal(size=(rows, columns)), f"{name}/bias": draw.normal(size=rows)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}/gamma": draw.normal(size=384), f"{name}/beta": draw.normal(size=384)}

    arrays = {"encoder/conv1/weight": draw.normal(size=(384, 80, 3)), "encoder/conv1/bias": draw.normal(size=384)}
    arrays |= {"encoder/conv2/weight": draw.normal(size=(384, 384, 3)), "encoder/conv2/bias": draw.normal(size=384)}
    arrays |= {"encoder/num_heads": np.array(6), "decoder/embeddings/weight": draw.normal(size=(51864, 384))}
    for side, positions in (("encoder", 1500), ("decoder", 448)):
        arrays[f"{side}/position_encodings/encodings"] = draw.normal(size=(positions, 384))
        arrays |= norm(f"{side}/layer_norm")
        for layer in range(4):
            start = f"{side}/layer_{layer}"
            arrays |= linear(f"{start}/self_attention/linear_0", 1152, 384)
            arrays |= linear(f"{start}/self_attention/linear_1", 384, 384) | norm(f"{start}/self_attention/layer_norm")
            arrays |= linear(f"{start}/ffn/linear_0", 1536, 384) | linear(f"{start}/ffn/linear_1", 384, 1536)
            arrays |= norm(f"{start}/ffn/layer_norm")
            if side == "decoder":
                for index, rows in enumerate((384, 768, 384)):
                    arrays |= linear(f"{start}/attention/linear_{index}", rows, 384)
                arrays |= norm(f"{start}/attention/layer_norm")
    return arrays


def test_weights_are_mapped_to_the_names_and_shapes_of_transformers() -> None:
    from transformers import WhisperForConditionalGeneration

    with torch.device("meta"):
        model = WhisperForConditionalGeneration(pretrained_speech.whisper_config())
    arrays = random_arrays()
    state = pretrained_speech.whisper_weights(arrays)
    assert {name: each.shape for name, each in state.items()} == {n: p.shape for n, p in model.state_dict().items()}
    joined = arrays["decoder/layer_2/attention/linear_1/weight"].astype(np.float32)
    assert np.array_equal(state["model.decoder.layers.2.encoder_attn.v_proj.weight"], joined[384:])


# The packages


def test_the_message_without_the_synthesizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained_speech, "shutil", SimpleNamespace(which=lambda name: None))
    with pytest.raises(QFrameworkError, match=r"espeak-ng must be installed .* or pass --smoke"):
        pretrained_speech.spoken(["One."])


def test_whisper_hears_most_words_of_a_recording() -> None:
    """A wrong mapping of the weights hears none."""
    installed()
    texts = ["The first argument is the name of the file, and the second is the number of lines in it."]
    features = pretrained_speech.spoken(texts)
    assert features.shape == (1, 80, 3000)
    assert torch.equal(features, pretrained_speech.spoken(texts))
    model = pretrained_speech.whisper()
    with torch.no_grad():
        states = pretrained_speech.Encoder(model.model.encoder)(features)
    heard = pretrained_speech.transcripts(model, states)
    assert word_error_rate([pretrained_speech.words(text) for text in texts], heard) < 0.5


def test_other_recordings_calibrate() -> None:
    evaluated = pretrained_speech.sentences(64, pretrained.EVALUATION_SEED)
    drawn = pretrained._others(pretrained_speech.sentences(96, 0), evaluated)
    assert len(drawn) >= 32
    assert not set(drawn) & set(evaluated)


# The page


@pytest.mark.parametrize(
    ("more", "outcome"), [(0.5, "0.5 | 1 | PASS"), (2.0, "2.0 | 1 | FAIL"), (-3.0, "-3.0 | 1 | PASS")]
)
def test_word_errors_must_not_rise(tmp_path: Path, more: float, outcome: str) -> None:
    rows = pretrained.Rows(tmp_path / "run.json", False, {"recordings": 8, "calibration": 4})
    rows.machine = {"device": "Chip 9000", "commit": "abc123", "date": "2026-01-02T03:04:05+00:00"}
    rows.add(pretrained.Row("whisper", "FP32", 0, {"word_errors": 20.0}, 0.0, {}))
    figures = {"sqnr_db": 30.0, "word_errors": 20.0 + more, "changed_words": 3.0}
    rows.add(pretrained.Row("whisper", "INT8-D (best recipe)", 0, figures, 1.0, {"fc1": 30.0}))
    page = report_pretrained.render(report_pretrained.load(tmp_path))
    assert f"| word errors, % | at most 1 above FP32 | {outcome} |" in page
    assert "| FP32 |  | 20.0 |  |" in page
    assert "`espeak-ng` speaks 8 sentences" in page
