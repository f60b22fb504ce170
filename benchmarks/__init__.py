"""Benchmarks: ``python -m benchmarks.<name> [--smoke] [--output FILE.json]``.

``int8_linear`` (one operator), ``vit_cpu`` and ``vit_gpu`` (whole models) measure; ``report`` turns the files kept in
``benchmarks/results/`` into ``docs/performance.md``. Every provider's result is checked before it is timed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "examples"))  # examples/demos: models, data and training loops
