"""A broker on several machines: its journal is numbered slots in a store, each filled once.

One member is active and decides; the others, standbys, take in what it has written. Nobody elects:
the member that fills the next slot with a *claim* is active from there on, and the one before meets
that claim at its next write or read. Safety rests on put-if-absent alone: neither on clocks nor on
leases nor on who is believed to be alive.

    slots       one slot as bytes: a tick or a claim, chained by checksums
    protocol    PURE: what a member does next, by what the store has answered
"""
