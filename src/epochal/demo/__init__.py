"""
The demonstration: a pipeline into two sinks, its driver killed again and again, every row audited.

`source` makes the rows, `driver` is the process that gets killed, `killing` starts it, kills it and
starts it again until the source is drained, `audit` counts what a reader of the targets sees.
"""
