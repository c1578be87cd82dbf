"""Tables, bars and plots from what the jobs left in a folder."""
import json
import pathlib
import re

import jobs
from plot import line_plot

BF16 = 2.0**-8  # one rounding, relative
WIRE_BAR_GB_PER_S, RING_BAR, FSDP_BAR, GATHER_BAR = 300, 0.93, 1.05, 1.2


def read_rows(path):
    path = pathlib.Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def find(rows, operation, way, title="", **more):
    """The fastest of the rows whose words begin like this; None where there is none."""
    found = [row for row in rows if row["operation"].strip().startswith(operation) and row["way"].startswith(way)
             and row["title"].startswith(title) and all(row[key] == value for key, value in more.items())]
    return min(found, key=lambda row: row["us"], default=None)


class Results:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.rows = {(kind, n): read_rows(self.folder / f"{kind} {n}.jsonl")
                     for kind in ("comm", "fsdp", "ring", "moe") for n in jobs.COUNTS}
        self.peers = {(kind, n): self._text(f"peer {kind} {n}") for kind in ("fsdp", "ring", "moe") for n in jobs.COUNTS}
        self.done = read_rows(self.folder / "jobs.jsonl")

    def _text(self, name):
        path = self.folder / "logs" / f"{name}.txt"
        return path.read_text() if path.exists() else ""

    def counts(self, kind):
        return [n for n in jobs.COUNTS if self.rows[kind, n]]

    def steps(self, what, mesh):
        return read_rows(self.folder / f"{what} {mesh}.jsonl")

    # One number per count of GPUs.

    def comm(self, n, operation, way, mib):
        return find(self.rows["comm", n], operation, way, bytes=mib << 20)

    def fsdp_ratio(self, n, wire):
        """Step of 8 units of 8192^2 with 8192 tokens, over the computation alone."""
        row = find([r for r in self.rows["fsdp", n] if r["floor_us"] > 20000 and r["way"] == wire], "step", wire)
        return row and row["us"] / row["floor_us"]

    def fsdp_peer_ratio(self, n):
        found = re.findall(r"8 x 8192\^2, 8192 tokens +(?:fp32|bf16) sums.*? ([\d.]+) +([\d.]+) +([\d.]+) +\d+\n", self.peers["fsdp", n])
        return min((float(of_alone) for _, _, of_alone in found), default=None)

    def ring(self, n, tokens, way):
        """TFLOP/s per GPU of 32 heads of 128, causal."""
        row = find(self.rows["ring", n], f"32/32 d128 {tokens // 1024}k", way)
        flops = tokens * tokens / 2 * 32 * 128 * (4 if way.startswith("forward") else 10) / n
        return row and (flops / row["us"] / 1e6, row["floor_us"] / row["us"])

    def ring_peer(self, n, tokens, way):
        found = re.search(rf"d128 {tokens // 1024}k: .*?{way.split()[0]} (\d+)", self.peers["ring", n])
        return found and float(found[1])

    def moe(self, n, operation):
        return find(self.rows["moe", n], operation, "uniform", "T4096")

    def moe_peer_us(self, n, operation):
        found = re.search(rf"T4096 .*?{operation} (\d+) us", self.peers["moe", n])
        return found and float(found[1])

    def tokens_per_s(self, what, mesh):
        speeds = sorted(step["tokens_per_second"] for step in self.steps(what, mesh)[1:])
        return speeds[len(speeds) // 2] if speeds else None

    def loss_distance(self, what, mesh):
        """The largest relative distance of a step's loss from one rank's; None where one of both is missing."""
        mine, alone = self.steps(what, mesh), self.steps(what, jobs.ONE_RANK)
        if not mine or len(mine) != len(alone):
            return None
        return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(mine, alone))


def bars(results, n=8):
    """[text, found, holds or None where it was not run]: the bars of eight GPUs; found in the same runs as the peers."""
    rows = results.rows["comm", n]
    slower = []
    for operation in ("all_gather", "reduce_scatter"):
        for size in sorted({row["bytes"] for row in rows if row["operation"] == operation}):
            own, nccl = (find(rows, operation, way, bytes=size) for way in ("peer", "NCCL"))
            if own["us"] > nccl["us"]:
                slower.append(f"{operation} {size >> 10} KiB {own['us'] / nccl['us']:.2f}")
    yield "all-gather and reduce: not slower than NCCL at any size", ", ".join(slower) or ("none slower" if rows else "-"), not slower if rows else None
    for operation in ("all_gather", "reduce_scatter"):
        own, nccl = (results.comm(n, operation, way, 64) for way in ("peer", "NCCL"))
        ratio = own and nccl and nccl["us"] / own["us"]
        yield f"{operation} of 64 MiB: {GATHER_BAR} times as fast as NCCL", _number(ratio), ratio and ratio >= GATHER_BAR
    ring = results.ring(n, 65536, "forward by copies")
    yield f"ring over local: {RING_BAR}", _number(ring and ring[1]), ring and ring[1] >= RING_BAR
    for operation in ("dispatch", "combine"):
        row = results.moe(n, operation)
        yield f"{operation}: {WIRE_BAR_GB_PER_S} GB/s of wire", _number(row and row["gb_per_s"]), row and row["gb_per_s"] >= WIRE_BAR_GB_PER_S
    ratio = results.fsdp_ratio(n, "fp32 wire")
    yield f"FSDP step of 8192 tokens: {FSDP_BAR} of the computation", _number(ratio), ratio and ratio <= FSDP_BAR


