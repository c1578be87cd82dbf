"""Tables, bars and plots from what the jobs left in a folder."""
import dataclasses
import json
import math
import pathlib
import re
from functools import partial

import jobs
from plot import line_plot

GOOD = (0, 77)
OUT_OF_TIME, NOT_STARTED, INTERRUPTED = 124, 127, 130  # as a shell has them
BF16 = 2.0**-8  # one rounding, relative
WIRE_BAR_GB_PER_S, RING_BAR, FSDP_BAR, GATHER_BAR = 300, 0.93, 1.05, 1.2
MIB = 1 << 20


def verdict(code):
    return {0: "ok", 77: "skipped", OUT_OF_TIME: "FAILED (out of time)", NOT_STARTED: "FAILED (cannot be started)",
            INTERRUPTED: "interrupted"}.get(code, f"FAILED ({code})")


def read_lines(path):
    """Its rows with numbers that JSON has not as NaN, and the numbers of lines that a job was ended in."""
    rows, unreadable = [], []
    text = path.read_text(errors="replace") if path.exists() else ""
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        try:
            rows.append({key: math.nan if value is None else value for key, value in json.loads(line).items()})
        except (ValueError, AttributeError):
            unreadable.append(number)
    return rows, unreadable


def read_rows(path):
    """Without lines that a job was ended in."""
    return read_lines(pathlib.Path(path))[0]


def keep_readable(path):
    """Removes lines that a run was ended in, and ends the last one."""
    if path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in read_rows(path)))


def ends_of_jobs(folder):
    """{name: exit code}, of each job's last run."""
    return {row["name"]: row["code"] for row in read_rows(pathlib.Path(folder) / "jobs.jsonl") if "name" in row and "code" in row}


def find(rows, operation, way="", title="", **more):
    """The fastest of the operation's rows whose way and title begin like this; None where there is none."""
    found = [row for row in rows if row["operation"].strip() == operation and row["way"].startswith(way)
             and row["title"].startswith(title) and all(row[key] == value for key, value in more.items())]
    return min(found, key=lambda row: (math.isnan(row["us"]), row["us"]), default=None)


