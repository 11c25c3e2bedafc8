"""The epoch protocol, pure: no clock, disk, network, randomness or logging in this package.

`machine`: the phases of one epoch as a table. `state`: what the epoch log holds, and how each
record changes it. `records`: its encoding. `admission`: which start and which epoch may go on
(I10). `recovery`: what to do with prepared work that was found, and with lost rows (I4, I5).
`invariants`: the numbered promises. The coordinator carries out what these modules return.
"""
