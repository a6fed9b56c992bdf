"""Finds a checkpoint by path, or by name in the local cache of the Hugging Face hub."""

from __future__ import annotations

import os
import re

from . import _native

_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")
_REPOSITORY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_DOWNLOADED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt"]


def locate(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
    download: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> str:
    """The path of a checkpoint. Downloads only if ``download`` is true."""
    path = os.fspath(source)
    if revision is None and os.path.exists(path):
        return path
    name, _, revision_in_name = path.partition("@")
    if not _REPOSITORY.fullmatch(name):
        if revision is not None and os.path.exists(path):
            return path
        raise FileNotFoundError(2, "No such file or directory", path)
    if revision is not None and revision_in_name:
        raise ValueError(f"{path!r} names a revision, and revision={revision!r} another one")
    revision = revision or revision_in_name or None
    if download and not offline:
        return _download(name, revision, token, cache_dir)
    full_name = name if revision is None else f"{name}@{revision}"
    variables = [os.environ.get(variable) for variable in _VARIABLES]
    root = None if cache_dir is None else os.fspath(cache_dir)
    found = _native.locate_in_cache(full_name, root, variables)
    if found is None:
        raise FileNotFoundError(2, "no cache of the hub: set HF_HOME or HF_HUB_CACHE", path)
    return os.fspath(found)


def _download(
    name: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError("download=True needs the package huggingface_hub") from error
    return str(
        snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=_DOWNLOADED,
        )
    )
