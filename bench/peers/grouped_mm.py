#!/usr/bin/env python3
"""torch's grouped_mm on the shapes of moe_gemm_bench: forward, gradient of the rows, gradient of the weights (bf16
results; torch has no fp32 ones), and the first product of an expert with its activation as separate kernels.

Run: grouped_mm.py
"""
import bisect
import itertools
import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = [(65536, 2048, 1536, 64), (65536, 2048, 2816, 32), (32768, 7168, 4096, 32)]


def group_sizes(kind, rows, experts):
    """The sizes of gemm_sizes.hpp."""
    if kind == "equal":
        return [rows // experts] * experts
    sizes = [0] * experts
    sizes[0], sizes[experts // 2] = 127, 1
    drawn = [e for e in range(1, experts - 1) if e != experts // 2]
    until = list(itertools.accumulate(1.0 / (i + 1) if kind == "zipf" else 1.0 for i in range(len(drawn))))
    state = 1
    for _ in range(rows - 128):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        at = (state >> 33) / 2147483648.0 * until[-1]
        sizes[drawn[min(bisect.bisect_right(until, at), len(drawn) - 1)]] += 1
    return sizes


def median_us(call, repetitions=9):
    torch.cuda.synchronize()
    time.sleep(0.04)  # every row starts from the same clocks
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 500)
    return statistics.median(times)


def swiglu(y):
    half = y.shape[1] // 2
    return F.silu(y[:, :half]) * y[:, half:]


def main():
    print(f"{'rows':>6} {'K':>5} {'N':>5} {'E':>3} {'sizes':<12} {'operation':<28} {'us':>8} {'TFLOP/s':>8}")
    for rows, k, n, experts in SHAPES:
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        x, dy, weights = make(rows, k), make(rows, n), make(experts, n, k) * k**-0.5
        for kind in ("equal", "multinomial", "zipf"):
            sizes = group_sizes(kind, rows, experts)
            ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
            forward = lambda: torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
            operations = {
                "product": forward,
                "gradient of rows": lambda: torch._grouped_mm(dy, weights, offs=ends),
                "gradient of weights, bf16": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
                "product, silu, multiply": lambda: swiglu(forward()),
            }
            for name, call in operations.items():
                us = median_us(call)
                rate = 2 * sum(sizes) * n * k / us * 1e-6
                print(f"{rows:6} {k:5} {n:5} {experts:3} {kind:<12} {name:<28} {us:8.1f} {rate:8.1f}", flush=True)
        del x, dy, weights
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    us = median_us(lambda: a @ b)
    print(f"{'dense 8192 x 8192 x 8192':<63} {us:8.1f} {2 * 8192**3 / us * 1e-6:8.1f}")


if __name__ == "__main__":
    main()
