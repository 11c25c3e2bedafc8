"""The engine of SQL sinks: one for all databases, with a `Dialect` for each."""
