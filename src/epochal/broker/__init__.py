"""An embedded broker that speaks Kafka's protocol, with a real transaction coordinator.

For development, tests, demos and single machines without a JVM. For more than one machine, use
Apache Kafka: nothing changes but the address.

From the inside out:
    core/      what is decided: PURE, without a socket, a clock or a disk
    storage/   the journal and the segments, and recovery from them
    handlers/  one file for each request of the protocol, with the versions it speaks
    broker     core, storage and waiting readers under one roof
    connection, ticks, sasl, server
               sockets, the loop that gathers, decides, writes and answers, and the way in
    embedded   a broker for the length of a `with` block
"""
