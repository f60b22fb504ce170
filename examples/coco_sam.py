"""Measure the mean IoU of Segment Anything with box prompts, in float and in INT8: one row per configuration.

    python examples/coco_sam.py facebook/sam-vit-base --images coco/val2017 --annotations coco/instances_val2017.json \\
        --calibration-folder coco/train2017 --calibration-annotations coco/instances_train2017.json
    torchrun --nproc-per-node 4 examples/coco_sam.py sam --device cuda ... --output results/sam_base.json

The model is a folder of ``save_pretrained`` or a name on the Hugging Face hub. Its image encoder is quantized;
``--encoder samvit_base_patch16.sa1b`` replaces it by one of timm's. Results are saved to ``--output`` as they are
measured, so running the same command again resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demos.comparison_script import comparison_parser, run_script
from qframework.errors import QFrameworkError
from qframework.evaluation.coco import AnnotatedImage, read_instances
from qframework.evaluation.sam import Sam, load_sam, load_timm_encoder, sam_image_size
from qframework.evaluation.tasks import BoxSegmentation


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = comparison_parser(__doc__)
    parser.add_argument("model", help="a folder of save_pretrained, or a name on the hub")
    parser.add_argument("--encoder", metavar="NAME", help="one of timm's samvit encoders, to replace the model's own")
    parser.add_argument("--encoder-checkpoint", type=Path, metavar="FILE", help="its weights (default: timm's own)")
    parser.add_argument("--images", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--annotations", type=Path, required=True, metavar="FILE.json", help="COCO instances")
    parser.add_argument("--calibration-folder", type=Path, metavar="FOLDER", help="default: that of --images")
    parser.add_argument(
        "--calibration-annotations", type=Path, metavar="FILE.json", help="the images to calibrate with"
    )
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="a quick check: a few images, two rows, not compiled")
    parser.set_defaults(calibration_images=64)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.limit, options.calibration_images, options.batch_size, options.repeats = 4, 4, 2, 1
        options.configurations, options.eager = "FP32,INT8 + attention", True
    return options


def make_task(options: argparse.Namespace) -> BoxSegmentation:
    """What is measured: the model on the data."""
    images = read_instances(options.annotations, options.limit)
    return BoxSegmentation(
        _sam(options),
        options.images,
        images,
        _calibration(options),
        calibration_root=options.calibration_folder,
        batch_size=options.batch_size,
        workers=options.workers,
    )


def _sam(options: argparse.Namespace) -> Sam:
    name, weights = options.encoder, options.encoder_checkpoint
    if name is None:
        if weights is not None:
            raise QFrameworkError("--encoder-checkpoint must be given with --encoder NAME, got no --encoder")
        return load_sam(options.model)
    encoder = load_timm_encoder(name, sam_image_size(options.model), weights, pretrained=weights is None)
    return load_sam(options.model, encoder, encoder_name=name)


def _calibration(options: argparse.Namespace) -> list[AnnotatedImage] | None:
    if options.calibration_annotations is None:
        return None
    return read_instances(options.calibration_annotations, options.calibration_images)


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, write."""
    return run_script(make_task, parse_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
