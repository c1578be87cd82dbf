#!/usr/bin/env python3
"""Compares pleat_torch.py with torch's own attention and with a plain mixture of experts, outputs and gradients, and times both.

Run: check.py (one GPU), or torchrun --nproc-per-node <GPUs> check.py. Exit code 77 without PyTorch or a GPU.
"""
import os
import sys

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("skipped: PyTorch is not installed")
    sys.exit(77)
if not torch.cuda.is_available():
    print("skipped: no GPU")
    sys.exit(77)

import pleat_torch


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def milliseconds(run, samples=10):
    times = []
    for _ in range(samples + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[samples // 2]


def check_ring(ops, comm, ranks):
    batch, tokens, heads, kv_heads, dim = 1, 2048 * ranks, 16, 4, 128
    torch.manual_seed(0)  # the same whole tensors on every rank
    shapes = [(batch, tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, weight = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    ring = ops.Ring(comm, batch, tokens, heads, kv_heads, dim, dim, torch.bfloat16)
    mine = torch.tensor(ring.positions(), device="cuda")

    local = [t[:, mine].clone().requires_grad_() for t in (q, k, v)]
    out = pleat_torch.attend(ring, *local)
    gradients = torch.autograd.grad(out, local, weight[:, mine], retain_graph=True)

    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in whole), is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = sdpa()
    wanted = torch.autograd.grad(expected, whole, weight, retain_graph=True)
    apart = {"out": relative(out, expected[:, mine]),
             **{name: relative(g, w[:, mine]) for name, g, w in zip(("dq", "dk", "dv"), gradients, wanted)}}

    forward = milliseconds(lambda: pleat_torch.attend(ring, *local))
    both = milliseconds(lambda: torch.autograd.grad(pleat_torch.attend(ring, *local), local, weight[:, mine]))
    peer_forward = milliseconds(sdpa)
    peer_both = milliseconds(lambda: torch.autograd.grad(sdpa(), whole, weight))
    return apart, (f"{tokens} tokens, ms: forward {forward:.3f}, with backward {both:.3f}; "
                   f"torch's attention of the whole sequence on one GPU {peer_forward:.3f}, {peer_both:.3f}")


def check_experts(ops, comm, rank, ranks):
    tokens, hidden, experts, k = 4096, 1024, 8 * ranks, 4
    torch.manual_seed(100 + rank)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scores, ids = torch.rand(tokens, experts, device="cuda").topk(k, dim=1)
    weights = (scores / scores.sum(1, keepdim=True)).detach().requires_grad_()
    dy = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(1)
    scale = torch.rand(experts, hidden, device="cuda", dtype=torch.bfloat16) + 0.5  # an expert scales its rows

    op = ops.Experts(comm, tokens, hidden, experts, k, torch.bfloat16)
    chosen = ids.int()

    def layer():
        rows, offsets, call = pleat_torch.dispatch(op, x, chosen, weights)
        local = torch.arange(rows.shape[0], device="cuda")
        expert = torch.bucketize(local, offsets[1:-1], right=True) + rank * (experts // ranks)
        live = (local < offsets[-1]).unsqueeze(1)  # what lies past the last row was never written
        return pleat_torch.combine(op, torch.where(live, rows * scale[expert], 0), call)

    def plain():
        return sum((weights[:, j:j + 1] * (x * scale[ids[:, j]]).float()) for j in range(k))

    got, want = layer(), plain()
    gradients = torch.autograd.grad(got, (x, weights), dy)
    wanted = torch.autograd.grad(want, (x, weights), dy.float())
    apart = {"y": relative(got, want), **{name: relative(g, w) for name, g, w in zip(("dx", "dweights"), gradients, wanted)}}

    def both_ways():
        rows, _, call = op.dispatch(x, chosen, weights)
        op.combine(rows, call)

    once = milliseconds(both_ways)
    return apart, f"{tokens} tokens: dispatch and combine {once:.3f} ms"


def main():
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29571")):
        os.environ.setdefault(name, value)
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", local))
    if rank == 0:
        pleat_torch.build()
    dist.barrier()
    ops = pleat_torch.build()
    comm = pleat_torch.nccl_comm()
    failed = 0
    for name, run in (("ring", lambda: check_ring(ops, comm, ranks)), ("experts", lambda: check_experts(ops, comm, rank, ranks))):
        apart, text = run()
        failed |= not max(apart.values()) < 1e-2
        print(f"{name}, rank {rank} of {ranks}: relative to torch", *(f"{part} {value:.1e}" for part, value in apart.items()),
              f"; {text}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
