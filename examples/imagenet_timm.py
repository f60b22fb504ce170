"""Measure the top-1 accuracy of a timm model on a folder of images, in float and in INT8: one row per configuration.

    python examples/imagenet_timm.py vit_small_patch16_224 --pretrained --data imagenet/val --calibration imagenet/train
    torchrun --nproc-per-node 8 examples/imagenet_timm.py vit_base_patch16_224 --pretrained --device cuda \\
        --data imagenet/val --calibration imagenet/train --output results/vit_base.json

``--data`` holds one folder of images per class, in the order of the model's classes or named after ImageNet's
identifiers (n01440764). Images are resized and normalized as timm defines for the model. Results are saved to
``--output`` as they are measured, so running the same command again resumes an interrupted run. ``digits`` as model and
data needs no files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demos.comparison_script import comparison_parser, read_names, run_script
from qframework.errors import QFrameworkError
from qframework.evaluation.models import DIGITS, check_data_fits, check_model_name, images_for, load_classifier
from qframework.evaluation.tasks import Classification


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = comparison_parser(__doc__)
    parser.add_argument("model", nargs="?", default=DIGITS, help="a timm model, or digits (default)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--pretrained", action="store_true", help="timm's weights, downloaded")
    weights.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights of your own")
    parser.add_argument("--data", default=DIGITS, metavar="FOLDER", help="images to evaluate on")
    parser.add_argument("--calibration", metavar="FOLDER", help="images to calibrate with, of any classes")
    parser.add_argument(
        "--class-names", type=Path, metavar="FILE", help="the class folders' names, a line for each class"
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="a quick check: a few images, two rows, not compiled")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.limit, options.calibration_images, options.batch_size, options.repeats = 64, 64, 32, 1
        options.configurations, options.eager = "FP32,INT8 + attention", True
    return options


def make_task(options: argparse.Namespace) -> Classification:
    """What is measured: the model on the data."""
    check_model_name(options.model)
    if options.model != DIGITS and not (options.pretrained or options.checkpoint):
        raise QFrameworkError(
            f"model {options.model!r} would have random weights. Pass --pretrained or --checkpoint FILE"
        )
    check_data_fits(options.model, options.data)  # before anything is trained or downloaded
    classifier = load_classifier(options.model, options.checkpoint, pretrained=options.pretrained)
    description, size, workers = classifier.describe(), options.batch_size, options.workers
    names = read_names(options.class_names)
    data = images_for(
        description, options.data, batch_size=size, limit=options.limit, class_names=names, workers=workers
    )
    source = DIGITS if options.model == DIGITS else options.calibration
    if source is None:
        return Classification(classifier, data)
    limit = options.calibration_images
    calibration = images_for(description, source, batch_size=size, calibration=True, limit=limit, workers=workers)
    return Classification(classifier, data, calibration)


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, write."""
    return run_script(make_task, parse_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
