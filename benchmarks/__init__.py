"""Benchmarks: ``python -m benchmarks.<name> [--smoke] [--output FILE.json]``.

``int8_linear`` measures one operator, ``vit_cpu`` and ``vit_gpu`` whole models; ``report`` generates
``docs/performance.md`` from the files in ``benchmarks/results/``. Every result is checked before it is timed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "examples"))  # examples/demos: models, data and training loops
