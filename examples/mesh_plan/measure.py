#!/usr/bin/env python3
"""Runs the trainer on many meshes and compares its memory with the estimates.

Run: measure.py TRAIN_MOE MESH_PLAN [--gpu] [--text FILE] [--csv FILE] [--only N,N..]
Without --gpu small models on host ranks, in f64; with --gpu large ones in bf16, whose step times are compared as well.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

SMALL = {"layers": 4, "hidden": 64, "heads": 4, "kv-heads": 2, "head-dim": 16, "experts": 8, "top-k": 2, "inner": 32, "seq": 64}
LATENT = {"kv-heads": 4, "lora": 32, "nope-dim": 16, "rope-dim": 8, "value-dim": 16, "shared": 1, "dense-layers": 1,
          "dense-inner": 96, "layers": 5, "balance": "sequence"}
HOST = [
    ("pp1-dp1-cp1-ep1", {}),
    ("pp1-dp4-cp1-ep2-r2", {"micro-batch": 2}),
    ("pp1-dp2-cp2-ep2", {"prefetch": 0, "micro-batches": 3}),
    ("pp1-dp8-cp1-ep2-r4", {"prefetch": 3, "layers": 8}),
    ("pp1-dp4-cp2-ep8", {"optimizer": "muon", "layers": 6}),
    ("pp1-dp2-cp4-ep8", {**LATENT, "capacity": 8}),
    ("pp1-dp2-cp2-ep4", {"optimizer": "muon", "transport": "collective"}),
    ("pp1-dp3-cp1-ep3", {"experts": 9, "seq": 96, "hidden": 48}),
    ("pp4-dp1-cp2-ep1", {"schedule": "1f1b", "micro-batches": 8}),
    ("pp2-dp2-cp2-ep2", {"schedule": "zb-v", "micro-batches": 4}),
    ("pp4-dp2-cp1-ep2", {"schedule": "zb-v", "micro-batches": 9, "layers": 9}),
    ("pp2-dp4-cp1-ep4", {"schedule": "zb-v", "micro-batches": 4, "layers": 7, "optimizer": "muon"}),
    ("pp2-dp2-cp1-ep2", {"schedule": "dualpipev", "micro-batches": 26}),
    ("pp3-dp2-cp1-ep1", {"schedule": "dualpipev", "micro-batches": 8, "layers": 10, "seq": 48}),
    ("pp2-dp2-cp2-ep4", {**LATENT, "schedule": "dualpipev", "micro-batches": 4}),
    ("pp2-dp2-cp4-ep2", {"schedule": "dualpipev", "micro-batches": 4, "transport": "collective"}),
]
QWEN = {"layers": 2, "hidden": 2048, "heads": 32, "kv-heads": 4, "head-dim": 128, "experts": 128, "top-k": 8, "inner": 768,
        "vocabulary": 151936, "seq": 4096, "capacity": 1.25, "force-balance": None}
DEEPSEEK = {"layers": 3, "hidden": 2048, "heads": 16, "kv-heads": 16, "head-dim": 192, "lora": 512, "nope-dim": 128, "rope-dim": 64,
            "value-dim": 128, "experts": 64, "top-k": 6, "inner": 1408, "shared": 2, "dense-layers": 1, "dense-inner": 10944,
            "vocabulary": 102400, "seq": 4096, "capacity": 1.25, "force-balance": None, "balance": "sequence"}
ONE, EP, CP, PP = "pp1-dp1-cp1-ep1", "pp1-dp2-cp1-ep2", "pp1-dp1-cp2-ep2", "pp2-dp1-cp1-ep1"
# The rates of estimate/rates.hpp were fitted to these; what they took is in h200.csv.
FITTED = [
    (ONE, {**QWEN, "micro-batches": 2}),
    (ONE, {**DEEPSEEK, "micro-batches": 2}),
    (ONE, {**QWEN, "seq": 1024, "micro-batches": 4}),
    (ONE, {**QWEN, "seq": 8192, "capacity": 0}),
    ("pp1-dp2-cp1-ep1", {**QWEN, "seq": 8192, "prefetch": 2}),
    ("pp1-dp2-cp1-ep1-r2", QWEN),
    (EP, {**DEEPSEEK, "optimizer": "muon"}),
    (EP, {**QWEN, "layers": 4, "seq": 2048, "micro-batches": 4}),
    ("pp1-dp1-cp2-ep1", {**QWEN, "seq": 8192, "micro-batches": 2}),
]
# And not to these.
UNSEEN = [
    (ONE, {**QWEN, "layers": 4, "seq": 2048}),
    (ONE, {**QWEN, "layers": 3, "seq": 16384}),
    (EP, QWEN),
    (CP, {**QWEN, "seq": 16384}),
    (CP, {**DEEPSEEK, "seq": 8192}),
    (PP, {**QWEN, "layers": 4, "schedule": "zb-v", "micro-batches": 4}),
    (PP, {**QWEN, "layers": 4, "schedule": "dualpipev", "seq": 2048, "micro-batches": 6}),
    (EP, {**QWEN, "layers": 6, "micro-batch": 2, "micro-batches": 2}),
    (EP, {**QWEN, "layers": 8}),
    (CP, {**QWEN, "layers": 4, "seq": 32768}),
    (PP, {**DEEPSEEK, "layers": 6, "schedule": "zb-v", "micro-batches": 6}),
    (PP, {**DEEPSEEK, "layers": 4, "schedule": "1f1b", "micro-batches": 4}),
]
GPU = FITTED + UNSEEN

# What the trainer and mesh_plan call the same; the rest is worked out in `row`.
SAME = ["layers", "hidden", "heads", "kv-heads", "experts", "top-k", "inner", "vocabulary", "dense-layers", "dense-inner",
        "optimizer", "capacity", "prefetch", "micro-batch", "batch"]
COLUMNS = SAME + ["mesh", "qk-dim", "v-dim", "latent", "rope-dim", "qk-norm", "by-sequence", "shared-experts", "sequence", "schedule",
                  "domain"]
DEFAULTS = {"vocabulary": 256, "dense-layers": 0, "dense-inner": 96, "shared": 0, "optimizer": "adamw", "capacity": 0, "prefetch": 1,
            "micro-batch": 1, "lora": 0, "nope-dim": 16, "rope-dim": 8, "value-dim": 16, "transport": "peer", "balance": "global"}


def run(train_moe, text, mesh, settings, dtype, steps):
    """Peak in GiB of the rank that has most, and the time of a step in ms."""
    flags = {"mesh": mesh, "dtype": dtype, "steps": steps, **settings}
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.json"
        command = [train_moe, "--quiet", "--json", str(log)] + (["--text", text] if text else [])
        for name, value in flags.items():
            command += [f"--{name}"] + ([] if value is None else [str(value)])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    times = [1e3 * line["tokens"] / line["tokens_per_second"] for line in lines[1:] or lines]
    return lines[0]["peak_bytes"] / 2**30, statistics.median(times)


def row(mesh, settings, world):
    """The settings as mesh_plan names them."""
    latent = settings["lora"]
    made = {name: settings[name] for name in SAME}
    made.update({
        "mesh": mesh, "latent": latent, "rope-dim": settings["rope-dim"] if latent else 0,
        "qk-dim": settings["nope-dim"] + settings["rope-dim"] if latent else settings["head-dim"],
        "v-dim": settings["value-dim"] if latent else settings["head-dim"],
        "qk-norm": 0 if latent else 1, "by-sequence": int(settings["balance"] == "sequence"),
        "shared-experts": settings["shared"], "sequence": settings["seq"],
        "schedule": settings.get("schedule", "1f1b"),
        "domain": world if settings["transport"] == "peer" else 1,
    })
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("train_moe")
    parser.add_argument("mesh_plan")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--text", help="to train on; of as many bytes as a step has tokens")
    parser.add_argument("--csv", help="keep what was measured here")
    parser.add_argument("--only", help="numbers of configurations")
    options = parser.parse_args()
    chosen = GPU if options.gpu else HOST
    if options.only:
        chosen = [chosen[int(i)] for i in options.only.split(",")]
    lines, failures = [",".join(COLUMNS + ["peak-gib"] + (["step-ms"] if options.gpu else []))], 0
    for mesh, changes in chosen:
        degrees = {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in mesh.split("-")}
        settings = {**DEFAULTS, **({} if options.gpu else SMALL), **changes}
        settings["batch"] = settings.pop("micro-batches", 1) * settings["micro-batch"] * degrees["dp"]
        try:
            peak, step = run(options.train_moe, options.text, mesh, settings, "bf16" if options.gpu else "f64", 4 if options.gpu else 1)
        except RuntimeError as failure:
            print(failure, file=sys.stderr)
            failures += 1
            continue
        made = row(mesh, settings, degrees["pp"] * degrees["dp"] * degrees["cp"])
        lines.append(",".join([str(made[name]) for name in COLUMNS] + [repr(peak)] + ([f"{step:.3f}"] if options.gpu else [])))
    with tempfile.TemporaryDirectory() as folder:
        csv = pathlib.Path(options.csv or pathlib.Path(folder) / "measured.csv")
        csv.write_text("\n".join(lines) + "\n")
        device = [] if options.gpu else ["--dtype", "f64", "--row-alignment", "1", "--kernels-mib", "0"]
        code = subprocess.run([options.mesh_plan, *device, "--context-mib", "0", "--communicator-mib", "0", "--check", str(csv),
                               "--within", "5" if options.gpu else "1", *(["--time-within", "10"] if options.gpu else [])]).returncode
    return 1 if failures else code


if __name__ == "__main__":
    sys.exit(main())
