"""One load in a separate process, measured by the parent: import, wait for "go", load, keep the tensors.

    python3 child.py '{"loader": "safetensors load_file", "folder": DIR, "files": [...], "largest_tensor_bytes": N}'

JSON lines on stdout, words on stdin: `ready` (imports are done) -> "go" -> `done` (every byte was touched;
seconds and kept memory) -> "end". `examples/one_load.rs` has the same protocol for Rust loaders. Mapped
tensors are touched before the clock stops: an unread mapping is not a loaded checkpoint.
"""

import json
import os
import sys
import time

import loaders


def file_mappings():
    """Address ranges of this process that map regular files."""
    ranges = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/") and fields[4] != "0":
                start, end = (int(word, 16) for word in fields[0].split("-"))
                ranges.append((start, end))
    return ranges


def is_mapped(tensor, ranges):
    address = tensor.data_ptr()
    return any(start <= address < end for start, end in ranges)


def hold(found):
    """Touches mapped tensors. Returns total and mapped bytes; tied weights count once."""
    if isinstance(found, int):
        return found, 0
    ranges = file_mappings()
    total, mapped, known = 0, 0, set()
    for tensor in found.values():
        if tensor.data_ptr() in known or tensor.is_meta:
            continue
        known.add(tensor.data_ptr())
        size = tensor.numel() * tensor.element_size()
        total += size
        if is_mapped(tensor, ranges):
            mapped += loaders.touch(tensor)
    return total, mapped


def main():
    job = json.loads(sys.argv[1])
    # Output of packages goes to stderr: stdout is for the parent.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields):
        print(json.dumps(fields), file=answers, flush=True)

    prepare, load = loaders.LOADERS[job["loader"]]
    start = time.perf_counter()
    try:
        prepare()
    except Exception as error:  # any exception of a package is its result
        say(refused=f"cannot be imported: {type(error).__name__}: {error}"[:300])
        return
    say(ready=True, import_seconds=time.perf_counter() - start)
    sys.stdin.readline()
    start = time.perf_counter()
    try:
        found, kept = load(job)
        total, mapped = hold(found)
    except Exception as error:
        say(refused=f"{type(error).__name__}: {error}"[:300])
        return
    seconds = time.perf_counter() - start
    held = 0 if isinstance(found, int) and not kept else total
    say(done=True, seconds=seconds, bytes=total, mapped_bytes=mapped, held_bytes=held)
    sys.stdin.readline()
    answers.flush()
    # Exit without teardown, which is not measured.
    os._exit(0)


if __name__ == "__main__":
    main()
