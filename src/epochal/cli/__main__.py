"""`python -m epochal.cli`: the command line where its script is not on PATH."""

from epochal.cli import main

if __name__ == "__main__":
    main()
