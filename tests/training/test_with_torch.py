"""compilation.py, and converted models under torch.compile, checkpointing, accumulation, autocast, DDP and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_models import MODELS, inputs, loss_of

from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.kernels.blocks.format import CanonicalSize
from qframework.training import compilation, conversion_report, convert_to_int8_training, fallbacks, restore_float
from qframework.training.dropout import Int8Dropout

each_model = pytest.mark.parametrize("name", MODELS)
CASES: list[tuple[str, CanonicalSize]] = [*((name, 32) for name in MODELS), ("gpt2", (1, 128))]
each_case = pytest.mark.parametrize(("name", "block_size"), CASES)


@pytest.fixture(autouse=True)
def count_from_zero() -> Iterator[None]:
    fallbacks.clear()
    yield
    fallbacks.clear()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The relative error of all gradients as one vector."""
    difference = sum(float((first[name] - second[name]).square().sum()) for name in first)
    return (difference / sum(float(grad.square().sum()) for grad in second.values())) ** 0.5


class CausalMask(nn.Module):
    """Llama with the mask that compiled models of transformers build for themselves in some versions."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = MODELS["llama"]()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places <= places[:, None]).expand(x.shape[0], 1, -1, -1)
        return self.llama(x, attention_mask=mask).logits


@pytest.mark.parametrize("converted", [False, True])
def test_causal_masks_become_the_flag_in_training(converted: bool, fresh_dynamo: None) -> None:
    """Between the mask and its attention are a scope of autocast and, if converted, functions of BlockTensors."""
    model, x = CausalMask(), inputs("llama")
    if converted:
        convert_to_int8_training(model)
    calls: list[tuple[object, object]] = []

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        lower(gm, example_inputs, BackendOptions())
        nodes = gm.graph.find_nodes(op="call_function", target=scaled_dot_product_attention)
        calls.extend((node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in nodes)
        return gm

    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        found = torch.compile(model, fullgraph=True, backend=backend)(x)
    assert calls == [(None, True)] * len(model.llama.model.layers)
    assert found.requires_grad
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@each_case
def test_compiled_without_graph_breaks(name: str, block_size: CanonicalSize, fresh_dynamo: None) -> None:
    """Another order of float sums may change a value by an INT8 step, 1 / 127 of the block's largest value."""
    model, x = convert_to_int8_training(MODELS[name](), block_size).eval(), inputs(name)
    loss = loss_of(model, x)
    loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    again = loss_of(compiled, x)
    again.backward()
    assert again.item() == pytest.approx(loss.item(), rel=1e-3)
    assert distance(gradients(model), wanted) < 0.02
    assert fallbacks == {}


@pytest.mark.slow
@pytest.mark.sample(4 / 7)
@pytest.mark.parametrize(
    ("name", "block_size", "training"),
    [*((name, 32, training) for name in MODELS for training in (True, False)), ("gpt2", (1, 128), True)],
)
def test_compiled_by_inductor_under_autocast(
    name: str, block_size: CanonicalSize, training: bool, fresh_dynamo: None
) -> None:
    model, x = convert_to_int8_training(MODELS[name](), block_size).train(training), inputs(name)
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, loss = loss_of(model, x), loss_of(compiled, x)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=0.1 if training else 1e-2)  # dropout draws anew
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert fallbacks == {}


def test_inductor_knows_the_operators_of_pytorch_before_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a compilation there takes hours: test_compiled_by_inductor_under_autocast would not end."""
    from torch._inductor.lowering import lowerings

    monkeypatch.setattr(compilation, "_FIXED", (9999, 0))
    compilation.register_fallbacks.__wrapped__()
    for name in ("block_quantize", "block_linear", "block_norm_gradient", "block_sum_rows", "check_finite"):
        assert getattr(torch.ops.qframework, name).default in lowerings, name
    compilation.register_fallbacks.__wrapped__()  # once more


def checkpointed(name: str, model: nn.Module) -> None:
    """Enable the model's own checkpointing."""
    if name == "vit":
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable()