def _number(value):
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def table(head, rows):
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return text + ["| " + " | ".join(cell if isinstance(cell, str) else _number(cell) for cell in row) + " |" for row in rows] + [""]


def write(folder):
    results = Results(folder)
    lines = ["# On 1, 2, 4 and 8 GPUs", ""]
    failed = [job for job in results.done if job["code"] not in (0, 77)]
    lines += [f"{len(results.done)} jobs, {len(failed)} of them failed."] + [f"- FAILED ({job['code']}): {job['name']}" for job in failed] + [""]

    def plot(name, title, y_name, series):
        series = {key: [(n, y) for n, y in points if y is not None] for key, points in series.items()}
        series = {key: points for key, points in series.items() if points}
        if series:
            (results.folder / f"{name}.svg").write_text(line_plot(title, "GPUs", y_name, series))
            lines.extend([f"![{title}]({name}.svg)", ""])

    counts = results.counts("comm")
    if counts:
        lines += ["## Communicators: GB/s that each rank sends, 64 MiB blocks", ""]
        ways = [(operation, way) for operation in ("all_gather", "all_to_all", "reduce_scatter") for way in ("peer", "NCCL")]
        speed = {f"{o}, {'pleat' if w == 'peer' else w}":
                 [(n, (lambda row: row and (n - 1) * (64 << 20) / row["us"] / 1e3)(results.comm(n, o, w, 64))) for n in counts] for o, w in ways}
        lines += table(["operation", *map(str, counts)], [[name, *(y for _, y in points)] for name, points in speed.items()])
        plot("comm", "Collectives of 64 MiB blocks", "GB/s", speed)
    counts = results.counts("fsdp")
    if counts:
        lines += ["## FSDP: step of 8192 tokens per rank over the computation alone (weak scaling)", ""]
        ratio = {**{wire: [(n, results.fsdp_ratio(n, wire)) for n in counts] for wire in ("fp32 wire", "bf16 wire")},
                 "FSDP2": [(n, results.fsdp_peer_ratio(n)) for n in counts]}
        lines += table(["wire", *map(str, counts)], [[name, *(y for _, y in points)] for name, points in ratio.items()])
        plot("fsdp", "FSDP step over computation", "ratio", ratio)
    counts = results.counts("ring")
    if counts:
        lines += ["## Ring attention: TFLOP/s per GPU, 32 heads of 128, causal", ""]
        for title, tokens_of in (("strong: 64k tokens", lambda n: 65536), ("weak: 16k tokens per GPU", lambda n: 16384 * n)):
            rate = {}
            for way in ("forward", "backward"):
                rate[way] = [(n, (lambda r: r and r[0])(results.ring(n, tokens_of(n), f"{way} by copies"))) for n in counts]
                rate[f"{way}, context_parallel"] = [(n, results.ring_peer(n, tokens_of(n), way)) for n in counts]
            lines += table([title, *map(str, counts)], [[name, *(y for _, y in points)] for name, points in rate.items()])
            plot(f"ring-{title.split(':')[0]}", f"Ring attention, {title}", "TFLOP/s", rate)
    counts = results.counts("moe")
    if counts:
        lines += ["## MoE: us for 4096 tokens per rank of 7168, 256 experts, 8 of them each (weak scaling)", ""]
        time = {}
        for operation in ("dispatch", "combine"):
            time[operation] = [(n, (lambda row: row and row["us"])(results.moe(n, operation))) for n in counts]
            time[f"{operation}, plain PyTorch"] = [(n, results.moe_peer_us(n, operation)) for n in counts]
        lines += table(["operation", *map(str, counts)], [[name, *(y for _, y in points)] for name, points in time.items()])
        plot("moe", "Dispatch and combine", "us", time)
    lines += _trainer(results, plot)
    lines += ["## Bars of eight GPUs", ""]
    lines += table(["bar", "found", ""], [[text, found, "not run" if holds is None else "holds" if holds else "MISSED"] for text, found, holds in bars(results)])
    (results.folder / "report.md").write_text("\n".join(lines))
    return not failed


def _trainer(results, plot):
    lines, rows = [], []
    for n in jobs.COUNTS:
        for mesh in jobs.MESHES[n]:
            row = [results.tokens_per_s(what, mesh) for what in ("weak", "strong")]
            peak = [step["peak_bytes"] / 2**30 for step in results.steps("weak", mesh)[-1:]]
            distance = [results.loss_distance(what, mesh) for what in ("losses", "losses in-process")]
            if any(value is not None for value in row + distance):
                rows.append([mesh, str(n), *row, *(peak or [None]), *(_distance(d) for d in distance)])
    if rows:
        lines = ["## Trainer: a slice of qwen3-30b-a3b, 4096 tokens a sequence", ""]
        lines += table(["mesh", "GPUs", "tokens/s, weak", "tokens/s, strong", "GiB", "loss from one rank", "the same, ranks share GPUs"], rows)
        plot("trainer", "Trainer", "tokens/s", {what: [(n, results.tokens_per_s(what, jobs.MESHES[n][0])) for n in jobs.COUNTS] for what in ("weak", "strong")})
    return lines


def _distance(distance):
    return "-" if distance is None else f"{distance:.1e}" + ("" if distance <= BF16 else " TOO FAR")
