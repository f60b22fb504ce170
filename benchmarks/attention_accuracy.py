"""The error of each attention variant against float64 attention, and the gain of smoothing K: docs/attention.md.

Q, K and V are normal, ``(1, 4, 1776, 64)`` in float16 as in SageAttention's table 9. The operator's CPU implementation
rounds like the kernel. To measure the gain of smoothing, K gets a bias per channel of 10 times its signal.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.attention_cases import relative_l1
from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from qframework.attention import sage_attention
from qframework.files import write_json
from qframework.kernels.attention.variants import VARIANTS

SHAPE, SMOKE_SHAPE = (1, 4, 1776, 64), (1, 2, 70, 16)
MEASURED = (*VARIANTS, "8-per_thread-fp16-fp32")


def measure(shape: tuple[int, ...]) -> list[dict[str, object]]:
    """A row per variant: its error, and its error with a biased K, with and without smoothing."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator).half() for _ in range(3))
    bias = torch.randn(1, shape[1], 1, shape[3], generator=generator)
    biased = (key.float() + 10 * bias).half()
    exact, exact_biased = (
        F.scaled_dot_product_attention(query.double(), k.double(), value.double()) for k in (key, biased)
    )
    rows: list[dict[str, object]] = []
    for variant in MEASURED:
        smooth, rough = (
            relative_l1(sage_attention(query, biased, value, variant=variant, smooth_k=on), exact_biased)
            for on in (True, False)
        )
        error = relative_l1(sage_attention(query, key, value, variant=variant), exact)
        rows.append({"variant": variant, "relative_l1": error, "biased_smooth": smooth, "biased_rough": rough})
    return rows


def main() -> None:
    """Measure, print, and write ``--output`` if given."""
    arguments = argument_parser("attention_accuracy", __doc__, "document").parse_args()
    shape = SMOKE_SHAPE if arguments.smoke else SHAPE
    rows = measure(shape)
    for row in rows:
        print(f"{row['variant']:26} {row['relative_l1']:.4f}  gain {row['biased_rough'] / row['biased_smooth']:.1f}")  # type: ignore[operator]
    if arguments.output:
        what = "Relative L1 error of each variant against float64 attention, and with K biased by 10 times its signal."
        document = {"what": what, "machine": describe_machine("cpu"), "shape": shape, "rows": rows}
        write_json(arguments.output, document)


if __name__ == "__main__":
    main()
