#!/usr/bin/env python3
"""PyTorch's context_parallel (all-to-all rotation, cuDNN) on the rows of ring_attention_bench, a rank per GPU: causal, bf16,
TFLOP/s per GPU counting the pairs that are seen, the slower rank's median.

Run: context_parallel.py [--ranks <number, 2>] [--tokens <number>,...] [--samples <number>]
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def median_ms(run, samples):
    times = []
    for sample in range(2 + samples):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if sample >= 2:
            times.append(slowest.item())
    return sorted(times)[len(times) // 2]


def measure(mesh, tokens, heads, dim, samples):
    q, k, v = (torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for t in (q, k, v):
            t.requires_grad_()
        attend = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
        forward = median_ms(attend, samples)
        out = attend()
        gradient = torch.randn_like(out)
        backward = median_ms(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), samples)
        for t in (q, k, v):
            t.requires_grad_(False)  # the context gives them their whole length back
    flops = tokens * tokens / 2 * heads * 2 * dim * 2 / mesh.size()
    return flops / forward / 1e9, 2.5 * flops / backward / 1e9


def work(rank, ranks, lengths, samples):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    set_rotate_method("alltoall")
    mesh = init_device_mesh("cuda", (ranks,))
    for tokens in lengths:
        forward, backward = measure(mesh, tokens, 32, 128, samples)
        if rank == 0:
            print(f"context_parallel 32/32 d128 {tokens // 1024}k: forward {forward:.0f}, backward {backward:.0f} TFLOP/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(30000 + os.getpid() % 10000))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="16384,32768,65536")
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"skipped: {torch.cuda.device_count()} GPUs, {options.ranks} are needed")
        sys.exit(77)
    lengths = [int(tokens) for tokens in options.tokens.split(",")]
    mp.spawn(work, args=(options.ranks, lengths, options.samples), nprocs=options.ranks)
