"""`python -m epochal.cli`, where the script is not on the path."""

from epochal.cli import main

main()
