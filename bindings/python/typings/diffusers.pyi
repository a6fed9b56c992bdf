"""Any types: onelayer is checked without this package, whichever release of it is installed."""

from typing import Any

def __getattr__(name: str) -> Any: ...
