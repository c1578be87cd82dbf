#!/usr/bin/env python3
"""Ring attention of pleat in JAX: a function with a gradient, over the devices of a mesh axis, tested against JAX's own.

Run: ring_jax.py [cp]. Builds ring_ffi.cpp with $CXX (g++) on first use. Exit code 77 where JAX is not installed.
"""
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile

CP = int(sys.argv[1]) if len(sys.argv) > 1 else 4
try:
    import jax
except ImportError:
    print("skipped: JAX is not installed (pip install jax)")
    sys.exit(77)
jax.config.update("jax_num_cpu_devices", CP)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

HERE = pathlib.Path(__file__).resolve().parent


def build(folder):
    library = folder / "ring_ffi.so"
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", HERE / "ring_ffi.cpp",
                    f"-I{HERE.parents[1] / 'include'}", "-isystem", jax.ffi.include_dir(), "-o", library], check=True)
    return ctypes.CDLL(str(library))


class Ring:
    """Attention over `cp` devices; q [batch, local_tokens, heads, dim] of each, in the order of `positions`."""

    def __init__(self, library, cp, causal=True):
        self.library, self.cp, self.causal = library, cp, causal
        library.pleat_world_new.restype = ctypes.c_void_p
        library.pleat_ring_plan.restype = ctypes.c_int64
        self.world = library.pleat_world_new(cp)
        for name in ("Forward", "Backward"):
            jax.ffi.register_ffi_target(f"pleat_ring_{name.lower()}", jax.ffi.pycapsule(getattr(library, f"PleatRing{name}")),
                                        platform="cpu")

    def close(self):
        """The ranks go: after the last call has ended."""
        self.library.pleat_world_delete(ctypes.c_void_p(self.world))

    def plan(self, rank, q, k, v):
        """Bytes kept between the passes, and the places of the rank's tokens in the sequence."""
        positions = np.empty(q.shape[1], np.int64)
        kept = self.library.pleat_ring_plan(
            self.cp, rank, ctypes.c_int64(q.shape[0]), ctypes.c_int64(q.shape[1]), q.shape[2], k.shape[2], q.shape[3], v.shape[3],
            int(self.causal), positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
        return kept, positions

    def attention(self, axis):
        """A function of q, k, v for use inside shard_map over `axis`."""
        options = {"world": np.int64(self.world), "causal": self.causal}

        @jax.custom_vjp
        def ring(q, k, v):
            return forward(q, k, v)[0]

        def forward(q, k, v):
            rank = jax.lax.axis_index(axis).astype(jnp.int32)
            kinds = (jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
                     jax.ShapeDtypeStruct((self.plan(0, q, k, v)[0],), jnp.uint8))
            out, kept = jax.ffi.ffi_call("pleat_ring_forward", kinds, has_side_effect=True)(rank, q, k, v, **options)
            return out, (rank, q, k, v, out, kept)

        def backward(residuals, dout):
            kinds = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in residuals[1:4])
            return jax.ffi.ffi_call("pleat_ring_backward", kinds, has_side_effect=True)(*residuals, dout, **options)

        ring.defvjp(forward, backward)
        return ring


def reference(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def main():
    batch, tokens, heads, kv_heads, dim = 2, 24 * CP, 4, 2, 16
    keys = jax.random.split(jax.random.key(0), 4)
    q, weight = (jax.random.normal(key, (batch, tokens, heads, dim)) for key in keys[:2])
    k, v = (jax.random.normal(key, (batch, tokens, kv_heads, dim)) for key in keys[2:])

    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(build(pathlib.Path(folder)), CP)
        local = [jax.ShapeDtypeStruct((batch, tokens // CP, *t.shape[2:]), t.dtype) for t in (q, k, v)]
        order = np.concatenate([ring.plan(rank, *local)[1] for rank in range(CP)])
        sharded = jax.shard_map(ring.attention("cp"), mesh=Mesh(np.array(jax.devices()[:CP]), ("cp",)),
                                in_specs=PartitionSpec(None, "cp"), out_specs=PartitionSpec(None, "cp"), check_vma=False)

        def attend(q, k, v):
            return sharded(q[:, order], k[:, order], v[:, order])[:, np.argsort(order)]

        worst = 0.0
        for f in (lambda attention: attention(q, k, v),
                  *(lambda attention, i=i: jax.grad(lambda *x: jnp.sum(attention(*x) * weight), argnums=i)(q, k, v)
                    for i in range(3))):
            got, want = jax.jit(lambda: f(attend))(), f(reference)
            worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
        ring.close()
        print(f"cp={CP}: output and gradients differ from JAX's own by at most {worst:.1e} (relative)")
        return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
