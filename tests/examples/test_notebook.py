"""The notebook of examples/, run by Jupyter's own client, with cells stopped and run again."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


class Notebook:
    """A notebook whose cells are run by name, as often as somebody likes."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        self._cells = {cell["id"]: number for number, cell in enumerate(client.nb.cells)}

    def run(self, name: str) -> str:
        """All that the cell shows."""
        number = self._cells[name]
        return shown(self._client.execute_cell(self._client.nb.cells[number], number))

    def interrupted(self, source: str) -> str:
        """What a further cell shows that the stop button ends: SIGINT, once it runs."""
        number, has_ended = len(self._client.nb.cells), threading.Event()
        button = threading.Thread(target=self._press_stop, args=(number, has_ended), daemon=True)
        button.start()
        try:
            return self.show(f"import os\nprint('pid', os.getpid(), flush=True)\n{source}")
        finally:
            has_ended.set()
            button.join(60)

    def show(self, source: str) -> str:
        """What a further cell shows."""
        self._client.nb.cells.append(new_code_cell(source))
        number = len(self._client.nb.cells) - 1
        return shown(self._client.execute_cell(self._client.nb.cells[number], number))

    def _press_stop(self, number: int, has_ended: threading.Event) -> None:
        """Again, as a person would: Python misses a signal just before it waits for a socket."""
        pause_s = 0.05
        while not has_ended.wait(pause_s):
            cells = self._client.nb.cells[number:]
            running = re.search(r"pid (\d+)", "".join(map(shown, cells)))
            if running is not None:
                os.kill(int(running[1]), signal.SIGINT)
                pause_s = 10.0


def shown(cell: nbformat.NotebookNode) -> str:
    parts = []
    for output in cell.get("outputs", ()):
        parts.append(output.get("text", ""))
        parts += output.get("data", {}).values()
        parts.append(output.get("evalue", ""))
    return "\n".join(parts)


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    read = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(read, timeout=300, allow_errors=True, kernel_name="python3")
    with client.setup_kernel(cwd=str(tmp_path)):
        yield Notebook(client)


def test_cells_that_are_stopped_and_run_again_write_each_row_once(notebook):
    notebook.run("setup")
    assert "<th>ability</th>" in notebook.run("declare")
    assert "<b>Pipeline clicks</b>: running on" in notebook.run("start")
    assert notebook.run("watch").count("<td>committed</td>") >= 3
    # The same cell, while its query runs; then another that the button stops, and again.
    assert "running on" in notebook.run("start")
    assert "KeyboardInterrupt" in notebook.interrupted("query.awaitTermination()")
    assert "active True" in notebook.show("print('active', query.isActive)")
    assert "running on" in notebook.run("start")
    notebook.run("watch")
    assert "<b>Pipeline clicks</b>: stopped</p>" in notebook.run("stop")
    counted = dict(line.rsplit(" ", 1) for line in notebook.run("count").splitlines() if line)
    assert int(counted.pop("rows")) > 0
    assert counted == {"lost": "0", "twice": "0", "in one sink only": "0"}
