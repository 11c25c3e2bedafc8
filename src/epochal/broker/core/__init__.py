"""The decisions of a broker, without a socket, a clock or a disk.

    settings       limits and defaults, with their units
    entries        every durable change, as a value: the only way state survives
    batch_check    checks a batch of a producer before it is appended
    partitions     offsets, sequences of producers, last stable offset, aborted transactions
    transaction_states  the states of a transaction as a table
    transactions   producer ids, epochs, fencing, ends and timeouts of transactions
    offsets        committed offsets of consumer groups, and those pending in a transaction
    group_members  members and states of a group
    groups         groups: classic ones, and those that change their protocol
    consumer_members, consumer_groups  groups of the newer consumer protocol
    consumer_protocol  what classic consumers send each other, for groups with both kinds
    assignors      who reads which partitions, in the newer protocol
    topics         names, partitions and their configuration
    state          all of it together, and its recovery from entries and snapshots

Time is an argument. Every change in memory is emitted as an entry at once; the owner of the core
(storage/, tick_loop) makes the entries durable before any answer that depends on them is sent.
"""
