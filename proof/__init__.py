"""
Proof of the coordinator, and of the broker's shared journal, by brute force; not shipped.

- `model`: walks every interleaving of two drivers at small size and checks the invariants in each
  state, over the `scenarios`.
- `simulation`: drivers, zombies, slow and failing targets by a seed; one seed replays alone.
- `shared_journal`: members of a broker on several machines by a seed, with a store that fails.
- `mutants`: breaks the coordinator on purpose; model, simulation and tests must object.

`world` is what drivers leave behind when they die: log, targets, Spark's checkpoint. `calls` are
the calls by which a driver reaches it, `behaviour` a driver reduced to its calls and answers, and
`judge` checks the invariants on a world.
"""
