"""One folder a target; the same file names in each."""
