#!/usr/bin/env python3
"""Trains the same steps on ranks that are threads and on ranks that mpirun starts; losses and norms must be equal.

Run: compare.py <train_moe> <train_moe_mpi> <mpirun> <its flag for a number of ranks>
"""
import json
import pathlib
import subprocess
import sys
import tempfile

THREADS, PROCESSES, MPIRUN, FLAG = sys.argv[1:]
MODEL = ["--steps", "3", "--seq", "120", "--layers", "4", "--hidden", "32", "--experts", "16", "--top-k", "2",
         "--dtype", "f64", "--quiet"]
MESHES = [("pp1-dp4-cp2-ep8", 8, 4), ("pp1-dp2-cp3-ep2", 6, 2), ("pp2-dp2-cp2-ep2", 8, 4)]


def steps(program, arguments):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "steps.json"
        subprocess.run([*program, *arguments, "--json", str(file)], check=True)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [[row[name] for name in ("step", "loss", "balance", "norm", "tokens")] for row in rows]


failed = False
for mesh, ranks, batch in MESHES:
    arguments = ["--mesh", mesh, *MODEL, "--batch", str(batch), "--micro-batch", "1"]
    threads = steps([THREADS], arguments)
    processes = steps([MPIRUN, FLAG, str(ranks), PROCESSES], arguments)
    finite = all(None not in step for step in threads)  # a number that is not finite is logged as null
    equal = threads == processes and len(threads) == 3 and finite
    print(f"{mesh}: {'equal' if equal else f'FAILED: {threads} on threads, {processes} on MPI'}")
    failed = failed or not equal
sys.exit(failed)
