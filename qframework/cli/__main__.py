"""``python -m qframework.cli``."""

from qframework.cli import main

main()
