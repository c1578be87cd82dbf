"""pleat in PyTorch: ring attention and expert dispatch as autograd functions over a process group."""
import fcntl
import os
import pathlib

import nvidia.nccl
import torch
import torch.distributed as dist
from torch.utils import cpp_extension

HERE = pathlib.Path(__file__).resolve().parent


def build(folder=None, verbose=False):
    """Compiles the module for this machine's GPU, or takes what an earlier call has left. Ranks may call it together:
    one compiles, the others wait for it, and no longer than it lives.
    """
    nccl = pathlib.Path(list(nvidia.nccl.__path__)[0])
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major == 9 else ''}"  # Hopper's fast kernels need sm_90a, torch's default is sm_90
    root = folder or os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = pathlib.Path(root) / f"pleat_torch_{torch.__version__}_{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "owner", "w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, which outlives a process that was killed
        return cpp_extension.load(
            name="pleat_torch_ops", sources=[str(HERE / f) for f in ("module.cpp", "ring.cu", "experts.cu")],
            extra_include_paths=[str(HERE.parents[1] / "include"), str(nccl / "include")],
            extra_cflags=["-std=c++20", "-O2"],
            extra_cuda_cflags=["-std=c++20", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"],
            extra_ldflags=[f"-L{nccl / 'lib'}", "-l:libnccl.so.2", f"-Wl,-rpath,{nccl / 'lib'}", "-lcuda"],
            build_directory=str(folder), verbose=verbose)


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
