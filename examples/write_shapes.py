"""Write a segmentation data set in COCO format: textured shapes over photographs that come with scikit-image.

    python examples/write_shapes.py build/shapes --images 200

writes ``build/shapes/images/000000.png``, ... and ``build/shapes/instances.json``, which pycocotools reads.
"""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from demos.shapes import Split, write_coco
from qframework.outputs import output_folder


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=output_folder)
    parser.add_argument("--images", type=int, default=200, metavar="N")
    parser.add_argument("--split", choices=get_args(Split), default="held_out")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Write the set."""
    options = parse_arguments(arguments)
    write_coco(options.folder, options.images, options.split, size=options.size, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
