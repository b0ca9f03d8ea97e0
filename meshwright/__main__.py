"""Runs the command line as `python -m meshwright`, also under torchrun."""

from meshwright.base.cli import main

if __name__ == "__main__":
    main()
