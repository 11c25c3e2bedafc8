"""
The demonstration: a pipeline into a table, a topic and a folder, its driver killed again and again,
every row audited.

`servers` are the embedded PostgreSQL and Kafka-protocol broker, `source` makes the rows, `driver`
is the process that gets killed, `killing` starts it, kills it and starts it again until the source
is drained, `audit` counts what `readers`, each target's own clients, see.
"""
