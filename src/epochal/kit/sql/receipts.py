"""What a receipt says of what its task left on a server."""

from __future__ import annotations

from epochal.terms import Proof, Receipt


def has_rows(receipt: Receipt) -> bool:
    """Whether its task left anything; found in a target's listing, it did."""
    return bool(receipt.token.get("staged", True))


def proven(receipt: Receipt, ledger: Proof) -> Proof:
    """
    What the ledger proves of a receipt of which the server lists nothing.

    A task without rows left nothing to list: that there is nothing proves nothing.
    """
    return Proof.UNKNOWN if ledger is Proof.ABORTED and not has_rows(receipt) else ledger
