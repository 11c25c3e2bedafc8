"""A folder per target; the same file names in each."""
