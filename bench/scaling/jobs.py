"""What is run on 1, 2, 4 and 8 GPUs: every test once, every benchmark beside its peers, and the trainer on folded meshes."""
import dataclasses
import pathlib
import sys

BENCH = pathlib.Path(__file__).resolve().parent.parent
COUNTS = (1, 2, 4, 8)
KINDS = ("tests", "comm", "fsdp", "ring", "moe", "trainer")
# The first of each count is the one of the scaling tables. "-r2": two replicas.
MESHES = {
    1: ("pp1-dp1-cp1-ep1",),
    2: ("pp1-dp1-cp2-ep2",),
    4: ("pp1-dp2-cp2-ep4",),
    8: ("pp1-dp4-cp2-ep4", "pp1-dp4-cp2-ep4-r2", "pp1-dp2-cp4-ep8", "pp2-dp2-cp2-ep4"),
}
ONE_RANK = MESHES[1][0]
SUITES = {"nccl_test": ("suite, ",), "nccl_templates_test": (), "nccl_moe_test": ()}
QWEN3 = "--preset qwen3-30b-a3b --dtype bf16 --micro-batch 1".split()
SMALL = "--layers 4 --hidden 64 --experts 16 --top-k 2 --seq 128 --dtype bf16 --micro-batch 1 --batch 8 --steps 3".split()


@dataclasses.dataclass(frozen=True)
class Job:
    """One command; `ranks` GPUs take part. Exit codes 0 and 77 (skipped) are good."""
    name: str
    kind: str
    ranks: int
    command: tuple
    time_limit_s: int = 600


def jobs(build, out, gpus, kinds, quick):
    """In the order in which they run; peers stand right behind what they are compared with."""
    wanted = [job for job in _all(pathlib.Path(build), pathlib.Path(out), quick) if job.kind in kinds]
    return [job for job in wanted if job.ranks <= gpus]


def in_process_jobs(build, out):
    """The trainer's meshes as ranks that are threads and share GPUs: what one GPU can show of them."""
    program = pathlib.Path(build) / "examples/gpu_trainer/train_moe_cuda"
    return [Job(f"losses in-process {mesh}", "in-process", 1,
                (program, "--mesh", mesh, *SMALL, "--json", pathlib.Path(out) / f"losses in-process {mesh}.jsonl"))
            for count in COUNTS for mesh in MESHES[count]]


def _all(build, out, quick):
    yield Job("tests", "tests", 1, ("ctest", "--test-dir", build, "-L", "gpu", "--output-on-failure"), 3600)
    few = ("--quick",) if quick else ()
    for n in COUNTS[2:]:  # suites that take two GPUs if not told otherwise
        for test, part in SUITES.items():
            yield Job(f"{test} {n}", "tests", n, ("env", f"PLEAT_TEST_RANKS={n}", build / "tests" / test, *part))
    for n in COUNTS:
        def bench(kind, name, *more):
            return Job(f"{kind} {n}", kind, n, (build / "bench" / name, "--ranks", n, "--json", out / f"{kind} {n}.jsonl", *more))

        def peer(kind, script):
            return Job(f"peer {kind} {n}", kind, n, (sys.executable, BENCH / "peers" / script, "--ranks", n))

        if n > 1:
            yield bench("comm", "comm_bench", *few)
        yield bench("fsdp", "fsdp_bench", "--only", "small,large,models" if not quick else "small")
        yield peer("fsdp", "fsdp2.py")
        yield bench("ring", "ring_attention_bench", *few)
        yield peer("ring", "context_parallel.py")
        yield bench("moe", "moe_bench", "--only", "ops,layer")
        yield peer("moe", "moe_naive.py")
        yield from _trainer(build, out, n, quick)


def _trainer(build, out, n, quick):
    program = build / "examples/gpu_trainer/train_moe_nccl"

    def train(what, mesh, *options):
        name = f"{what} {mesh}"
        return Job(name, "trainer", n, (program, "--mesh", mesh, *QWEN3, *options, "--json", out / f"{name}.jsonl"))

    balanced = ("--force-balance", "--capacity", "1.1", "--steps", "4")
    layers = ("--layers", "2" if quick else "4", "--seq", "4096")
    for mesh in MESHES[n]:
        yield train("losses", mesh, "--layers", "4", "--seq", "1024", "--batch", "8", "--steps", "3")
        yield train("strong", mesh, *layers, "--batch", "8", *balanced)
        yield train("weak", mesh, *layers, "--batch", 8 * n, *balanced)
