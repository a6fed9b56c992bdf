"""Queries the driver and NVML about a device with ctypes, independently of loadcheck.

As a program it keeps a context and answers each line on stdin with one JSON line: used device memory, read
in two ways. A separate process, so that a driver crash loses only these figures.
"""

import contextlib
import ctypes
import json
import subprocess
import sys

DRIVER_NAMES = ("libcuda.so.1", "libcuda.so")
NVML_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")


class Unavailable(Exception):
    """The library is missing or refuses."""


def library(names):
    problems = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise Unavailable("; ".join(problems))


def call(lib, name, *arguments):
    try:
        function = getattr(lib, name)
    except AttributeError:
        raise Unavailable(f"no function {name}") from None
    code = function(*arguments)
    if code != 0:
        raise Unavailable(f"{name}: error {code}")


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t of NVML."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """The management library."""

    def __init__(self, ordinal):
        self.lib = library(NVML_NAMES)
        call(self.lib, "nvmlInit_v2")
        self.handle = ctypes.c_void_p()
        call(self.lib, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(ordinal), ctypes.byref(self.handle))

    def text(self, name, *first):
        buffer = ctypes.create_string_buffer(128)
        call(self.lib, name, *first, buffer, ctypes.c_uint(128))
        return buffer.value.decode(errors="replace")

    def describe(self):
        memory = self.memory()
        return {
            "driver_version": self.text("nvmlSystemGetDriverVersion"),
            "name": self.text("nvmlDeviceGetName", self.handle),
            "uuid": self.text("nvmlDeviceGetUUID", self.handle),
            "total_bytes": memory.total,
        }

    def memory(self):
        memory = NvmlMemory()
        call(self.lib, "nvmlDeviceGetMemoryInfo", self.handle, ctypes.byref(memory))
        return memory

    def close(self):
        call(self.lib, "nvmlShutdown")


class Driver:
    """The driver with the primary context current."""

    def __init__(self, ordinal):
        self.lib = library(DRIVER_NAMES)
        call(self.lib, "cuInit", ctypes.c_uint(0))
        self.device = ctypes.c_int()
        call(self.lib, "cuDeviceGet", ctypes.byref(self.device), ctypes.c_int(ordinal))
        context = ctypes.c_void_p()
        call(self.lib, "cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        call(self.lib, "cuCtxPushCurrent_v2", context)

    def memory(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call(self.lib, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def describe(self):
        name = ctypes.create_string_buffer(128)
        call(self.lib, "cuDeviceGetName", name, ctypes.c_int(128), self.device)
        version = ctypes.c_int()
        call(self.lib, "cuDriverGetVersion", ctypes.byref(version))
        uuid = (ctypes.c_ubyte * 16)()
        call(self.lib, "cuDeviceGetUuid_v2", uuid, self.device)
        digits = bytes(uuid).hex()
        cuts = (0, 8, 12, 16, 20, 32)
        return {
            "name": name.value.decode(errors="replace"),
            "uuid": "GPU-" + "-".join(digits[a:b] for a, b in zip(cuts, cuts[1:])),
            "cuda_version": version.value,
            "total_bytes": self.memory()[1],
        }

    def close(self):
        call(self.lib, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        call(self.lib, "cuDevicePrimaryCtxRelease_v2", self.device)


def attempt(action):
    """The result of an action, or its error."""
    try:
        return action()
    except Unavailable as error:
        return {"error": str(error)}


def serve(ordinal):
    driver, nvml = attempt(lambda: Driver(ordinal)), attempt(lambda: Nvml(ordinal))

    def ask(source, method):
        return source if isinstance(source, dict) else attempt(lambda: method(source))

    def used(source):
        if isinstance(source, Driver):
            free, total = source.memory()
            return {"used_bytes": total - free, "free_bytes": free}
        memory = source.memory()
        return {"used_bytes": memory.used, "free_bytes": memory.free}

    for line in sys.stdin:
        method = (lambda source: source.describe()) if line.strip() == "describe" else used
        print(json.dumps({"driver": ask(driver, method), "nvml": ask(nvml, method)}), flush=True)
    for source in (driver, nvml):
        ask(source, lambda source: source.close())


class Watch:
    """The parent's side of the process that answers."""

    def __init__(self, ordinal):
        words = [sys.executable, __file__, str(ordinal)]
        self.child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what):
        """`describe` or `memory`. Returns a dict each for `driver` and `nvml`, with `error` on failure."""
        try:
            self.child.stdin.write(what + "\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
            return json.loads(line)
        except (OSError, ValueError):
            gone = {"error": f"the process that asks the driver ended with {self.child.poll()}"}
            return {"driver": dict(gone), "nvml": dict(gone)}

    def close(self):
        with contextlib.suppress(OSError):
            self.child.stdin.close()
        try:
            self.child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.child.kill()
        self.child.stdout.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
