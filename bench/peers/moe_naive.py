#!/usr/bin/env python3
"""Dispatch and combine in plain PyTorch on the shapes of moe_bench, a rank per GPU: rows are sorted by expert, one per (token,
expert), sent by all_to_all_single, and sorted again by the receiver; results take the way back.

Run: moe_naive.py [--ranks <number, 2>]
"""
import argparse
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHAPES = [(4096, 7168, 256, 8), (16384, 2048, 128, 8)]


def dispatch(x, ids, experts, world):
    k, local = ids.shape[1], experts // world
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts)
    sent = counts.view(world, local).sum(1).tolist()
    came = arrived.view(world, local).sum(1).tolist()
    rows = x.new_empty(sum(came), x.shape[1])
    dist.all_to_all_single(rows, x[order // k], came, sent)
    expert = torch.arange(local, device=x.device).repeat(world).repeat_interleave(arrived)
    by_expert = torch.argsort(expert, stable=True)
    return rows[by_expert], (order, by_expert, sent, came)


def combine(rows, weights, plan):
    order, by_expert, sent, came = plan
    back = torch.empty_like(rows)
    back[by_expert] = rows
    results = rows.new_empty(sum(sent), rows.shape[1])
    dist.all_to_all_single(results, back, sent, came)
    unsorted = torch.empty_like(results)
    unsorted[order] = results
    return (unsorted.view(*weights.shape, -1).float() * weights[..., None]).sum(1).to(rows.dtype)


def median_us(call, repetitions=7):
    times = []
    for i in range(3 + repetitions):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def main(rank, world):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    for tokens, hidden, experts, k in SHAPES:
        torch.manual_seed(rank)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
        weights = torch.rand(tokens, k, device="cuda")
        rows, plan = dispatch(x, ids, experts, world)
        y = combine(rows, weights, plan)
        error = ((y.float() - x.float() * weights.sum(1, keepdim=True)).norm() / y.float().norm()).item()
        assert error < 1e-2, error
        there = median_us(lambda: dispatch(x, ids, experts, world))
        back = median_us(lambda: combine(rows, weights, plan))
        if rank == 0:
            print(f"T{tokens} H{hidden} E{experts} k{k}: dispatch {there:.0f} us, combine {back:.0f} us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    if torch.cuda.device_count() < ranks:
        print(f"skipped: {torch.cuda.device_count()} GPUs, {ranks} are needed")
        sys.exit(77)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(30000 + os.getpid() % 10000))
    mp.spawn(main, args=(ranks,), nprocs=ranks)
