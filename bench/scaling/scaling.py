#!/usr/bin/env python3
"""Runs on as many GPUs as there are: the tests of every template, the benchmarks on 1, 2, 4 and 8 of them with their
peers, and the trainer on folded meshes; then writes report.md and its plots.

  scaling.py [--build build/cuda] [--out scaling] [--gpus <number>] [--only tests,comm,...] [--quick] [--in-process]
             [--report] [--dry-run]

--in-process adds the trainer's meshes of up to 8 ranks as threads that share the GPUs there are. --report makes the
report again from an earlier run's folder. --dry-run lists what would run, on 8 GPUs where none is visible. A job that
fails or takes too long is said and the next one is run; exit code 1.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import jobs
import report

GOOD = (0, 77)


def visible_gpus():
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
    except (OSError, subprocess.CalledProcessError):
        return 0


def run(job, out):
    """The exit code; 124 when time was up. Its output is in logs/<name>.txt."""
    log = out / "logs" / f"{job.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    with open(log, "w") as output:
        process = subprocess.Popen([str(word) for word in job.command], stdout=output, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        try:
            return process.wait(job.time_limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            os.killpg(process.pid, 9)
            process.wait()
            if isinstance(reason, KeyboardInterrupt):
                raise
            return 124


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cuda")
    parser.add_argument("--out", default="scaling", type=pathlib.Path)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--only", default=",".join(jobs.KINDS))
    for flag in ("--quick", "--in-process", "--report", "--dry-run"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    if unknown := set(kinds) - set(jobs.KINDS):
        parser.error(f"--only {', '.join(sorted(unknown))}: the valid words are {', '.join(jobs.KINDS)}")
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus {options.gpus}: 1 or more; jobs take 1, 2, 4 and 8 of them")
    gpus = visible_gpus() if options.gpus is None else options.gpus
    if options.dry_run and gpus == 0:
        gpus = max(jobs.COUNTS)
    todo = jobs.jobs(options.build, options.out, gpus, kinds, options.quick)
    if options.in_process:
        todo += jobs.in_process_jobs(options.build, options.out)
    if options.dry_run:
        for job in todo:
            print(f"{job.name}: {' '.join(map(str, job.command))}")
        return 0
    if options.report and not (options.out / "jobs.jsonl").exists():
        parser.error(f"--report: {options.out} holds no run; name the folder that --out named")
    if not options.report:
        if not pathlib.Path(options.build).is_dir():
            parser.error(f"--build {options.build} is no folder; name the one that holds a build with CUDA")
        if gpus == 0:
            print("skipped: no GPU is visible")
            return 77
        options.out.mkdir(parents=True, exist_ok=True)
        if old := list(options.out.glob("*.jsonl")):
            parser.error(f"--out {options.out} holds an earlier run ({old[0].name}, ..): name another folder, or --report")
        with open(options.out / "jobs.jsonl", "w") as done:
            for i, job in enumerate(todo):
                print(f"[{i + 1}/{len(todo)}] {job.name} ..", end=" ", flush=True)
                start = time.monotonic()
                code = run(job, options.out)
                seconds = time.monotonic() - start
                print(f"{'ok' if code == 0 else 'skipped' if code == 77 else f'FAILED ({code})'} {seconds:.0f} s", flush=True)
                done.write(json.dumps({"name": job.name, "ranks": job.ranks, "code": code, "seconds": round(seconds, 1)}) + "\n")
                done.flush()
    is_good = report.write(options.out)
    print(f"{options.out / 'report.md'} is written")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
