"""Handlers as people write them: rows into a table of their own, in the receiver's transaction."""

from __future__ import annotations


def into_orders(commit) -> None:
    commit.connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, name)")
    for row in commit.rows():
        commit.connection.execute("INSERT INTO orders VALUES (?, ?)", (row["id"], row["name"]))


def commits_itself(commit) -> None:
    commit.connection.execute("COMMIT")
