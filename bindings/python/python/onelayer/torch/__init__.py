"""Runs torch modules whose weights do not fit into memory.

>>> import onelayer, torch
>>> model = onelayer.torch.empty(transformers.AutoConfig.from_pretrained(path))
>>> with torch.no_grad(), onelayer.torch.stream_forward(model, path, memory="4GiB") as handle:
...     model.generate(**tokens, max_new_tokens=20)
>>> print(handle.report)
"""

from ._empty import empty
from ._forward import ForwardReport, StreamedForward, stream_forward
from ._plan import ForwardPlan
from ._unload import unload

__all__ = ["ForwardPlan", "ForwardReport", "StreamedForward", "empty", "stream_forward", "unload"]
