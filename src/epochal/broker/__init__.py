"""An embedded broker with Kafka's protocol and a real transaction coordinator.

For development, tests, demos and single machines without a JVM. For more than one machine, use
Apache Kafka: nothing changes but the address.

From the inside out:
    core/      all decisions: PURE, without a socket, a clock or a disk
    storage/   the journal and the segments, and recovery from them
    handlers/  one file per request of the protocol, with the versions it supports
    broker     core, storage and waiting fetches together: what handlers see
    acceptor, connection, tick_loop, loop_thread, sasl, server
               sockets, the loop that collects, decides, writes and answers, the thread in which it
               syncs, and `serve`
    record_section, metrics
               the records within a batch, where they are looked at; counters for Prometheus
    embedded   a broker for the length of a `with` block
"""
