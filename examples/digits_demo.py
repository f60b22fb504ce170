"""Train a ViT on handwritten digits, quantize it statically and dynamically, and compare; ``make demo`` runs this.

Quantizes the linear layers, without and with attention.

    python examples/digits_demo.py [--device cuda] [--smoke]

Exit code 1 if INT8 loses more than 0.5 points of top-1 or takes more than 30 percent of the FP32 weight bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from demos.digits_demo import run_demo
from qframework.compat.logs import silence_torchao_at_import
from qframework.devices import device_name
from qframework.evaluation import digits, digits_vit
from qframework.outputs import output_folder


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="A quantized vision transformer on handwritten digits.")
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--build", type=output_folder, default=Path("build"), help="folder for the checkpoint and demo.json"
    )
    parser.add_argument("--smoke", action="store_true", help="a quick check with hardly any training")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, quantize, compare and print the table; returns the exit code."""
    options = parse_arguments(arguments)
    silence_torchao_at_import()
    config = digits_vit.TrainingConfig(epochs=1, depth=1) if options.smoke else digits_vit.QUICK
    name = "digits_vit_smoke" if options.smoke else "digits_vit"
    model = digits_vit.load_or_train(options.build / f"{name}.safetensors", config)
    demo = run_demo(model, digits.load_digits(), device=options.device, repeats=1 if options.smoke else 20)
    demo.write_json(options.build / "demo.json")
    Console().print(demo.table())
    if options.smoke:
        return 0
    for failure in demo.failures():
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if demo.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
