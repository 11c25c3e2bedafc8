"""The spool: keeps rows for targets that can't hold back prepared rows themselves.

`rows.RowSpool` keeps rows by handle at a URL; `ledger.SpoolLedger` beside it records what was
delivered. On these two, `rows.SpoolingWriter` and `committer.SpoolCommitter` are a whole sink but
for its `Delivery`. A sink that only wants to be able to send rows again uses the `RowSpool` alone:
`writer` in the task, `read` on the driver, `listed` and `remove` as prepared work is listed and
aborted (I5).
"""
