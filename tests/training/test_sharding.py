"""FSDP2 gathers weights in INT8: the results of gathering floats, in two processes (sharding.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import BLOCK_SIZES, CanonicalSize, block_size_name, is_square
from qframework.training import conversion_report, convert_to_int8_training, fallbacks, gather_in_int8
from qframework.training.sharding import ShardedWeight

PROCESSES, TOKENS, VOCABULARY, STEPS = 2, 32, 64, 4
SAMPLE: tuple[CanonicalSize, ...] = (32, (1, 128))


def gpt() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=None, eos_token_id=None))


def llama() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "llama": llama}


# In two processes


def built(name: str, block_size: CanonicalSize, gather: bool, compiled: bool = False, **options: Any) -> nn.Module:
    """Converted, and sharded block by block."""
    torch.manual_seed(0)
    model = convert_to_int8_training(MODELS[name](), block_size, skip_slower=False)
    model = gather_in_int8(model) if gather else model
    for block in conversion_report(model).blocks:
        if compiled:
            model.get_submodule(block).compile(backend="aot_eager")
        fully_shard(model.get_submodule(block), **options)
    return fully_shard(model, **options)


def loss_of(model: Any) -> torch.Tensor:
    x = torch.randint(0, VOCABULARY, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    x = x.chunk(PROCESSES)[distributed.get_rank()]
    return F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def losses(model: nn.Module, optimizer: Any = torch.optim.AdamW) -> list[float]:
    update, found = optimizer(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        found.append(loss.item())
    return found


def gathered_in_int8(model: nn.Module) -> int:
    return sum(isinstance(parameter._local_tensor, ShardedWeight) for parameter in model.parameters())


def both(name: str, block_size: CanonicalSize, optimizer: Any = torch.optim.AdamW, **options: Any) -> list[list[float]]:
    """The losses with floats gathered, and with INT8."""
    return [losses(built(name, block_size, gather, **options), optimizer) for gather in (False, True)]


def checkpointed() -> list[list[float]]:
    """Blocks are gathered again for the recomputed forward pass; under a policy of FSDP2."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [built("gpt", 32, True, mp_policy=policy) for _ in range(2)]
    models[1].gradient_checkpointing_enable()
    assert all(parameter.dtype == torch.float32 for parameter in models[1].parameters())
    return [losses(model) for model in models]


def state() -> list[bool]:
    """What is saved is the float model, and a step sees what is loaded."""
    torch.manual_seed(0)
    expected = gpt().state_dict()
    model, options = built("gpt", (1, 128), True), StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=options)
    facts = [list(saved) == list(expected), all(torch.equal(saved[name], value) for name, value in expected.items())]
    before = loss_of(model)
    before.backward()  # the model's own parameters are whole until then
    halved = {name: value / 2 for name, value in expected.items()}
    set_model_state_dict(model, dict(halved), options=options)  # it changes the dictionary
    again = get_model_state_dict(model, options=options)
    return [
        *facts,
        abs(loss_of(model).item() - before.item()) > 1e-3,
        all(torch.equal(again[name], value) for name, value in halved.items()),
    ]


def wrong_number() -> str:
    """Of processes, here half a block for each."""
    model = gather_in_int8(convert_to_int8_training(gpt(), 128, skip_slower=False), 3)
    model = gather_in_int8(model, processes=1)
    assert not any(isinstance(parameter, ShardedWeight) for parameter in model.parameters())
    torch.distributed.barrier()
    linear = convert_to_int8_training(llama(), 128, skip_slower=False).model.layers[0].mlp.down_proj
    linear.weight = nn.Parameter(ShardedWeight(linear.weight.detach(), 128))
    try:
        fully_shard(linear)(torch.randn(2, 256))
    except QFrameworkError as error:
        return str(error)
    return ""


def spread() -> list[int]:
    """Linears that know of parts of their weight: each process holds a half; each the whole."""
    mesh = init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("replicas", "parts"))
    whole = fully_shard(convert_to_int8_training(gpt(), skip_slower=False), mesh=mesh)
    models = built("gpt", (1, 128), False), whole
    return [sum(getattr(module, "weight_is_spread", False) for module in model.modules()) for model in models]


def sample() -> dict[str, Any]:
    """What the shorter tests look at, in one start of two processes."""
    found: dict[str, Any] = {f"gpt {block_size_name(size)}": both("gpt", size) for size in SAMPLE}
    with torch.compiler.set_stance("force_eager"):  # torchao compiles the update of each shape
        from torchao.optim import AdamW8bit

        found["eight bit"] = both("gpt", 32, AdamW8bit)
    found |= {"checkpointed": checkpointed(), "state": state(), "error": wrong_number(), "fallbacks": dict(fallbacks)}
    found["spread"] = spread()
    return found | {"gpt count": gathered_in_int8(built("gpt", (1, 128), True))}


