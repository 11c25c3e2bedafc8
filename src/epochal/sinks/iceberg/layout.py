"""Where files lie below a table's data location, and what their names tell.

An attempt's files are in a folder of its own, named by its handle (I6). Once committed they stay
there: Iceberg knows files by their full names, and moving nothing is what makes a commit cheap. So
a folder alone does not tell whether its files are committed. A marker does: an empty file with the
handle as its name, written before the first row and removed once the epoch is committed. What has
a marker is in doubt (I5), and listing markers costs the same however large the table is.
"""

from __future__ import annotations

from dataclasses import dataclass

from epochal.terms import Handle

_FOLDER = "epochal"


@dataclass(frozen=True, slots=True)
class Layout:
    data_path: str
    """The table's data location, without a slash at its end."""

    @property
    def markers(self) -> str:
        return f"{self.data_path}/{_FOLDER}/in-doubt"

    def marker(self, handle: Handle) -> str:
        return f"{self.markers}/{handle}"

    def folder(self, handle: Handle) -> str:
        return f"{self.data_path}/{_FOLDER}/{handle}"

    def file(self, handle: Handle, name: str) -> str:
        return f"{self.folder(handle)}/{name}"


def layout_around(folder: str) -> Layout:
    """The layout that an attempt's folder belongs to, wherever the table's data lies by now."""
    return Layout(folder.rsplit("/", 2)[0])


def layout_of(location: str, properties: dict[str, str]) -> Layout:
    """The layout of a table, by its location and the property that moves its data elsewhere."""
    return Layout((properties.get("write.data.path") or f"{location.rstrip('/')}/data").rstrip("/"))
