"""`python -m meshwright` is the command line, under torchrun too."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