@each_case
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointing_gives_the_same_gradients(name: str, block_size: CanonicalSize) -> None:
    """Bit for bit, dropout and stochastic depth included."""
    dropout = {
        "vit": {"proj_drop_rate": 0.2, "drop_path_rate": 0.3},
        "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {},
    }
    model, x = convert_to_int8_training(MODELS[name](**dropout[name]), block_size).train(), inputs(name, batch=4)
    torch.manual_seed(5)
    loss = loss_of(model, x)
    loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    checkpointed(name, model)
    torch.manual_seed(5)
    again = loss_of(model, x)
    again.backward()
    assert again.item() == loss.item()
    assert distance(gradients(model), wanted) == 0
    assert fallbacks == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_any_part(reentrant: bool) -> None:
    """With BlockTensors as input and output."""
    model, x = convert_to_int8_training(MODELS["vit"]()).train(), inputs("vit")
    loss_of(model, x).backward()
    wanted = gradients(model)
    model.zero_grad()
    plain = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda x: checkpoint(plain, x, use_reentrant=reentrant)
    loss_of(model, x).backward()
    assert distance(gradients(model), wanted) == 0


@each_case
def test_accumulated_gradients_are_the_sum(name: str, block_size: CanonicalSize) -> None:
    """The sum of the gradients of separately quantized micro-batches, bit for bit."""
    model = convert_to_int8_training(MODELS[name](), block_size).eval()
    parts = inputs(name, batch=4).split(2)
    separate = []
    for part in parts:
        loss_of(model, part).backward()
        separate.append(gradients(model))
        model.zero_grad()
    for part in parts:
        loss_of(model, part).backward()
    for key, gradient in gradients(model).items():
        assert torch.equal(gradient, separate[0][key] + separate[1][key]), key


