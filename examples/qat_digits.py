"""Quantization-aware training: recovers in a few epochs what static INT8 loses on a ViT with outlier channels.

    python examples/qat_digits.py [--device cuda] [--epochs 8] [--smoke]

A ViT trained on handwritten digits gets the outlier channels of large transformers, without a change of its float
outputs. Min-max static INT8 then loses accuracy. A few epochs with fake quantization recover most of it: the model
learns the float model's outputs, with straight-through gradients for the rounding. The converted model has the same
nodes as without training and runs as fast.

Exit code 1 if training recovers less than half of the loss.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e.fake_quantize import disable_observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from qframework import calibrate
from qframework.conversion.exported import export_model
from qframework.devices import device_name
from qframework.evaluation import digits, digits_vit
from qframework.evaluation.accuracy import top1
from qframework.evaluation.outliers import transplant_outliers
from qframework.evaluation.progress import progress_bar
from qframework.outputs import output_folder
from qframework.quantizer import QFrameworkQuantizer, static_int8

BATCH_SIZE = 32
OUTLIERS = 100.0  # how many times as large two channels become
SMOKE = {"embed_dim": 48, "depth": 1, "epochs": 1}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Quantization-aware training of a vision transformer on digits.")
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--build", type=output_folder, default=Path("build"), help="folder for the checkpoint")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of quantization-aware training (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a quick check with hardly any training")
    return parser.parse_args(arguments)


def static_model(model: nn.Module, data: digits.Digits, device: str) -> GraphModule:
    """Min-max static INT8 without any training."""
    images = data.calibration.tensors[0][:2].to(device)
    prepared = prepare_pt2e(export_model(model, images), QFrameworkQuantizer().set_global(static_int8()))
    calibrate(prepared, digits.loader(data.calibration))
    return convert_pt2e(prepared)


def trained_model(model: nn.Module, data: digits.Digits, options: argparse.Namespace) -> GraphModule:
    """The same after quantization-aware training; ``model`` stays as it is."""
    images = data.calibration.tensors[0][:2].to(options.device)
    # an exported program shares its parameters with the model it was made from: train a copy
    exported = export_model(copy.deepcopy(model), images)
    # moving averages follow the activations as they change in training
    quantizer = QFrameworkQuantizer(is_qat=True).set_global(static_int8(observer="moving_average"))
    prepared = prepare_qat_pt2e(exported, quantizer)
    calibrate(prepared, digits.loader(data.calibration))
    fine_tune(prepared, model, data, options)
    prepared.apply(disable_observer)  # keep the ranges that were trained with
    return convert_pt2e(prepared)


def fine_tune(prepared: GraphModule, model: nn.Module, data: digits.Digits, options: argparse.Namespace) -> None:
    """Train in place to match the outputs of ``model`` on shifted images; the learning rate falls to zero."""
    images, _ = data.train.tensors
    batches = -(-len(images) // BATCH_SIZE)
    steps = 2 if options.smoke else options.epochs * batches
    optimizer = torch.optim.AdamW(prepared.parameters(), options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(options.seed)
    order = torch.cat([torch.randperm(len(images)) for _ in range(-(-steps // batches))])
    with progress_bar("Training with fake quantization", steps) as advance:
        for chosen in order.split(BATCH_SIZE)[:steps]:
            batch = digits_vit.shift_by_a_pixel(images[chosen]).to(options.device)
            with torch.no_grad():
                wanted = model(batch).softmax(dim=1)
            loss = F.kl_div(prepared(batch).log_softmax(dim=1), wanted, reduction="batchmean")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            advance()


def run(options: argparse.Namespace) -> dict[str, float]:
    """Top-1 in percent on the held-out digits: in float, static, and static after training."""
    config = replace(digits_vit.sized("small", options.seed), **(SMOKE if options.smoke else {}))
    name = "digits_vit_small_smoke" if options.smoke else f"digits_vit_small_{options.seed}"
    model = digits_vit.load_or_train(options.build / f"{name}.safetensors", config)
    data = digits.load_digits(options.seed)
    example = data.calibration.tensors[0][:2]
    model = transplant_outliers(model, example, channels=2, factor=OUTLIERS, seed=options.seed).to(options.device)
    held_out = digits.loader(data.held_out)
    models = {"FP32": model, "static INT8": static_model(model, data, options.device)}
    models["static INT8, trained"] = trained_model(model, data, options)
    return {name: top1(each, held_out, device=options.device) for name, each in models.items()}


def main(arguments: list[str] | None = None) -> int:
    """Train or load, quantize, fine-tune, compare."""
    options = parse_arguments(arguments)
    # Silences a deprecation warning that torchao 0.18 causes in PyTorch 2.15.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    found = run(options)
    table = Table("", "top-1 %", title="digits ViT with outlier channels")
    for name, accuracy in found.items():
        table.add_row(name, f"{accuracy:.2f}")
    Console().print(table)
    full, lost, trained = found.values()
    return 0 if options.smoke or full - trained <= (full - lost) / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
