"""Drop-in replacements for ``safe_open`` and ``load_file`` of the package ``safetensors``.

>>> from onelayer.safetensors import safe_open, load_file

Signatures, names and results are those of safetensors 0.8, with these differences:

- ``backend`` is ``"pread"`` by default: tensors own their memory. ``"mmap"`` gives views of a private, copy-on-write mapping.
- Errors name the file and, if they concern one, the tensor.
- Supported frameworks are ``pt`` and ``np``.
"""

from ._file import SafetensorError, safe_open
from .torch import load_file

__all__ = ["SafetensorError", "load_file", "safe_open"]
