#!/usr/bin/env python3
"""Reads a checkpoint as the format says, and writes its tensors, whole, in the order of their names, to one file.
With the safetensors package it reads every file by that too. Run: read_checkpoint.py <folder> <output>"""
import json
import pathlib
import struct
import sys

WIDTH = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1}


def read_file(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0 and raw[8:9] == b"{"
    header = json.loads(raw[8:8 + length].decode("utf-8"))
    assert all(isinstance(value, str) for value in header.pop("__metadata__", {}).values())
    data, tensors, end = raw[8 + length:], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, past = entry["data_offsets"]
        elems = 1
        for extent in entry["shape"]:
            elems *= extent
        assert begin == end and past - begin == elems * WIDTH[entry["dtype"]], name
        tensors[name], end = (entry["dtype"], entry["shape"], data[begin:past]), past
    assert end == len(data)
    return tensors


def check_package(path, tensors):
    """The package reads the same bytes."""
    try:
        import numpy
        from safetensors import safe_open
    except ImportError:
        return
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, (_, shape, data) in tensors.items():
            tensor = file.get_tensor(name)
            assert list(tensor.shape) == shape and numpy.ascontiguousarray(tensor).tobytes() == data, name


folder, output = map(pathlib.Path, sys.argv[1:])
index = json.loads((folder / "index.json").read_text())
files = []
for entry in index["files"]:
    path = folder / entry["name"]
    assert path.stat().st_size == entry["bytes"]
    files.append((path.read_bytes(), read_file(path)))
    check_package(path, files[-1][1])
with output.open("wb") as whole:
    for name, tensor in sorted(index["tensors"].items()):
        width, end = WIDTH[tensor["dtype"]], 0
        for file, offset, begin, elems in sorted(tensor["chunks"], key=lambda chunk: chunk[2]):
            assert begin == end
            end = begin + elems
            raw, tensors = files[file]
            data = raw[offset:offset + elems * width]
            part = name if [begin, elems] == [0, max(end, 1)] and name in tensors else f"{name}[{begin}:{end}]"
            assert tensors[part][2] == data, part
            whole.write(data)
