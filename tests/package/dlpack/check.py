#!/usr/bin/env python3
"""Tensors go from pleat to NumPy, JAX and PyTorch and back by DLPack: the same memory, deleted once, and on GPUs without
a wait of the host although they are written late. Exit code 77 where none of the three is installed.

Run: check.py <include folder> <tests folder> <work folder> <compiler>
"""
import ctypes
import importlib
import os
import pathlib
import subprocess
import sys

ROWS, COLUMNS = 7, 5
EXPECTED = sum((r + 1) * (r * COLUMNS + c) for r in range(ROWS) for c in range(COLUMNS))
CPU, CUDA = 1, 2
CUDA_HOME = "/usr/local/cuda"
ON_HOST = {  # function of exchange.cpp: result, arguments
    "exchange_lent": (ctypes.c_int, []),
    "exchange_make": (ctypes.c_void_p, [ctypes.c_int64] * 2),
    "exchange_sum": (ctypes.c_double, [ctypes.c_void_p]),
}
ON_GPU = {
    "exchange_refuses": (ctypes.c_bool, [ctypes.c_int64]),
    "exchange_stream": (ctypes.c_int64, []),
    "exchange_make_on_gpu": (ctypes.c_void_p, [ctypes.c_int64] * 3),
    "exchange_sum_on_gpu": (ctypes.c_double, [ctypes.c_void_p]),
}

capsule_new = ctypes.pythonapi.PyCapsule_New
capsule_new.restype, capsule_new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
capsule_rename = ctypes.pythonapi.PyCapsule_SetName
capsule_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Lent:
    """What a framework asks for a tensor of pleat's."""

    def __init__(self, device, make):
        self.device, self.make = device, make

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **_):  # the older struct, which every framework takes
        return capsule_new(self.make(stream), b"dltensor", None)


def taken(capsule):
    """The tensor of a capsule, whose deleter is now for the taker to call."""
    pointer = capsule_pointer(capsule, b"dltensor")
    capsule_rename(capsule, b"used_dltensor")
    return pointer


def library(include, tests, work, compiler, cuda):
    source = pathlib.Path(__file__).with_name("exchange.cpp")
    path = pathlib.Path(work) / f"exchange{'_cuda' if cuda else ''}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with_cuda = ["-DEXCHANGE_ON_CUDA", f"-I{CUDA_HOME}/include", f"-L{CUDA_HOME}/lib64", f"-Wl,-rpath,{CUDA_HOME}/lib64", "-lcudart"] if cuda else []
    subprocess.run([compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-I{include}",
                    f"-I{tests}", source, "-o", path, *with_cuda], check=True)
    exchange = ctypes.CDLL(str(path))
    for name, (result, arguments) in {**ON_HOST, **(ON_GPU if cuda else {})}.items():
        getattr(exchange, name).restype, getattr(exchange, name).argtypes = result, arguments
    return exchange


def must(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: {found} instead of {expected}")


def weighted(array):
    return float(sum((r + 1) * array[r, c] for r in range(array.shape[0]) for c in range(array.shape[1])))


def on_host(name, exchange, from_dlpack, array):
    """`array` is an f32 array of the framework with other strides than dense ones, where it has them."""
    got = from_dlpack(Lent((CPU, 0), lambda stream: exchange.exchange_make(ROWS, COLUMNS)))
    must(f"{name}: sum of what went out", weighted(got), EXPECTED)
    must(f"{name}: tensors lent", exchange.exchange_lent(), 1)
    del got
    must(f"{name}: tensors lent at the end", exchange.exchange_lent(), 0)
    must(f"{name}: sum of what came in", exchange.exchange_sum(taken(array.__dlpack__())), weighted(array))
    print(f"{name}: out and in on the host")


def on_gpu(torch, exchange):
    other = torch.cuda.Stream()
    for stream, number in ((torch.cuda.default_stream(), 1), (other, other.cuda_stream)):
        with torch.cuda.stream(stream):
            got = torch.from_dlpack(Lent((CUDA, 0), lambda s: exchange.exchange_make_on_gpu(ROWS, COLUMNS, 1 if s is None else s)))
            must("torch: sum of what went out on a GPU", weighted(got.clone().cpu()), EXPECTED)
            del got
            early = capsule_new(exchange.exchange_make_on_gpu(ROWS, COLUMNS, -1), b"dltensor", None)
            if weighted(torch.from_dlpack(early).clone().cpu()) == EXPECTED:
                sys.exit("torch: what is not ordered is there all the same: the test would not see a stream left out")
            torch.cuda.synchronize()
            del early
            made = torch.zeros(ROWS, COLUMNS, device="cuda")
            values = torch.arange(ROWS * COLUMNS, device="cuda", dtype=torch.float32).reshape(ROWS, COLUMNS)
            torch.cuda._sleep(50_000_000)
            made.copy_(values)
            given = taken(made.__dlpack__(stream=exchange.exchange_stream()))
            must("torch: sum of what came in on a GPU", exchange.exchange_sum_on_gpu(given), EXPECTED)
    torch.cuda.synchronize()
    must("torch: tensors lent at the end", exchange.exchange_lent(), 0)
    print("torch: out and in on a GPU, on two streams")


def installed(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def main(*where):
    os.environ["JAX_PLATFORMS"] = "cpu"  # its arrays lie on a GPU otherwise, where there is one
    numpy, jax, torch = map(installed, ("numpy", "jax", "torch"))
    if not (numpy or torch):
        print("skipped: neither NumPy nor PyTorch is installed")
        sys.exit(77)
    exchange = library(*where, cuda=False)
    if numpy:
        on_host("numpy", exchange, numpy.from_dlpack, numpy.arange(24, dtype=numpy.float32).reshape(6, 4).T)
    if jax:
        on_host("jax", exchange, importlib.import_module("jax.dlpack").from_dlpack, jax.numpy.arange(24, dtype="float32").reshape(6, 4))
    if torch:
        on_host("torch", exchange, torch.from_dlpack, torch.arange(24, dtype=torch.float32).reshape(6, 4).T)
    if pathlib.Path(CUDA_HOME).is_dir():
        exchange = library(*where, cuda=True)
        for number, is_refused in ((0, True), (-2, True), (-1, False), (1, False), (2, False), (4096, False)):
            must(f"stream {number} is refused", exchange.exchange_refuses(number), is_refused)
        if torch and torch.cuda.is_available():
            on_gpu(torch, exchange)


if __name__ == "__main__":
    main(*sys.argv[1:])
