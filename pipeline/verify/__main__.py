"""Entry of `python -m pipeline.verify`, and of a copied folder (`python -I -S verify`), which is no package until it is loaded as one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def package() -> str:
    """The name under which the files beside this one can be imported, whatever the folder is called."""
    if __package__:
        return __package__
    folder, name = Path(__file__).resolve().parent, "lockstep_verify"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return name


if __name__ == "__main__":
    sys.exit(importlib.import_module(f"{package()}.command").main())
