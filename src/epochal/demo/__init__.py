"""The demonstration: three sinks, a driver that is killed repeatedly, and an audit of every row.

servers     run the embedded PostgreSQL and the Kafka-protocol broker
driver      is the Spark job that is killed
kills       starts the driver, kills it and starts it again until the source is drained
audit       counts the rows that each target's own client sees
workspace   has the paths, the rows of the source and the pipeline
"""
