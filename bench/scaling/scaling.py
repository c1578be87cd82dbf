#!/usr/bin/env python3
"""Runs on as many GPUs as there are: the tests of every template, the benchmarks on 1, 2, 4 and 8 of them with their
peers, and the trainer on folded meshes; then writes report.md and its plots.

  scaling.py [--build build/cuda] [--out scaling] [--gpus <number>] [--only tests,comm,...] [--quick] [--side-by-side]
             [--in-process] [--resume] [--report] [--dry-run]

--side-by-side runs jobs that take fewer GPUs than there are at the same time: sooner done, less exact. --in-process adds
the trainer's meshes of up to 8 ranks as threads that share the GPUs there are. --resume goes on in an earlier run's
folder with the jobs that did not end well; --report makes only its report again. --dry-run lists what would run, on 8
GPUs where none is visible. A job that fails or takes too long is said and the next one is run; exit code 1.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time

import jobs
import report


def visible_gpus():
    """Their names, as CUDA_VISIBLE_DEVICES has them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
    except (OSError, subprocess.CalledProcessError):
        found = 0
    return [str(gpu) for gpu in range(found)]


class Runner:
    """Runs jobs, each on GPUs of its own; what they print goes to logs/<name>.txt, how they ended to jobs.jsonl."""

    def __init__(self, out, gpus):
        self.out, self.free, self.running = out, queue.SimpleQueue(), set()
        self.gpus = len(gpus)
        for gpu in gpus:
            self.free.put(gpu)
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, job, gpus):
        """The exit code; 124 when time was up."""
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with open(self.out / "logs" / f"{job.name}.txt", "w") as output:
            process = subprocess.Popen([str(word) for word in job.command], stdout=output, stderr=subprocess.STDOUT,
                                       env=environment, start_new_session=True)
            self.running.add(process)
            try:
                return process.wait(job.time_limit_s)
            except subprocess.TimeoutExpired:
                self.end(process)
                return 124
            finally:
                self.running.discard(process)

    @staticmethod
    def end(process):
        """With all that it has started."""
        os.killpg(process.pid, 9)
        process.wait()

    def run_all(self, todo, side_by_side):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # no job outlives this program
        with open(self.out / "jobs.jsonl", "a") as done, concurrent.futures.ThreadPoolExecutor(self.gpus) as pool:

            def work(place, job, gpus):
                start = time.monotonic()
                code = self.run(job, gpus)
                seconds = time.monotonic() - start
                print(f"[{place}/{len(todo)}] {job.name}: {report.verdict(code)}, {seconds:.0f} s", flush=True)
                done.write(json.dumps({"name": job.name, "ranks": job.ranks, "code": code, "seconds": round(seconds, 1)}) + "\n")
                done.flush()
                for gpu in gpus:
                    self.free.put(gpu)

            try:
                futures = []
                for i, job in enumerate(sorted(todo, key=lambda job: job.ranks) if side_by_side else todo):
                    gpus = [self.free.get() for _ in range(job.ranks if side_by_side else self.gpus)]
                    futures.append(pool.submit(work, i + 1, job, gpus))
                for future in futures:
                    future.result()
            except KeyboardInterrupt:
                for process in list(self.running):
                    self.end(process)
                raise


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cuda")
    parser.add_argument("--out", default="scaling", type=pathlib.Path)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--only", default=",".join(jobs.KINDS))
    for flag in ("--quick", "--side-by-side", "--in-process", "--resume", "--report", "--dry-run"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    if unknown := set(kinds) - set(jobs.KINDS):
        parser.error(f"--only {', '.join(sorted(unknown))}: the valid words are {', '.join(jobs.KINDS)}")
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus {options.gpus}: 1 or more; jobs take 1, 2, 4 and 8 of them")
    visible = visible_gpus()
    gpus = options.gpus or len(visible) or (max(jobs.COUNTS) if options.dry_run else 0)
    todo = jobs.jobs(options.build, options.out, gpus, kinds, options.quick)
    if options.in_process:
        todo += jobs.in_process_jobs(options.build, options.out)
    if options.dry_run:
        for job in todo:
            print(f"{job.name}: {' '.join(map(str, job.command))}")
        return 0
    earlier = report.ends_of_jobs(options.out)
    if (options.report or options.resume) and not earlier:
        parser.error(f"--{'report' if options.report else 'resume'}: {options.out} holds no run; name the folder that --out named")
    if not options.report:
        if earlier and not options.resume:
            parser.error(f"--out {options.out} holds an earlier run: name another folder, or --resume, or --report")
        if not pathlib.Path(options.build).is_dir():
            parser.error(f"--build {options.build} is no folder; name the one that holds a build with CUDA")
        if len(visible) < max(1, gpus):
            print(f"skipped: {len(visible)} GPUs are visible, {max(1, gpus)} are needed")
            return 77
        left = [job for job in todo if job.name not in earlier or earlier[job.name] not in report.GOOD]
        runner = Runner(options.out, visible[:gpus])
        jobs.write_text(options.out)
        try:
            runner.run_all(left, options.side_by_side)
        except KeyboardInterrupt:
            report.write(options.out)
            print(f"ended; --resume goes on with what is left, {options.out / 'report.md'} has what is there")
            return 130
    is_good = report.write(options.out)
    print(f"{options.out / 'report.md'} is written")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