def rest() -> dict[str, Any]:
    """The other models and block sizes, and compiled blocks."""
    found: dict[str, Any] = {}
    for name in MODELS:
        for size in BLOCK_SIZES:
            found[f"{name} {block_size_name(size)}"] = both(name, size)
        found[f"{name} count"] = gathered_in_int8(built(name, (1, 128), True))
        found[f"{name} compiled"] = both(name, 32, compiled=True)
    return found | {"fallbacks": dict(fallbacks)}


SCRIPT = """
import json, os, sys
from pathlib import Path
from torch import distributed
from test_sharding import rest, sample

distributed.init_process_group("gloo")
everyones = [None, None]
distributed.all_gather_object(everyones, {"rest": rest, "sample": sample}[sys.argv[1]]())
if distributed.get_rank() == 0:
    Path(sys.argv[2]).write_text(json.dumps(everyones))
distributed.barrier()
os._exit(0)  # past the end of the interpreter, where C++ threads of PyTorch sometimes call terminate
"""


# What came back


Found = list[dict[str, Any]]
"""From each process."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("sample", tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("rest", tmp_path_factory.mktemp("rest"))


def run(what: str, folder: Path) -> Found:
    script, output = folder / "script.py", folder / "found.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script), what, str(output)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", SAMPLE)
def test_losses_are_those_of_gathered_floats(block_size: CanonicalSize, found: Found) -> None:
    check_losses(found, "gpt", 8, block_size)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("name", "linears"), [("gpt", 8), ("llama", 14)])
def test_losses_of_all_block_sizes(name: str, linears: int, block_size: CanonicalSize, all_found: Found) -> None:
    check_losses(all_found, name, linears, block_size)


def check_losses(found: Found, name: str, linears: int, block_size: CanonicalSize) -> None:
    """Equal bit for bit in square blocks; in others the transposed weight is rounded twice."""
    for mine in found:
        floats, blocks = mine[f"{name} {block_size_name(block_size)}"]
        assert blocks == pytest.approx(floats, rel=3e-3)
        assert (blocks == floats) == is_square(block_size)
        assert blocks[-1] < 0.95 * blocks[0]
        assert mine[f"{name} count"] == linears
        assert mine["fallbacks"] == {}


@pytest.mark.slow
def test_layers_know_whether_processes_hold_parts_of_their_weights(found: Found) -> None:
    """So that they keep no transpose of the whole between the passes, unless they are told to."""
    assert [mine["spread"] for mine in found] == [[8, 0]] * PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("what", ["eight bit", "checkpointed"])
def test_with_the_rest_of_pytorch(what: str, found: Found) -> None:
    """torchao's AdamW8bit; a policy of precisions with gradient checkpointing."""
    check_equal(found, what)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("what", ["gpt compiled", "llama compiled"])
def test_compiled_block_by_block(what: str, all_found: Found) -> None:
    check_equal(all_found, what)


def check_equal(found: Found, what: str) -> None:
    for mine in found:
        expected, blocks = mine[what]
        assert blocks == expected
        assert blocks[-1] < 0.95 * blocks[0]


@pytest.mark.slow
def test_what_processes_hold_and_save_stays_float(found: Found) -> None:
    assert [mine["state"] for mine in found] == [[True] * 4] * PROCESSES


@pytest.mark.slow
def test_another_number_of_processes_is_an_error(found: Found) -> None:
    for mine in found:
        assert (
            "processes must be the number that fully_shard divides weights over, got a weight of 64 r" in mine["error"]
        )


# In this process


def test_weights_that_do_not_divide_are_gathered_in_floats() -> None:
    """And those that another module holds as well, since each would be gathered on its own."""
    model: Any = convert_to_int8_training(gpt(), 128, skip_slower=False)
    block = model.transformer.h[0]
    block.mlp.other = nn.Module()
    block.mlp.other.weight = block.mlp.c_proj.weight
    gather_in_int8(model, processes=2)
    found = [name for name, weight in model.named_parameters() if isinstance(weight, ShardedWeight)]
    assert found == ["transformer.h.1.mlp.c_proj.weight"]  # 512 rows; others have 128
    assert block.mlp.c_proj.weight is block.mlp.other.weight


def test_errors() -> None:
    with pytest.raises(QFrameworkError, match=r"INT8 linears of mode 'per_block', got none\. Call convert_to_int8"):
        gather_in_int8(gpt(), processes=2)
    model = convert_to_int8_training(gpt(), skip_slower=False)
    with pytest.raises(QFrameworkError, match=r"processes must be given, or torch\.distributed initialized, got nei"):
        gather_in_int8(model)


@pytest.mark.parametrize("processes", [1, 2])
def test_no_cached_graph_of_plain_shards_is_called(processes: int) -> None:
    """A DTensor's key in AOTAutograd's cache does not tell a ShardedWeight from a tensor, from torch 2.14 on."""
    with torch._functorch.config.patch(enable_autograd_cache=True):
        gather_in_int8(convert_to_int8_training(gpt(), skip_slower=False), processes)
        confused = processes > 1 and hasattr(DTensor, "_stable_hash_for_caching")
        assert torch._functorch.config.enable_autograd_cache is not confused
