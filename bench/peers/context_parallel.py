#!/usr/bin/env python3
"""PyTorch's context_parallel (all-to-all rotation, cuDNN) on the rows of ring_attention_bench, a rank per GPU, and cuDNN
on one GPU: causal, bf16, TFLOP/s per GPU counting the pairs that are seen, the slower rank's median.

Run: context_parallel.py [--ranks <number, 2>] [--tokens <number>,...] [--samples <number>]
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel


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


def rates(q, k, v, count, samples):
    for t in (q, k, v):
        t.requires_grad_()
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # context_parallel puts its own there
    forward = median_ms(attend, samples)
    out = attend()
    gradient = torch.randn_like(out)
    backward = median_ms(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), samples)
    for t in (q, k, v):
        t.requires_grad_(False)  # context_parallel gives them their whole length back
    return f"forward {count / forward / 1e9:.0f}, backward {2.5 * count / backward / 1e9:.0f} TFLOP/s"


def draw(tokens, heads, dim):
    return [torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def flops(tokens, heads, dim):
    return tokens * tokens / 2 * heads * 2 * dim * 2


def together(mesh, tokens, heads, dim, samples):
    q, k, v = draw(tokens, heads, dim)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return rates(q, k, v, flops(tokens, heads, dim) / mesh.size(), samples)


def alone(tokens, heads, dim, samples):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return rates(*draw(tokens, heads, dim), flops(tokens, heads, dim), samples)


def work(rank, ranks, lengths, samples):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    set_rotate_method("alltoall")
    mesh = init_device_mesh("cuda", (ranks,))
    row = lambda name, text: print(f"{name}: {text}", flush=True) if rank == 0 else None
    row("cuDNN, one GPU, 32/32 d128 16k", alone(16384, 32, 128, samples))
    for tokens in lengths:
        row(f"context_parallel 32/32 d128 {tokens // 1024}k", together(mesh, tokens, 32, 128, samples))
        as_many = round(tokens / ranks**0.5 / 128) * 128  # tokens of one GPU that take as many operations
        row(f"cuDNN, one GPU, 32/32 d128, {as_many} tokens", alone(as_many, 32, 128, samples))
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
