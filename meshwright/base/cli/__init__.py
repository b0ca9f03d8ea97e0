"""The command line: one module per verb declares its arguments and calls the function that does the work."""

from meshwright.base.cli.main import main

__all__ = ["main"]
