"""Steps of a language model with random weights and a long context, by the cache that holds its keys and values."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Record, Results, relative_error
from benchmarks.timing import Timing

STEPS = 12
ROOM = 512  # tokens that a cache of fixed size has behind the context


@dataclass(frozen=True)
class Model:
    """A Llama of this size, and its context."""

    name: str
    batch: int
    context: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int

    def build(self, device: str) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        from qframework.attention.transformers import register

        register()
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context + ROOM,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(config).to(torch.float16 if device == "cuda" else torch.float32).eval()
        for parameter in model.parameters():  # initialised to 0.02, attention would hardly matter
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.7 / parameter.shape[-1] ** 0.5)
        return model


LLAMA_1B = (
    Model("llama-1b 16k", 1, 16384, 16, 2048, 32, 8, 8192, 32000),
    Model("llama-1b 16k", 8, 16384, 16, 2048, 32, 8, 8192, 32000),
)
SMOKE = (Model("llama-tiny", 2, 60, 2, 64, 4, 2, 96, 99),)


def _int8(model: Any, context: int) -> Any:
    from qframework.attention.kv_cache import Int8Cache

    return Int8Cache(model.config, max_length=context + ROOM)


def _dynamic(model: Any, context: int) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _static(model: Any, context: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=context + ROOM)


CACHES: dict[str, tuple[str, Callable[[Any, int], Any]]] = {  # implementation of attention, cache
    "dynamic_fp16": ("sdpa", _dynamic),
    "qframework_int8": ("qframework", _int8),
    "static_fp16": ("sdpa", _static),
}


def cache_bytes(cache: Any) -> int:
    """Memory of keys, values and scales."""
    own = getattr(cache, "bytes", None)
    if own is not None:
        return int(own)
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


class Run:
    """A model with a cache that holds the context."""

    def __init__(self, shape: Model, model: Any, provider: str, device: str) -> None:
        implementation, make = CACHES[provider]
        model.set_attn_implementation(implementation)
        self.model, self.device = model, device
        generator = torch.Generator(device).manual_seed(1)
        size = (shape.batch, shape.context + 1)
        tokens = torch.randint(shape.vocabulary, size, generator=generator, device=device)
        self.token = tokens[:, -1:]
        self.cache = make(model, shape.context)
        for part in tokens[:, :-1].split(1 if shape.context < 4 else shape.context, 1):
            model(part, past_key_values=self.cache, logits_to_keep=1)

    def step(self) -> Tensor:
        logits: Tensor = self.model(self.token, past_key_values=self.cache).logits
        return logits

    def eager(self) -> Timing:
        return Timing(tuple(_seconds(self.step, self.device) * 1e3 for _ in range(STEPS)))

    def graph(self) -> Timing:
        """The same step in a CUDA graph; an INT8 or static cache grows with each replay, a dynamic one does not."""
        if self.device != "cuda":
            return self.eager()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self.step()
        return Timing(tuple(_seconds(graph.replay, self.device) * 1e3 for _ in range(2 * STEPS)))


def _seconds(fn: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def run_models(results: Results, device: str, small: bool, limit: float) -> None:
    """Two records for each model and cache: a step in transformers' loop, and in a CUDA graph."""
    begun = time.monotonic()
    for shape in SMOKE if small else LLAMA_1B:
        model = shape.build(device)
        reference: Tensor | None = None
        for provider in CACHES:
            if time.monotonic() - begun > limit:
                print(f"stopped after {limit:g} s")
                return
            identity = Record(benchmark="decode", op="step", model=shape.name, batch=shape.batch, provider=provider)
            try:
                run = Run(shape, model, provider, device)
                logits = run.step().float()
            except Exception as error:  # noqa: BLE001  a failure is a row of the table
                results.add(replace(identity, status="failed", reason=f"{type(error).__name__}: {error}"[:300]))
                continue
            reference = logits if reference is None else reference
            identity = replace(
                identity,
                error=relative_error(logits, reference),
                cache_mb=cache_bytes(run.cache) / 2**20,
                dtype="int8" if provider.endswith("int8") else "float16",
            )
            for op, timed in {"step": run.eager, "step_in_graph": run.graph}.items():
                results.attempt(replace(identity, op=op), functools.partial(_timed, replace(identity, op=op), timed))
            del run
            if device == "cuda":
                torch.cuda.empty_cache()


def _timed(identity: Record, timed: Callable[[], Timing]) -> Record:
    with torch.no_grad():
        return replace(identity, **timed().fields())
