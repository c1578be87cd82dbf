"""pleat in PyTorch: ring attention and expert dispatch as autograd functions over a process group."""
import pathlib

import nvidia.nccl
import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

HERE = pathlib.Path(__file__).resolve().parent


def build(folder=None, verbose=False):
    """Compiles the module for this machine's GPUs, or takes what an earlier call has left."""
    nccl = pathlib.Path(list(nvidia.nccl.__path__)[0])
    return load(name="pleat_torch_ops", sources=[str(HERE / f) for f in ("module.cpp", "ring.cu", "experts.cu")],
                extra_include_paths=[str(HERE.parents[1] / "include"), str(nccl / "include")],
                extra_cflags=["-std=c++20", "-O2"], extra_cuda_cflags=["-std=c++20", "-O3"],
                extra_ldflags=[f"-L{nccl / 'lib'}", "-l:libnccl.so.2", f"-Wl,-rpath,{nccl / 'lib'}", "-lcuda"],
                build_directory=folder, verbose=verbose)


def nccl_comm(group=None):
    """The address of a process group's NCCL communicator, which stays torch's."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cuda"))
    dist.barrier(group)  # torch makes it at the first collective
    return backend._comm_ptr()


class Attend(torch.autograd.Function):
    """attend(ring, q, k, v): attention of this rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(ctx, ring, q, k, v):
        out, kept = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, kept)
        return out

    @staticmethod
    def backward(ctx, dout):
        return None, *ctx.ring.backward(*ctx.saved_tensors, dout.contiguous())


class Dispatch(torch.autograd.Function):
    """rows, offsets, call = dispatch(experts, x, ids, weights); rows of the local expert e: offsets[e] to offsets[e + 1]."""

    @staticmethod
    def forward(ctx, experts, x, ids, weights):
        rows, offsets, call = experts.dispatch(x, ids, weights)
        ctx.experts, ctx.call = experts, call
        ctx.mark_non_differentiable(offsets)
        return rows, offsets, call

    @staticmethod
    def backward(ctx, drows, _, __):
        dx, dweights = ctx.experts.dispatch_backward(drows.contiguous(), ctx.call)
        return None, dx, None, dweights


class Combine(torch.autograd.Function):
    """y = combine(experts, expert_out, call): each token's weighted sum over its experts."""

    @staticmethod
    def forward(ctx, experts, expert_out, call):
        ctx.experts, ctx.call = experts, call
        ctx.save_for_backward(expert_out)
        return experts.combine(expert_out, call)

    @staticmethod
    def backward(ctx, dy):
        return None, ctx.experts.combine_backward(dy.contiguous(), ctx.saved_tensors[0], ctx.call), None


attend, dispatch, combine = Attend.apply, Dispatch.apply, Combine.apply
