"""The command line: ``qframework quantize | evaluate | sensitivity | tune | benchmark | tune-kernels | doctor | ...``.

Exit codes: 0 for success, 1 for a failed check, 2 for bad usage or input, with one line on standard error. Results go
to standard output, as a table or with ``--json`` as JSON; progress goes to standard error.
"""

from __future__ import annotations

from qframework.cli import benchmark, doctor, evaluate, export_onnx, quantize, sensitivity, tune, tune_kernels
from qframework.cli.command import Command, app

app.command(cls=Command, epilog=quantize.EXAMPLES)(quantize.quantize)
app.command(cls=Command, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(cls=Command, epilog=sensitivity.EXAMPLES)(sensitivity.sensitivity)
app.command(cls=Command, epilog=tune.EXAMPLES)(tune.tune)
app.command(cls=Command, epilog=benchmark.EXAMPLES)(benchmark.benchmark)
app.command(cls=Command, epilog=tune_kernels.EXAMPLES)(tune_kernels.tune_kernels)
app.command(cls=Command, epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(cls=Command, epilog=export_onnx.EXAMPLES)(export_onnx.export_onnx)


def main() -> None:
    """Entry point of the ``qframework`` command."""
    app()
