#!/usr/bin/env python3
"""Compares pleat_torch.py with torch's own attention and a plain mixture of experts, outputs and gradients, with times.

Run: check.py (one GPU), or torchrun --nproc-per-node <GPUs> check.py, or check.py --ranks <GPUs>, which calls torchrun.
Exit code 77 without PyTorch or that many GPUs.
"""
import os
import sys
import time
import traceback

try:
    import torch
    import torch.distributed as dist

    import pleat_torch
except ImportError as error:
    print(f"skipped: PyTorch for GPUs is not installed: {error}")
    sys.exit(77)

RANK, RANKS, LOCAL_RANK = (int(os.environ.get(name, value)) for name, value in
                           (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
BEGAN = time.monotonic()


def say(*words):
    print(f"{time.monotonic() - BEGAN:5.1f} s, rank {RANK} of {RANKS}:", *words, flush=True)


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def milliseconds(run, samples=10):
    """The median of single calls, as a step sees them: launches from Python and what the GPU does."""
    times = []
    for _ in range(samples + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[samples // 2]


def graph_milliseconds(run):
    """The same of a CUDA graph of the call: what the GPU does alone."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # torch's NCCL has a thread that looks at events
        run()
    return milliseconds(graph.replay)


def check_ring(ops, comm, tokens):
    batch, heads, kv_heads, dim = 1, 16, 4, 128
    torch.manual_seed(0)  # the same whole tensors on every rank
    shapes = [(batch, tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, weight = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    ring = ops.Ring(comm, batch, tokens, heads, kv_heads, dim, dim, torch.bfloat16)
    mine = torch.tensor(ring.positions(), device="cuda")

    local = [t[:, mine].clone().requires_grad_() for t in (q, k, v)]
    my_weight = weight[:, mine]
    out = pleat_torch.attend(ring, *local)
    gradients = torch.autograd.grad(out, local, my_weight)

    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in whole), is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = sdpa()
    wanted = torch.autograd.grad(expected, whole, weight)
    apart = {"out": relative(out, expected[:, mine]),
             **{name: relative(g, w[:, mine]) for name, g, w in zip(("dq", "dk", "dv"), gradients, wanted)}}
    del out, gradients, expected, wanted

    calls = {"ring": (lambda: pleat_torch.attend(ring, *local),
                      lambda: torch.autograd.grad(pleat_torch.attend(ring, *local), local, my_weight)),
             "torch, one GPU": (sdpa, lambda: torch.autograd.grad(sdpa(), whole, weight))}
    times = [f"{name} {milliseconds(forward):.2f} and {milliseconds(both):.2f} "
             f"(graph {graph_milliseconds(forward):.2f} and {graph_milliseconds(both):.2f})"
             for name, (forward, both) in calls.items()]
    return apart, f"ring, {tokens} tokens", "forward and with backward, ms: " + ", ".join(times)


def check_experts(ops, comm):
    tokens, hidden, experts, k = 4096, 1024, 8 * RANKS, 4
    torch.manual_seed(100 + RANK)
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
        expert = torch.bucketize(local, offsets[1:-1], right=True) + RANK * (experts // RANKS)
        live = (local < offsets[-1]).unsqueeze(1)  # what lies past the last row was never written
        return pleat_torch.combine(op, torch.where(live, rows * scale[expert], 0), call)

    def plain():
        return sum((weights[:, j:j + 1] * (x * scale[ids[:, j]]).float()) for j in range(k))

    got, want = layer(), plain()
    gradients = torch.autograd.grad(got, (x, weights), dy)
    wanted = torch.autograd.grad(want, (x, weights), dy.float())
    apart = {"y": relative(got, want),
             **{name: relative(g, w) for name, g, w in zip(("dx", "dweights"), gradients, wanted)}}

    def both_ways():
        rows, _, call = op.dispatch(x, chosen, weights)
        op.combine(rows, call)

    return apart, f"experts, {tokens} tokens per rank", f"dispatch and combine, ms: {milliseconds(both_ways):.2f}"


def compare():
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29571")):
        os.environ.setdefault(name, value)
    torch.cuda.set_device(LOCAL_RANK)
    say("compiles the module, or loads it")
    ops = pleat_torch.build(verbose=LOCAL_RANK == 0)
    say("joins the process group")
    dist.init_process_group("nccl", rank=RANK, world_size=RANKS, device_id=torch.device("cuda", LOCAL_RANK))
    comm = pleat_torch.nccl_comm()
    failed = 0
    for run in (lambda: check_ring(ops, comm, 2048 * RANKS), lambda: check_ring(ops, comm, 16384 * RANKS),
                lambda: check_experts(ops, comm)):
        apart, name, times = run()
        failed |= not max(apart.values()) < 1e-2
        say(f"{name}: relative to torch", *(f"{part} {value:.1e}" for part, value in apart.items()))
        say(times)
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


def main():
    ranks = int(sys.argv[2]) if sys.argv[1:2] == ["--ranks"] else 1
    if torch.cuda.device_count() < ranks:
        print(f"skipped: {torch.cuda.device_count()} GPUs of {ranks}")
        return 77
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        os.execv(sys.executable, [sys.executable, *torchrun, __file__])
    try:
        return compare()
    except Exception:  # peers wait for this rank, and would while its objects are taken down
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
