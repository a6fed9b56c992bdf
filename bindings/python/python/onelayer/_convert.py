"""Conversion to sharded per-layer files, and verification of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import _native
from ._checkpoint import Checkpoint
from ._checkpoint import open as open_checkpoint
from ._frameworks import float_name
from ._options import LayerMap, Select, layer_map_text, matches, selected_tensors
from ._options import opening as open_options
from ._progress import Bar
from ._sizes import human_size, optional_size
from ._sources import locate

if TYPE_CHECKING:
    from collections.abc import Generator

Progress = bool | Callable[[int, int], object]
"""True for a bar where tqdm is installed, or a function of the bytes done and of all bytes."""


@dataclass(frozen=True)
class Difference:
    """One thing that is wrong with a checkpoint."""

    place: str
    """The file, or the tensor."""
    what: str
    """The fault, with both sides of the comparison."""

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """What a verification has found."""

    files: int
    """Files whose hashes were compared."""
    tensors: int
    """Tensors whose bytes were compared."""
    nbytes: int
    """Bytes of those tensors."""
    differences: tuple[Difference, ...]
    """Every fault, a thousand at most; empty if all is well."""
    notes: tuple[str, ...]
    """What was not compared, and why."""

    @property
    def is_good(self) -> bool:
        """True if nothing is wrong. ``notes`` tells what could not be compared."""
        return not self.differences

    def __str__(self) -> str:
        found = f"{len(self.differences)} differences" if self.differences else "no difference"
        return f"{found}; {self.files} files and {self.tensors} tensors ({human_size(self.nbytes)}) compared"


@dataclass(frozen=True)
class QuantisationError:
    """What quantising a tensor has lost."""

    tensor: str
    max_abs: float
    """The largest magnitude of an element."""
    max_abs_error: float
    """The largest difference of an element."""
    rms_error: float
    """The root of the mean of the squares of these differences."""


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion has done."""

    seconds: float
    files_written: int
    files_kept: int
    """Files that an earlier run made."""
    written_bytes: int
    read_bytes: int
    side_files: int
    """Files beside the weights that were copied."""
    is_complete: bool
    """True if the target has its index and manifest."""
    write_mode: str | None
    """How files were written."""
    cloned_bytes: int
    """Bytes that share their blocks with the source."""
    copied_bytes: int
    """Bytes that the kernel copied."""
    fallbacks: tuple[str, ...]
    """Why files were not read in the requested way."""
    notes: tuple[str, ...]
    quantisation: tuple[QuantisationError, ...]
    verification: VerifyReport | None

    def __str__(self) -> str:
        written = f"{self.files_written} files ({human_size(self.written_bytes)}) written in {self.seconds:.1f} s"
        kept = f", {self.files_kept} kept" if self.files_kept else ""
        rest = "" if self.is_complete else ", parts are missing"
        return written + kept + rest + (f"; {self.verification}" if self.verification else "")


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    grouping: Literal["per-layer", "merged"] = "per-layer",
    experts: Literal["together", "per-file"] = "together",
    max_shard: int | str | None = None,
    layer_map: LayerMap | None = None,
    dtype: object = None,
    dtype_rules: Mapping[str, object] | None = None,
    quantise: str | None = None,
    quantise_only: Select | None = None,
    select: Select | None = None,
    drop_duplicates: bool = False,
    sha256: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    kernel_copy: Literal["auto", "never", "always"] = "auto",
    io: str | None = None,
    jobs: int | None = None,
    progress: Progress = False,
) -> ConvertReport:
    """Rewrites a checkpoint as one file per layer, in bounded memory. The target is a plain checkpoint, too.

    - ``budget``: maximum host memory. Default: 64 MiB.
    - ``grouping``: ``"per-layer"``, or ``"merged"`` into one file. ``max_shard`` bounds the bytes of tensors in a
      file: neighbouring layers share one. ``experts="per-file"`` gives each expert a file.
    - ``dtype``: casts plain floats. ``dtype_rules``: a regular expression and a type for some tensors, or
      ``"keep"``; the first rule that matches decides, before ``dtype``.
    - ``quantise``, ``quantise_only``, ``select``, ``layer_map``: as for ``Checkpoint.stream``.
    - ``drop_duplicates``: leaves out tied weights. ``sha256``: adds these hashes to the manifest.
    - ``verify``: reads source and target again at the end, and compares every tensor.
    - ``overwrite``: replaces what another conversion left in the target.
    - ``part``: ``(number, of)``, from 1, for several processes; afterwards, one of them calls with ``finish``.
    - ``progress``: ``True`` for a bar (with tqdm), or a function of the bytes done and of all bytes.

    An interrupted conversion goes on where it stopped when it is called again. Ctrl-C, and an exception of
    ``progress``, cancel it; finished files stay. Raises ``CheckpointError``, ``BudgetError``,
    ``FileExistsError`` for a target with other files, and ``OSError`` if the system refuses, or if the disk is too
    small.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    rules = {pattern: _casting(rule) for pattern, rule in (dtype_rules or {}).items()}
    options: dict[str, Any] = {
        "opening": checkpoint._opening,
        "budget": optional_size(budget),
        "io": io,
        "jobs": jobs,
        "grouping": grouping,
        "experts": experts,
        "max_shard": optional_size(max_shard),
        "layer_map": layer_map_text(layer_map),
        "dtype": None if dtype is None else float_name(dtype),
        "dtype_rules": matches(checkpoint, rules),
        "quantise": quantise,
        "quantise_only": None if quantise_only is None else selected_tensors(checkpoint, quantise_only),
        "select": None if select is None else selected_tensors(checkpoint, select),
        "drop_duplicates": drop_duplicates,
        "sha256": sha256,
        "verify": verify,
        "overwrite": overwrite,
        "part": part,
        "kernel_copy": kernel_copy,
    }
    hidden = ("opening", "budget", "io", "jobs", "verify", "overwrite", "part", "select", "quantise_only")
    chosen = {name: value for name, value in options.items() if name not in hidden and value not in (None, {}, False)}
    options["described"] = [f"{name}={value}" for name, value in chosen.items()]
    with _told(progress, "converting") as tell:
        parts = _native.convert(checkpoint.path, os.fspath(target), options, finish, tell)
    verification = parts.pop("verification")
    errors = tuple(QuantisationError(*error) for error in parts.pop("quantisation"))
    fallbacks, notes = tuple(parts.pop("fallbacks")), tuple(parts.pop("notes"))
    return ConvertReport(
        quantisation=errors,
        fallbacks=fallbacks,
        notes=notes,
        verification=None if verification is None else _verified(verification),
        **parts,
    )


def verify(
    directory: str | os.PathLike[str] | Checkpoint,
    against: str | os.PathLike[str] | Checkpoint | None = None,
    *,
    budget: int | str | None = None,
    io: str | None = None,
    jobs: int | None = None,
    progress: Progress = False,
) -> VerifyReport:
    """Checks headers, index, and hashes by the manifest of a conversion; with ``against`` also every tensor.

    Faults are in the report. ``budget`` is the maximum host memory, 64 MiB by default; ``progress`` as for
    ``convert``. Raises ``OSError`` if the system refuses to read.
    """
    opening = next((given._opening for given in (directory, against) if isinstance(given, Checkpoint)), None)
    options = {
        "opening": opening or open_options(),
        "budget": optional_size(budget),
        "io": io,
        "jobs": jobs,
    }
    other = None if against is None else _path(against)
    with _told(progress, "verifying") as tell:
        return _verified(_native.verify(_path(directory), other, options, tell))


def _path(given: str | os.PathLike[str] | Checkpoint) -> str:
    """Where it is; a name is looked up in the cache of the hub."""
    if isinstance(given, Checkpoint):
        return given.path
    return os.fspath(given) if os.path.exists(given) else locate(given)


def _casting(rule: object) -> str | None:
    return None if rule is None or rule == "keep" else float_name(rule)


def _verified(parts: dict[str, Any]) -> VerifyReport:
    differences = tuple(Difference(*difference) for difference in parts.pop("differences"))
    return VerifyReport(differences=differences, notes=tuple(parts.pop("notes")), **parts)


@contextmanager
def _told(progress: Progress, label: str) -> Generator[Callable[[int, int], object] | None, None, None]:
    """The function that is told of the progress."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    bars: list[Bar] = []

    def tell(done: int, total: int) -> None:
        if not bars:
            bars.append(Bar(total, label))
        bars[0].update_to(done)

    try:
        yield tell
    finally:
        for bar in bars:
            bar.close()