@each_case
def test_autocast_everywhere_else(name: str, block_size: CanonicalSize) -> None:
    """Attention gets the same dtypes as in the float model; the loss differs by BF16's rounding."""
    model, x = MODELS[name]().eval(), inputs(name)
    seen: list[torch.dtype] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, *args: object, **kwargs: object) -> Tensor:
        seen.append(query.dtype)
        return attention(query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        loss_of(model, x)
        in_float, seen[:] = list(seen), []
        loss = loss_of(convert_to_int8_training(model, block_size), x)
    assert seen == in_float
    loss.backward()
    assert loss.item() == pytest.approx(loss_of(model, x).item(), rel=0.02)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert fallbacks == {}


@pytest.mark.parametrize(
    "capture",
    [
        lambda model, images: torch.export.export(model, images),
        lambda model, images: torch.export.export(model, images, strict=True),
        lambda model, images: torch.jit.trace(model, images),
    ],
    ids=["export", "strict export", "trace"],
)
def test_captured_after_restore_float(capture, fresh_dynamo: None) -> None:
    """PyTorch's own errors name neither the conversion nor what to do."""
    model, images = convert_to_int8_training(MODELS["vit"](), skip_slower=False).eval(), (torch.randn(2, 1, 16, 16),)
    with torch.no_grad(), pytest.raises(Exception, match=r"cannot capture a model of convert_to_int8_training\. Call "):
        capture(model, images)
    with torch.no_grad():
        assert capture(restore_float(model), images)


def test_an_existing_optimizer_keeps_working() -> None:
    model, x = MODELS["gpt2"](), inputs("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    convert_to_int8_training(model)
    for module in model.modules():
        if isinstance(module, Int8Dropout | nn.Dropout):
            module.p = 0.0
    losses = []
    for _ in range(8):
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# Several processes

SCRIPT = """
import json, os, sys, torch
from pathlib import Path
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from training_models import MODELS, inputs
from test_with_torch import CASES, steps
from qframework.training import convert_to_int8_training, fallbacks

distributed.init_process_group("gloo")
rank, found = distributed.get_rank(), {}
for name, block_size in CASES:
    for wrap in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model = convert_to_int8_training(MODELS[name](), block_size, skip_slower=False).eval()
        if wrap == "ddp":
            model = DistributedDataParallel(model)
        else:
            for block in [module for module in model.modules() if isinstance(module, (nn.ModuleList,))][:1]:
                for layer in block:
                    fully_shard(layer)
            for layer in getattr(model, "blocks", []):
                fully_shard(layer)
            fully_shard(model)
        losses = torch.tensor(steps(model, inputs(name, batch=8)[4 * rank : 4 * rank + 4]))
        distributed.all_reduce(losses)
        found[f"{name} {block_size} {wrap}"] = (losses / 2).tolist()
assert fallbacks == {}, fallbacks
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
distributed.barrier()
distributed.destroy_process_group()
os._exit(0)  # past the end of the interpreter, where C++ threads of PyTorch sometimes call terminate
"""


def steps(model: nn.Module, x: Tensor) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process in which Dynamo may split graphs until a model is converted."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with torch._dynamo.config.patch(optimize_ddp=True):
        yield
    distributed.destroy_process_group()


def test_only_mode_per_block_disables_the_ddp_optimizer() -> None:
    """The other modes pass floats between linears."""
    with torch._dynamo.config.patch(optimize_ddp=True):
        convert_to_int8_training(MODELS["vit"](), mode="per_token")
        assert torch._dynamo.config.optimize_ddp is True
        convert_to_int8_training(MODELS["vit"]())
        assert torch._dynamo.config.optimize_ddp is False


def in_ddp(name: str, model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model, bucket_cap_mb=0.002), backend="aot_eager")


def in_ddp_block_by_block(name: str, model: nn.Module) -> nn.Module:
    for block in conversion_report(model).blocks:
        model.get_submodule(block).compile(backend="aot_eager")
    return DistributedDataParallel(model, bucket_cap_mb=0.002)


def in_ddp_checkpointed(name: str, model: nn.Module) -> nn.Module:
    checkpointed(name, model)
    return in_ddp(name, model)


def sharded(name: str, model: nn.Module) -> nn.Module:
    for block in conversion_report(model).blocks:
        fully_shard(model.get_submodule(block))
    return torch.compile(fully_shard(model), backend="aot_eager")


def sharded_block_by_block(name: str, model: nn.Module) -> nn.Module:
    for block in conversion_report(model).blocks:
        model.get_submodule(block).compile(backend="aot_eager")
        fully_shard(model.get_submodule(block))
    return fully_shard(model)


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("wrap", [in_ddp, in_ddp_block_by_block, in_ddp_checkpointed, sharded, sharded_block_by_block])
@each_case
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_and_distributed(
    name: str,
    block_size: CanonicalSize,
    wrap: Callable[[str, nn.Module], nn.Module],
    one_process: None,
    fresh_dynamo: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With many buckets Dynamo would split the graph at full ones and pass on the insides of a BlockTensor."""
    monkeypatch.setattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2000)
    model, x = convert_to_int8_training(MODELS[name](), block_size).eval(), inputs(name)
    loss = loss_of(model, x)
    loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    again = loss_of(wrap(name, model), x)
    again.backward()
    found = {key: getattr(gradient, "full_tensor", gradient.clone)() for key, gradient in gradients(model).items()}
    assert again.item() == pytest.approx(loss.item(), rel=1e-3)
    assert distance(found, wanted) < 0.02
    assert fallbacks == {}


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    """Half the rows are other blocks: losses differ by what quantization does to a mean over 8 examples, about 1
    percent as the losses of INT8 and of float do. DDP and FSDP2 compute the same but for the order of sums."""
    script, output = tmp_path / "script.py", tmp_path / "losses.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script), str(output)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(output.read_text())
    for name, block_size in CASES:
        torch.manual_seed(0)
        alone = steps(convert_to_int8_training(MODELS[name](), block_size).eval(), inputs(name, batch=8))
        assert alone[-1] < 0.98 * alone[0]
        ddp, fsdp = (found[f"{name} {block_size} {wrap}"] for wrap in ("ddp", "fsdp"))
        assert ddp == pytest.approx(alone, rel=0.02)
        assert fsdp == pytest.approx(ddp, rel=2e-3)
