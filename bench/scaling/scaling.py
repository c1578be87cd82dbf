#!/usr/bin/env python3
"""Runs on as many GPUs as there are: the tests of every template, the benchmarks on 1, 2, 4 and 8 of them with their
peers, and the trainer on folded meshes; then writes report.md and its plots.

  scaling.py [--build build/cuda] [--out scaling] [--gpus <number>] [--only tests,comm,...] [--quick] [--side-by-side]
             [--in-process] [--resume] [--report] [--dry-run]

--side-by-side runs jobs that take fewer GPUs than there are at the same time: sooner done, less exact. --in-process adds
the trainer's meshes of up to 8 ranks as threads that share the GPUs there are. --resume goes on in an earlier run's
folder with the jobs that did not end well; --report makes only its report again. --dry-run lists what would run, on 8
GPUs where none is visible. A job that cannot be started, fails or takes too long is named and the next one is run; exit
code 1. SIGINT, SIGTERM and SIGHUP end the run with its jobs; it names what is left and writes its report; exit code 130.
"""
import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

import jobs
import report

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of the keyboard, of whoever lends the machine, of a closed terminal


def visible_gpus():
    """Their names, as CUDA_VISIBLE_DEVICES has them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
    except (OSError, subprocess.CalledProcessError):
        found = 0
    return [str(gpu) for gpu in range(found)]


@contextlib.contextmanager
def interrupting_signals():
    """The first of them raises KeyboardInterrupt, more have no effect. One that was ignored, as by nohup, stays so."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number in SIGNALS if before[number] != signal.SIG_IGN]

    def interrupt(*_):
        for number in taken:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


class Runner:
    """Runs jobs, each on GPUs of its own; what they print goes to logs/<name>.txt, how they ended to jobs.jsonl."""

    def __init__(self, out, gpus):
        self.out, self.free, self.running = out, queue.SimpleQueue(), set()
        self.starting, self.interrupted = threading.Lock(), False
        self.gpus = len(gpus)
        for gpu in gpus:
            self.free.put(gpu)
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, job, gpus):
        """The exit code; one of report's own when it could not be started, time was up, or the run was interrupted."""
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with open(self.out / "logs" / f"{job.name}.txt", "w") as output:
            with self.starting:
                if self.interrupted:
                    return report.INTERRUPTED
                try:
                    process = subprocess.Popen([str(word) for word in job.command], stdout=output, stderr=subprocess.STDOUT,
                                               env=environment, start_new_session=True)
                except OSError as error:
                    output.write(f"{error}\n")
                    return report.NOT_STARTED
                self.running.add(process)
            try:
                code = process.wait(job.time_limit_s)
            except subprocess.TimeoutExpired:
                code = report.OUT_OF_TIME
            finally:
                self.end(process)  # with what it has left running
                self.running.discard(process)
            return report.INTERRUPTED if self.interrupted and code not in report.GOOD else code

    @staticmethod
    def end(process):
        """With all that it has started."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def end_all(self):
        """What runs, and what has GPUs and was not started yet."""
        with self.starting:
            self.interrupted = True
            running = list(self.running)
        for process in running:
            self.end(process)

    def run_all(self, todo, side_by_side):
        """Errors: KeyboardInterrupt where a signal asks to end; no job outlives that."""
        with interrupting_signals(), open(self.out / "jobs.jsonl", "a") as done, concurrent.futures.ThreadPoolExecutor(self.gpus) as pool:

            def work(place, job, gpus):
                try:
                    start = time.monotonic()
                    code = self.run(job, gpus)
                    seconds = time.monotonic() - start
                    done.write(json.dumps({"name": job.name, "ranks": job.ranks, "code": code, "seconds": round(seconds, 1)}) + "\n")
                    done.flush()
                    print(f"[{place}/{len(todo)}] {job.name}: {report.verdict(code)}, {seconds:.0f} s", flush=True)
                finally:
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
                self.end_all()
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
        try:
            runner = Runner(options.out, visible[:gpus])
            jobs.write_text(options.out)
            report.keep_readable(options.out / "jobs.jsonl")
        except OSError as error:
            parser.error(f"--out {options.out} cannot be written: {error}")
        try:
            runner.run_all(left, options.side_by_side)
        except KeyboardInterrupt:
            ends = report.ends_of_jobs(options.out)
            not_run = [job.name for job in left if ends.get(job.name, report.INTERRUPTED) == report.INTERRUPTED]
            report.write(options.out, not_run)
            print(f"interrupted; not run to the end: {', '.join(not_run) or 'none'}")
            print(f"--resume goes on with what is left, {options.out / 'report.md'} has what is there")
            return report.INTERRUPTED
    is_good = report.write(options.out)
    print(f"{options.out / 'report.md'} is written")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
