#!/usr/bin/env python3
"""PyTorch's FSDP2 on the shapes of fsdp_bench, a rank per GPU: with its defaults, and tuned (explicit prefetch of the next
unit in both directions, bf16 sums). A step is a forward and a backward pass; the computation alone is the same modules
without sharding. The host's part is the time until the step is enqueued.

Run: fsdp2.py [--ranks <number, 2>] [--only <part of a model's name>] [--samples <number>]
"""
import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Gain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    """The parameters of fsdp_bench's transformer layer, as a chain."""

    def __init__(self, hidden=4096, kv=1024, ffn=14336, odd=1000):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.chain = nn.Sequential(Gain(hidden), linear(hidden, hidden), linear(hidden, kv), linear(kv, hidden),
                                   linear(hidden, hidden), Gain(hidden), linear(hidden, ffn), linear(ffn, hidden),
                                   linear(hidden, odd), linear(odd, hidden))

    def forward(self, x):
        return self.chain(x)


class Experts(nn.Module):
    def __init__(self, count=16, hidden=2048, ffn=1408):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, hidden, ffn) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(count, ffn, hidden) * ffn**-0.5)

    def forward(self, x):
        return torch.bmm(torch.bmm(x, self.up), self.down)


def make(units, layer, device, reduce_dtype):
    torch.manual_seed(0)
    with device:  # drawn there, not on the host
        model = nn.Sequential(*[layer() for _ in range(units)])
    if reduce_dtype is None:  # without sharding
        return model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for unit in model:
        fully_shard(unit, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def prefetch(model):
    units = list(model)
    for unit, following in zip(units, units[1:]):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def measure(model, x, samples, rank):
    gradient = torch.randn_like(model(x))
    times, host = [], []
    for sample in range(samples + 3):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        model(x).backward(gradient)
        end.record()
        enqueued = time.perf_counter() - start
        torch.cuda.synchronize()
        for p in model.parameters():
            p.grad = None
        if sample >= 3:
            times.append(begin.elapsed_time(end))
            host.append(enqueued * 1e3)
    slowest = torch.tensor([sorted(times)[len(times) // 2], sorted(host)[len(host) // 2]], device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def work(rank, world, only, samples):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    square = lambda: nn.Linear(8192, 8192, bias=False)
    cases = [("8 x 8192^2, 16 tokens", 8, square, (16, 8192)), ("8 x 8192^2, 8192 tokens", 8, square, (8192, 8192)),
             ("8 layers, 8192 tokens", 8, Layer, (8192, 4096)), ("4 expert units, 4096 tokens each", 4, Experts, (16, 4096, 2048))]
    if rank == 0:
        print(f"FSDP2, torch {torch.__version__}\n{'model':34} {'way':28} {'step ms':>8} {'host ms':>8} {'of alone':>8} {'peak MiB':>9}")
    for name, units, layer, shape in cases:
        if only not in name:
            continue
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        alone = 0.0
        for way, reduce_dtype, prefetches in (("alone, unsharded", None, False), ("fp32 sums", torch.float32, False),
                                              ("fp32 sums, prefetch", torch.float32, True), ("bf16 sums", torch.bfloat16, False),
                                              ("bf16 sums, prefetch", torch.bfloat16, True)):
            model = make(units, layer, device, reduce_dtype)
            if prefetches:
                prefetch(model)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step, host = measure(model, x, samples, rank)
            alone = alone or step
            if rank == 0:
                print(f"{name:34} {way:28} {step:8.3f} {host:8.3f} {step / alone:8.3f} {torch.cuda.max_memory_allocated() >> 20:9}", flush=True)
            del model
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--samples", type=int, default=7)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"skipped: {torch.cuda.device_count()} GPUs, {options.ranks} are needed")
        sys.exit(77)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(30000 + os.getpid() % 10000))
    mp.spawn(work, args=(options.ranks, options.only, options.samples), nprocs=options.ranks)
