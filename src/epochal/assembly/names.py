"""What `module:name` names: a pipeline, a function, or one of our own adapters."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from epochal.errors import EpochalError, Misconfigured

_IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(\.\w+)*):(?P<name>[A-Za-z_]\w*(\.\w+)*)")


def is_import_path(text: str) -> bool:
    return _IMPORT_PATH.fullmatch(text) is not None and not os.path.exists(text)  # noqa: PTH110  text, not a path yet


def imported(target: str) -> Any:
    """The object itself. Raises `Misconfigured` with the fact and the way out."""
    if not _IMPORT_PATH.fullmatch(target):
        raise Misconfigured(f"{target!r} names nothing", "module:name, as in jobs.orders:pipeline")
    module_name, _, name = target.partition(":")
    # As `python -m` does: jobs lie below the folder that one stands in.
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109  sys.path holds text
        sys.path.insert(0, "")
    try:
        found: object = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise Misconfigured(
            f"{target}: there is no module {error.name!r}",
            "run from the folder that holds it, or put that folder on PYTHONPATH",
        ) from error
    except AttributeError as error:
        raise Misconfigured(f"{target}: {error}") from error
    except EpochalError:
        raise
    except Exception as error:
        raise Misconfigured(
            f"{target}: the module could not be loaded: {type(error).__name__}: {error}",
            "what is imported should only declare; start the query under `if __name__ == …`",
        ) from error
    return found
