"""Everything that knows Spark: pipelines on streaming DataFrames, and what runs in their tasks."""
