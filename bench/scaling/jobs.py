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
HEADS = ("32/4 d128", "32/32 d64", "16/16 d192/128", "16/16 d256")
STRONG_TOKENS, WEAK_TOKENS = 65536, 16384  # of ring attention: in all, and per GPU


@dataclasses.dataclass(frozen=True)
class Job:
    """One command; `ranks` GPUs take part. Exit codes 0 and 77 (skipped) are good."""
    name: str
    kind: str
    ranks: int
    command: tuple
    time_limit_s: int = 300


def write_text(out):
    """What the trainer reads, as many bytes as its largest batch takes: the library's own sources."""
    headers = sorted((BENCH.parent / "include").rglob("*.hpp"))
    (pathlib.Path(out) / "text").write_bytes(b"".join(header.read_bytes() for header in headers))


def jobs(build, out, gpus, kinds, quick):
    """In the order in which they run; peers stand right behind what they are compared with."""
    wanted = [job for job in _all(pathlib.Path(build), pathlib.Path(out), gpus, quick) if job.kind in kinds]
    return [job for job in wanted if job.ranks <= gpus]


def in_process_jobs(build, out):
    """The trainer's meshes as ranks that are threads and share GPUs: what one GPU can show of them."""
    program = pathlib.Path(build) / "examples/gpu_trainer/train_moe_cuda"
    return [Job(f"losses in-process {mesh}", "in-process", 1,
                (program, "--mesh", mesh, *SMALL, "--json", pathlib.Path(out) / f"losses in-process {mesh}.jsonl"))
            for count in COUNTS for mesh in MESHES[count]]


def _all(build, out, gpus, quick):
    fewer_repeats = ("env", "PLEAT_TEST_QUICK=1") if quick else ()
    ctest = ("ctest", "--test-dir", build, "-L", "gpu", "--no-tests=error", "--output-on-failure")
    yield Job("tests", "tests", gpus, (*fewer_repeats, *ctest), 3600)
    for n in COUNTS:
        if n > 2:  # suites that take two GPUs if not told otherwise
            for test, part in SUITES.items():
                yield Job(f"{test} {n}", "tests", n, ("env", f"PLEAT_TEST_RANKS={n}", build / "tests" / test, *part), 600)

        def bench(kind, name, *more):
            mode = ("--mode", "threads") if quick else ()
            return Job(f"{kind} {n}", kind, n, (build / "bench" / name, "--ranks", n, *mode, "--json", out / f"{kind} {n}.jsonl", *more))

        def peer(kind, script, *more):
            return Job(f"peer {kind} {n}", kind, n, (sys.executable, BENCH / "peers" / script, "--ranks", n, *more))

        if n > 1:
            yield bench("comm", "comm_bench", *(("--quick",) if quick else ()))
        yield bench("fsdp", "fsdp_bench", "--only", "large" if quick else "small,large,models")
        yield peer("fsdp", "fsdp2.py", *(("--only", "8192 tokens", "--samples", 3) if quick else ()))
        lengths = sorted({STRONG_TOKENS, WEAK_TOKENS * n} | (set() if quick else {16384, 32768}))
        rows = [f"{tokens // 1024}k" for tokens in lengths]
        yield bench("ring", "ring_attention_bench", "--rows", ",".join(rows if quick else [*rows, *HEADS, "packed", "latents"]))
        yield peer("ring", "context_parallel.py", "--tokens", ",".join(map(str, lengths)))
        yield bench("moe", "moe_bench", "--only", "ops,parts" if quick else "ops,parts,layer")
        yield peer("moe", "moe_naive.py")
        yield from _trainer(build, out, n)


def _trainer(build, out, n):
    program = build / "examples/gpu_trainer/train_moe_nccl"

    def train(what, mesh, *options):
        name = f"{what} {mesh}"
        return Job(name, "trainer", n, (program, "--mesh", mesh, *QWEN3, "--text", out / "text", *options, "--json", out / f"{name}.jsonl"))

    balanced = ("--seq", "4096", "--force-balance", "--capacity", "1.1", "--steps", "4")
    layers = ("--layers", "4")  # the fewest that two pipeline stages with two parts each can have
    for mesh in MESHES[n]:
        yield train("losses", mesh, *layers, "--seq", "1024", "--batch", "8", "--steps", "3")
        yield train("strong", mesh, *layers, *balanced, "--batch", 8)
        yield train("weak", mesh, *layers, *balanced, "--batch", 8 * n)
