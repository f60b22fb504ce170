"""``python -m qframework``: the command, where its script is not on the PATH."""

from qframework.cli import main

if __name__ == "__main__":
    main()
