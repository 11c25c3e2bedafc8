"""What a broker decides, without a socket, a clock or a disk.

    settings       limits and defaults, with their units
    entries        every durable change, as a value: the only way state survives
    batch_check    whether bytes of a producer are a batch that may be appended
    partitions     offsets, sequences of producers, last stable offset, aborted transactions
    txn_states     the states of a transaction as a table
    transactions   producer ids, epochs, fencing, ends and timeouts of transactions
    offsets        what consumer groups have committed, and what waits for a transaction
    groups         classic consumer groups
    topics         names, partitions and their configuration
    state          all of it together, and how entries and snapshots bring it back

Time is an argument. A change is made in memory and emitted as an entry in the same breath; whoever
owns the core writes the entries down before any answer of theirs leaves (storage/, server).
"""
