#!/usr/bin/env python3
"""Trains with plain.cu on one GPU and with sharded.cu on two, and compares the losses: equal but for the rounding of
bf16, whose sums over rows differ. Where there is one GPU, sharded.cu runs as one rank, with the very losses of plain.cu.
Run: check.py <plain> <sharded>. Exit code 77 where there is no GPU."""
import os
import re
import socket
import subprocess
import sys

MOST_RANKS = 2
TOLERANCE = 0.02  # of the first loss
LEAST_DECREASE = 0.7


def gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:
        return 0
    return len(re.findall(r"^GPU ", listed, re.M))


def losses(text):
    return [float(value) for value in re.findall(r"loss ([0-9.]+)", text)]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(program, count):
    environment = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "PLEAT_PORT": str(free_port()),
                   "NCCL_NVLS_ENABLE": "0"}
    ranks = [subprocess.Popen([program], stdout=subprocess.PIPE, text=True,
                              env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(count)]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    if any(rank.returncode != 0 for rank in ranks):
        sys.exit(f"a rank of {program} failed: {[rank.returncode for rank in ranks]}")
    return outputs[0]


def main(plain, sharded):
    ranks = min(MOST_RANKS, gpus())
    if ranks == 0:
        print("skipped: no GPU")
        sys.exit(77)
    expected = losses(subprocess.run([plain], capture_output=True, text=True, check=True, timeout=120).stdout)
    found = losses(run_ranks(sharded, ranks))
    print("plain  ", expected, f"\nsharded over {ranks}", found)
    if len(expected) < 2 or len(expected) != len(found):
        sys.exit("the programs print other losses")
    if expected[-1] > LEAST_DECREASE * expected[0]:
        sys.exit("the loss does not go down")
    tolerance = TOLERANCE if ranks > 1 else 0
    if any(abs(f - e) > tolerance * expected[0] for e, f in zip(expected, found)):
        sys.exit(f"losses differ by more than {tolerance} of the first")


if __name__ == "__main__":
    main(*sys.argv[1:])
