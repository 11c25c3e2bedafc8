"""The epoch protocol, pure: no clock, disk, network, chance or logging in this room.

`machine` is the life of one epoch as a table; `state` is what the epoch log remembers and how each
record changes it; `records` is how that is written down; `admission` says which start and which
epoch may go on (I10); `recovery` says what becomes of what was found (I4, I5); `invariants` numbers
the promises. The coordinator carries out what these rooms say.
"""
