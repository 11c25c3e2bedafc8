"""What the SQL databases share: write modes, the buffer of a writer, and its backpressure."""
