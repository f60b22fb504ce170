"""The targets of INT8 training for target_table.py; those of accuracy are in training_parity.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import training_block, training_models
from benchmarks.block_linear import SHAPES
from benchmarks.block_operators import TOKENS
from benchmarks.block_operators_cases import OPERATORS, provider_of
from benchmarks.target_table import Target
from qframework.kernels.blocks.format import BLOCK_SIZES, BlockSize, block_size_name

HIDDEN = training_block.HIDDEN
PROMISED_AT = 8192  # columns
STEP = "gpt_block_forward_backward"
LINEAR = "linear_training"
# layer_norm_alone and add do the same work as layer_norm and add_statistics, with the row statistics elsewhere.
DIRECTIONS = tuple(
    f"{name} {direction}"
    for name, operator in OPERATORS.items()
    for direction in ("forward", "backward")
    if name not in ("layer_norm_alone", "add") and (direction == "forward" or operator.backward is not None)
)
SMALLER = 1.49


def _operators(what: str, ours: Sequence[BlockSize], against: str, ops: tuple[str, ...], must: float | None) -> Target:
    peers = {"PyTorch FP16": "torch_fp16", "FP16 under Inductor": "inductor_fp16"}
    return Target(
        what=what, against=against, benchmark="block_operators", subjects=(f"{TOKENS},{PROMISED_AT}",), ops=ops,
        ours=tuple(map(provider_of, ours)), peers=(peers[against],), measure="calls_per_ms", must=must,
    )  # fmt: skip


def _operator_targets() -> list[Target]:
    """All operators together for each block size, and each operator with the best block size."""
    what = f"non-linear operators, hidden {PROMISED_AT}"
    return [
        *(
            _operators(f"{what}, blocks of {block_size_name(size)}", (size,), against, DIRECTIONS, must)
            for against, must in (("PyTorch FP16", 1.8), ("FP16 under Inductor", None))
            for size in BLOCK_SIZES
        ),
        *(_operators(f"{op}, hidden {PROMISED_AT}", BLOCK_SIZES, "PyTorch FP16", (op,), 1.8) for op in DIRECTIONS),
    ]


LINEAR_PEERS = {
    "BF16 eager": ("torch_bf16", "torch_bf16_autocast"),
    "BF16 under Inductor": ("inductor_bf16",),
    "torchao INT8": ("torchao_int8",),
    "torchao FP8": ("torchao_fp8",),
}


def linear_in_blocks(size: BlockSize) -> str:
    """The provider of block_linear, forward and backward."""
    return f"qframework_blocks_{block_size_name(size)}"


LINEARS = tuple(map(linear_in_blocks, BLOCK_SIZES))


def subjects_of_linear(hidden: int) -> tuple[str, ...]:
    """The subjects of block_linear's records."""
    return tuple(",".join(map(str, shape)) for shape in SHAPES if shape[2] == hidden)


def _linear_targets() -> list[Target]:
    return [
        Target(
            what=f"linear, forward and backward, hidden {hidden}", against=against, benchmark="block_linear",
            subjects=subjects_of_linear(hidden), ops=(LINEAR,), ours=LINEARS, peers=peers,
        )
        for hidden in HIDDEN for against, peers in LINEAR_PEERS.items()
    ]  # fmt: skip


def subject_of_block(hidden: int) -> str:
    """The subject of training_block's records."""
    return f"{training_block.BATCH},{training_block.TOKENS},{hidden}"


COMPILED = tuple(map(training_block.compiled_in_blocks, BLOCK_SIZES))
BLOCK_PEERS = {
    "BF16 eager": ("bf16_eager",),
    "BF16 compiled": ("bf16_compiled",),
    "BF16 compiled, weights BF16": ("bf16_weights_compiled",),
    "torchao INT8": ("torchao_int8_compiled",),
    "torchao FP8": ("torchao_fp8_compiled",),
}


