"""Storage of a broker's state: a journal of entries, and segments of records.

    disk      the few things asked of a file system, so that tests can make any of them fail
    codec     entries as bytes
    checksums CRC-32C, and whether a bit was flipped or a write torn
    journal   one write-ahead log of all entries, a frame per tick, with snapshots
    segments  the batches of one partition: newest in memory, the rest in files with a sparse index
    store     all of it together: staging, group commit, reads, retention, recovery

Layout of the data folder (no name of a topic is part of a path):
    lock  journal/00000007.log  journal/00000007.snapshot  partitions/00000012/0000…0000.segment
"""
