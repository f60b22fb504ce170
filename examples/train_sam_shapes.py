"""Train a small SAM-type model on textured shapes with box prompts, and measure its mean IoU on held-out images.

    python examples/train_sam_shapes.py [--device cuda] [--folder build/shapes]

The model is trained unless the folder already holds it. The folder then contains the model in the format of
``from_pretrained``, and the held-out images as a COCO data set.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from demos.shapes_sam import box_segmentation
from qframework.devices import device_name
from qframework.evaluation.metric import task_figures
from qframework.outputs import output_folder

FOLDER = Path("build", "shapes")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--folder", type=output_folder, default=FOLDER, help=f"where to save model and images (default: {FOLDER})"
    )
    parser.add_argument(
        "--device", type=device_name, default="cpu", help="where to train: cpu, cuda, cuda:1, ... (default: cpu)"
    )
    parser.add_argument("--images", type=int, default=200, help="held-out images to measure on (default: 200)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, print."""
    options = parse_arguments(arguments)
    task = box_segmentation(options.folder, images=options.images, device=options.device)
    figures = task_figures(task, task.module)
    Console().print(f"mean IoU {figures['miou']:.2f} % on {options.images} held-out images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