def _block_targets() -> list[Target]:
    speeds = [
        Target(
            what=f"GPT block, forward and backward, hidden {hidden}", against=against, benchmark="training_block",
            subjects=(subject_of_block(hidden),), ops=(STEP,), ours=COMPILED, peers=peers,
            aim=1.2 if (against, hidden) == ("BF16 compiled", 4096) else None,
        )
        for hidden in HIDDEN for against, peers in BLOCK_PEERS.items()
    ]  # fmt: skip
    graphs = [
        Target(
            what=f"GPT block under CUDA graphs, hidden {hidden}", against="BF16 compiled", benchmark="training_block",
            subjects=(subject_of_block(hidden),), ops=(STEP,), ours=(training_block.GRAPHS,),
            peers=("bf16_compiled_graphs",),
        )
        for hidden in HIDDEN
    ]  # fmt: skip
    memory = [
        Target(
            what=f"GPT block, activation memory, blocks of {block_size_name(size)}", against=against,
            benchmark="training_block", subjects=tuple(map(subject_of_block, HIDDEN)), ops=(STEP,),
            measure="activation_mb", ours=(training_block.compiled_in_blocks(size),), peers=BLOCK_PEERS[against],
            must=round(1 / SMALLER, 3),
        )
        for size in BLOCK_SIZES for against in ("BF16 eager", "BF16 compiled")
    ]  # fmt: skip
    return speeds + graphs + memory


# Models cut to so many blocks, and how much faster than BF16 a step must be. Narrower ones stay in 16 bits by default.
MODELS = {
    ("vit_base", 6): 1.0,
    ("gpt2_medium", 6): 1.0,
    ("vit_large", 6): 1.1,
    ("gpt2_large", 6): 1.0,
    ("gpt2_1536", 6): 1.0,
    ("llama_2048", 3): 1.15,
    ("llama_3072", 3): 1.0,
    ("llama_4096", 2): 1.4,
    ("llama_4096", 8): 1.4,
}
AGAINST_FP8 = ("llama_2048", "llama_4096")
OURS = {"": "qframework", ", blocks of 1x256": "qframework_1x256"}


def _model_targets() -> list[Target]:
    steps = {"step": "", "step_in_graph": ", CUDA graphs"}
    peers = {"BF16 compiled": "bf16", "BF16, masks as the flag": "bf16_qframework", "torchao FP8": "torchao_fp8"}
    return [
        Target(
            what=f"step of {model}, {blocks} blocks{graphs}{size}", against=against, benchmark="training_models",
            subjects=(f"{model}, {blocks} blocks, batch {training_models.MODELS[model].batch}",), ops=(op,),
            ours=(ours,), peers=(peer,), measure="calls_per_ms", must={"bf16": must, "torchao_fp8": 1.0}.get(peer),
        )
        for (model, blocks), must in MODELS.items() for op, graphs in steps.items() for size, ours in OURS.items()
        for against, peer in peers.items() if (peer == "bf16" and not size) or model in AGAINST_FP8
    ]  # fmt: skip


TRAINING_TARGETS: tuple[Target, ...] = (
    *_model_targets(), *_block_targets(), *_linear_targets(), *_operator_targets(),
)  # fmt: skip


def single_size(size: BlockSize) -> list[Target]:
    """The targets of one block size: GPT block, all linears, all operators, activation memory."""
    name = block_size_name(size)
    found = {(target.what, target.against): target for target in TRAINING_TARGETS}
    block = found[f"GPT block, forward and backward, hidden {HIDDEN[-1]}", "BF16 compiled"]
    linear = found[f"linear, forward and backward, hidden {HIDDEN[0]}", "BF16 under Inductor"]
    return [
        replace(block, ours=(training_block.compiled_in_blocks(size),)),
        replace(linear, ours=(linear_in_blocks(size),), subjects=sum(map(subjects_of_linear, HIDDEN), ())),
        found[f"non-linear operators, hidden {PROMISED_AT}, blocks of {name}", "PyTorch FP16"],
        found[f"GPT block, activation memory, blocks of {name}", "BF16 eager"],
    ]
