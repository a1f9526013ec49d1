"""The operations that one pass knows: every module of this folder, each a family of operations (see `base`).

A new operation is a new file here.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
