"""The Kafka wire: a codec, record batches, and a small synchronous client.

Pure (bytes in, values out, no clock, disk or network):
    primitives, messages, codes   the protocol's messages, generated from Kafka's own schemas
    batches, batch_reader         record batches from and to Arrow columns
    varints, record_headers, compression, partitioner
    versions, errors, cluster     request versions, meanings of error codes, who leads what
The client, from the socket up:
    security, connection, handshake, client
"""