class Results:
    """What was measured; methods give None where it was not."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.ends = ends_of_jobs(folder)

    def rows(self, kind, n):
        return read_rows(self.folder / f"{kind} {n}.jsonl")

    def peer(self, kind, n, pattern):
        """What the pattern finds in the output of PyTorch's job, as numbers."""
        log = self.folder / "logs" / f"peer {kind} {n}.txt"
        return [float(number) for number in re.findall(pattern, log.read_text())] if log.exists() else []

    def steps(self, what, mesh):
        return read_rows(self.folder / f"{what} {mesh}.jsonl")

    def comm(self, operation, way, n, size=64 * MIB):
        return find(self.rows("comm", n), operation, way, bytes=size)

    def comm_gb_per_s(self, operation, way, n):
        row = self.comm(operation, way, n)
        return row and row["gb_per_s"]

    def fsdp_ratio(self, wire, n):
        """Step of 8 units of 8192^2 with 8192 tokens, over the computation alone."""
        row = find(self.rows("fsdp", n), "step", f"8 x 8192^2, {wire}", "step of 8 units of 8192^2, 8192 tokens")
        return row and row["us"] / row["floor_us"]

    def fsdp_peer_ratio(self, n):
        return min(self.peer("fsdp", n, r"8 x 8192\^2, 8192 tokens +(?:fp32|bf16) sums.*? [\d.]+ +[\d.]+ +([\d.]+) +\d+\n"), default=None)

    def ring(self, way, tokens, n):
        """32 heads of 128, causal."""
        return find(self.rows("ring", n), f"32/32 d128 {tokens // 1024}k", f"{way} by copies")

    def ring_tflops(self, way, tokens_of, n):
        row, tokens = self.ring(way, tokens_of(n), n), tokens_of(n)
        return row and tokens * tokens / 2 * 32 * 128 * (4 if way == "forward" else 10) / n / row["us"] / 1e6

    def ring_peer_tflops(self, way, tokens_of, n):
        return next(iter(self.peer("ring", n, rf"d128 {tokens_of(n) // 1024}k: .*?{way} (\d+)")), None)

    def moe_us(self, operation, n):
        row = find(self.rows("moe", n), operation, title="T4096 H7168 E256 k8, uniform, peer")
        return row and row["us"]

    def moe_peer_us(self, operation, n):
        return next(iter(self.peer("moe", n, rf"T4096 .*?{operation} (\d+) us")), None)

    def moe_wire(self, operations, n):
        """GB/s of the part on the wire alone, by stores and where there is one by the copy engine."""
        rows = [find(self.rows("moe", n), operation, title="T4096 H7168 E256 k8, parts") for operation in operations]
        return max((row["gb_per_s"] for row in rows if row), default=None)

    def tokens_per_s(self, what, mesh):
        speeds = sorted(step["tokens_per_second"] for step in self.steps(what, mesh)[1:])
        return None if not speeds else speeds[len(speeds) // 2] if all(map(math.isfinite, speeds)) else math.nan

    def efficiency(self, what, mesh, n):
        """Tokens per second per GPU, over those of one GPU."""
        mine, alone = self.tokens_per_s(what, mesh), self.tokens_per_s(what, jobs.ONE_RANK)
        return mine and alone and mine / n / alone

    def loss_distance(self, what, mesh):
        """The largest relative distance of a step's loss from one rank's, infinite where one is no number; None where one of both is missing."""
        mine, alone = self.steps(what, mesh), self.steps(what, jobs.ONE_RANK)
        if not mine or len(mine) != len(alone):
            return None
        distances = [abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(mine, alone)]
        return max(distances) if all(map(math.isfinite, distances)) else math.inf

    def diverged(self):
        """Each run of the trainer in which a loss is no number, with its first such step."""
        for what in ("losses", "losses in-process", "strong", "weak"):
            for mesh in (mesh for n in jobs.COUNTS for mesh in jobs.MESHES[n]):
                if place := next((i for i, step in enumerate(self.steps(what, mesh), 1) if not math.isfinite(step["loss"])), None):
                    yield f"{what} {mesh}: the loss of step {place} is no finite number"

    def unreadable(self):
        """Each line of a job that is no row of JSON."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for number in read_lines(path)[1]:
                yield f"{path.name}, line {number}"


def bars(results, n=8):
    """[text, found, holds or None where it was not run]: the bars of eight GPUs; found in the same runs as the peers."""
    rows = results.rows("comm", n)
    slower = []
    for operation in ("all_gather", "reduce_scatter"):
        for size in sorted({row["bytes"] for row in rows if row["operation"] == operation}):
            own, nccl = (results.comm(operation, way, n, size) for way in ("peer", "NCCL"))
            if own and nccl and not own["us"] <= nccl["us"]:
                slower.append(f"{operation} {size >> 10} KiB {own['us'] / nccl['us']:.2f}")
    yield "all-gather and reduce: not slower than NCCL at any size", ", ".join(slower) or ("none slower" if rows else "-"), not slower if rows else None
    for operation in ("all_gather", "reduce_scatter"):
        own, nccl = (results.comm(operation, way, n) for way in ("peer", "NCCL"))
        ratio = own and nccl and nccl["us"] / own["us"]
        yield f"{operation} of 64 MiB: {GATHER_BAR} times as fast as NCCL", _number(ratio), ratio and ratio >= GATHER_BAR
    for way in ("forward", "backward"):
        row = results.ring(way, jobs.STRONG_TOKENS, n)
        ratio = row and row["floor_us"] / row["us"]
        yield f"ring over local, {way}: {RING_BAR}", _number(ratio), ratio and ratio >= RING_BAR
    for name, operations in (("dispatch", ("pack and signals", "copies and signals")), ("combine", ("sum_experts, signals",))):
        rate = results.moe_wire(operations, n)
        yield f"{name}: {WIRE_BAR_GB_PER_S} GB/s of wire", _number(rate), rate and rate >= WIRE_BAR_GB_PER_S
    ratio = results.fsdp_ratio("fp32", n)
    yield f"FSDP step of 8192 tokens: {FSDP_BAR} of the computation", _number(ratio), ratio and ratio <= FSDP_BAR


def _is_number(value):
    return value is not None and math.isfinite(value)


def _number(value):
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def table(head, rows):
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return text + ["| " + " | ".join(cell if isinstance(cell, str) else _number(cell) for cell in row) + " |" for row in rows] + [""]


@dataclasses.dataclass
class Section:
    """One table and its plot: a number for each count of GPUs. `series`: {name: (name of the job on n GPUs, number on n GPUs)}."""
    heading: str
    plot: str
    unit: str
    series: dict


def sections(r):
    def on(kind):
        return lambda n: f"{kind} {n}"

    collectives = [(operation, name, way) for operation in ("all_gather", "all_to_all", "reduce_scatter")
                   for name, way in (("pleat", "peer"), ("NCCL", "NCCL"))]
    yield Section("Communicators: GB/s that each rank sends, 64 MiB blocks", "comm", "GB/s",
                  {f"{operation}, {name}": (on("comm"), partial(r.comm_gb_per_s, operation, way)) for operation, name, way in collectives})
    yield Section("FSDP: step of 8192 tokens per rank over the computation alone (weak scaling)", "fsdp", "ratio",
                  {"fp32 wire": (on("fsdp"), partial(r.fsdp_ratio, "fp32")), "bf16 wire": (on("fsdp"), partial(r.fsdp_ratio, "bf16")),
                   "FSDP2": (on("peer fsdp"), r.fsdp_peer_ratio)})
    for name, heading, tokens_of in (("strong", "64k tokens (strong scaling)", lambda n: jobs.STRONG_TOKENS),
                                     ("weak", "16k tokens per GPU (weak scaling)", lambda n: jobs.WEAK_TOKENS * n)):
        series = {}
        for way in ("forward", "backward"):
            series[way] = (on("ring"), partial(r.ring_tflops, way, tokens_of))
            series[f"{way}, context_parallel"] = (on("peer ring"), partial(r.ring_peer_tflops, way, tokens_of))
        yield Section(f"Ring attention: TFLOP/s per GPU, 32 heads of 128, causal, {heading}", f"ring-{name}", "TFLOP/s", series)
    series = {}
    for operation in ("dispatch", "combine"):
        series[operation] = (on("moe"), partial(r.moe_us, operation))
        series[f"{operation}, plain PyTorch"] = (on("peer moe"), partial(r.moe_peer_us, operation))
    yield Section("MoE: us for 4096 tokens per rank of 7168, 256 experts, 8 of them each (weak scaling)", "moe", "us", series)
    yield Section("Trainer: tokens/s of a slice of qwen3-30b-a3b, 4096 tokens a sequence", "trainer", "tokens/s",
                  {what: (lambda n, what=what: f"{what} {jobs.MESHES[n][0]}", lambda n, what=what: r.tokens_per_s(what, jobs.MESHES[n][0]))
                   for what in ("strong", "weak")})


def write(folder, not_run=()):
    """Writes report.md and the plots. Whether every job ended well, left its numbers, and losses are one rank's.

    `not_run`: names of jobs that an interrupted run did not come to.
    """
    results = Results(folder)
    cut = [name for name, code in results.ends.items() if code == INTERRUPTED]
    failed = [name for name, code in results.ends.items() if code not in GOOD and code != INTERRUPTED]
    diverged, unreadable = list(results.diverged()), list(results.unreadable())
    lines = ["# On 1, 2, 4 and 8 GPUs", "", f"{len(results.ends)} jobs, {len(failed)} of them failed{f', {len(cut)} interrupted' if cut else ''}."]
    lines += [f"- {verdict(results.ends[name])}: {name}; the end of logs/{name}.txt: `{_last_line(results.folder, name)}`" for name in failed]
    lines += [f"- interrupted: {name}" for name in cut]
    lines += [f"- not run: {name}" for name in not_run if name not in cut]
    lines += [f"- DIVERGED: {text}" for text in diverged] + [f"- left out, no JSON: {text}" for text in unreadable] + [""]
    missing = []
    for section in sections(results):
        found = {}
        for name, (job, number) in section.series.items():
            found[name] = {n: number(n) for n in jobs.COUNTS}
            missing += [f"{job(n)}: {section.heading}: {name}" for n in jobs.COUNTS if not _is_number(found[name][n]) and results.ends.get(job(n)) == 0]
        counts = [n for n in jobs.COUNTS if any(numbers[n] is not None for numbers in found.values())]
        if not counts:
            continue
        lines += [f"## {section.heading}", ""]
        lines += table(["", *map(str, counts)], [[name, *(numbers[n] for n in counts)] for name, numbers in found.items()])
        points = {name: [(n, y) for n, y in numbers.items() if _is_number(y)] for name, numbers in found.items()}
        if any(y > 0 for of in points.values() for _, y in of):
            plot = line_plot(section.heading, "GPUs", section.unit, {name: of for name, of in points.items() if of})
            (results.folder / f"{section.plot}.svg").write_text(plot)
            lines += [f"![{section.heading}]({section.plot}.svg)", ""]
    meshes, far = _meshes(results)
    lines += meshes
    lines += ["## Bars of eight GPUs", ""]
    lines += table(["bar", "found", ""], [[text, found, "not run" if holds is None else "holds" if holds else "MISSED"] for text, found, holds in bars(results)])
    if missing:
        lines += ["## Numbers that jobs which ended well did not leave", "", *(f"- {text}" for text in missing), ""]
    (results.folder / "report.md").write_text("\n".join(lines))
    return not (failed or cut or not_run or missing or far or diverged or unreadable)


def _last_line(folder, name):
    log = folder / "logs" / f"{name}.txt"
    said = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:200] for line in reversed(said) if line.strip()), "nothing")


def _meshes(results):
    """The table of all meshes, and whether a loss is too far from one rank's."""
    rows, far = [], False
    for n in jobs.COUNTS:
        for mesh in jobs.MESHES[n]:
            speeds = [f(what) for what in ("weak", "strong") for f in (partial(results.tokens_per_s, mesh=mesh), partial(results.efficiency, mesh=mesh, n=n))]
            peak = [step["peak_bytes"] / 2**30 for step in results.steps("weak", mesh)[-1:]]
            distances = [results.loss_distance(what, mesh) for what in ("losses", "losses in-process")]
            far = far or any(d is not None and not d <= BF16 for d in distances)
            if any(value is not None for value in speeds + distances):
                rows.append([mesh, str(n), *speeds, *(peak or [None]), *(_distance(d) for d in distances)])
    head = ["mesh", "GPUs", "tokens/s, weak", "of one GPU's", "tokens/s, strong", "of one GPU's", "GiB", "loss from one rank", "the same, ranks share GPUs"]
    return (["## Trainer on folded meshes", "", *table(head, rows)] if rows else []), far


def _distance(distance):
    return "-" if distance is None else f"{distance:.1e}" + ("" if distance <= BF16 else " TOO FAR")
