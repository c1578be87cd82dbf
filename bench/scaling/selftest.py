#!/usr/bin/env python3
"""The report says what rows of the benchmarks hold: speeds, ratios, distances, bars, and what failed."""
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import jobs
import report
import scaling

MIB = 1 << 20


def row(operation, way, us, bytes=0, gb_per_s=1.0, floor_us=0.0, title=""):
    return {"title": title, "operation": operation, "way": way, "us": us, "bytes": bytes, "gb_per_s": gb_per_s, "floor_us": floor_us}


class Report(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.out = pathlib.Path(self.folder.name)
        (self.out / "logs").mkdir()
        self.addCleanup(self.folder.cleanup)

    def write(self, name, rows):
        (self.out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def bars(self):
        return {text.split(":")[0]: (found, holds) for text, found, holds in report.bars(report.Results(self.out))}

    def ended(self, **codes):
        self.write("jobs", [{"name": name.replace("_", " "), "ranks": 2, "code": code, "seconds": 1} for name, code in codes.items()])

    def text(self):
        return (self.out / "report.md").read_text()

    def test_of_nothing_every_bar_is_not_run(self):
        self.assertEqual({holds for _, holds in self.bars().values()}, {None})

    def test_bars_of_eight(self):
        square, parts = "step of 8 units of 8192^2, 8192 tokens; floor: ..", "T4096 H7168 E256 k8, parts"
        self.write("comm 8", [row("all_gather", "peer copies", 100, 64 * MIB), row("all_gather", "peer stores, 4 CTAs", 110, 64 * MIB),
                              row("all_gather", "NCCL", 125, 64 * MIB), row("reduce_scatter", "peer, streams meet", 100, 64 * MIB),
                              row("reduce_scatter", "NCCL", 119, 64 * MIB)])
        self.write("ring 8", [row("32/32 d128 64k", "forward by copies", 1000, floor_us=920), row("32/32 d128 64k", "backward by copies", 1000, floor_us=931),
                              row("32/32 d128 128k", "forward by copies", 500, floor_us=500)])
        self.write("moe 8", [row("dispatch", "HBM 588 MB", 1, gb_per_s=400, title="T4096 H7168 E256 k8, uniform, peer stores, .."),
                             row("pack and signals", "8 CTAs", 11, gb_per_s=290, title=parts), row("pack and signals", "all", 10, gb_per_s=301, title=parts),
                             row("pack and signals", "all", 9, gb_per_s=200, title="T16384 H2048 E128 k8, parts"),
                             row("sum_experts, signals", "all", 10, gb_per_s=299, title=parts)])
        self.write("fsdp 8", [row("step", "fp32 wire", 6000, floor_us=900, title="step of 8 units of 8192^2, 16 tokens; floor: .."),
                              row("step", "8 x 8192^2, fp32", 106000, floor_us=100000, title=square),
                              row("step", "8 x 8192^2, fp32, 4 SMs left", 104900, floor_us=100000, title=square)])
        holds = {text: h for text, (_, h) in self.bars().items()}
        self.assertEqual(holds, {"all-gather and reduce": True, "all_gather of 64 MiB": True, "reduce_scatter of 64 MiB": False,
                                 "ring over local, forward": False, "ring over local, backward": True, "dispatch": True, "combine": False,
                                 "FSDP step of 8192 tokens": True})
        report.write(self.out)
        self.assertIn("| FSDP step of 8192 tokens: 1.05 of the computation | 1.05 | holds |", self.text())
        self.assertIn("| combine: 300 GB/s of wire | 299 | MISSED |", self.text())

    def test_what_a_job_leaves_that_was_ended_is_read(self):
        self.write("comm 8", [row("all_gather", "NCCL", 125, 64 * MIB), row("all_gather", "NCCL", 5, 4096), row("all_gather", "peer copies", 6, 4096)])
        with open(self.out / "comm 8.jsonl", "a") as rows:
            rows.write('{"ranks":8,"mode":"thr')
        self.assertEqual(self.bars()["all-gather and reduce"], ("all_gather 4 KiB 1.20", False))
        self.assertIsNone(self.bars()["all_gather of 64 MiB"][1])

    def test_slower_than_nccl_at_one_size_is_named(self):
        self.write("comm 8", [row("all_gather", "peer copies", 100, 4096), row("all_gather", "NCCL", 80, 4096)])
        self.assertEqual(self.bars()["all-gather and reduce"], ("all_gather 4 KiB 1.25", False))

    def test_weak_and_strong_scaling(self):
        """2 x 16k tokens take two GPUs 4 times as long as 16k one: half of the rate. 64k take them half as long."""
        names = {1: ("16k", 1000), 2: ("32k", 4000)}
        for n, (length, us) in names.items():
            self.write(f"ring {n}", [row(f"32/32 d128 {length}", "forward by copies", us), row("32/32 d128 64k", "forward by copies", 16000 / n)])
        for n, mesh in ((1, "pp1-dp1-cp1-ep1"), (2, "pp1-dp1-cp2-ep2")):
            for what in ("strong", "weak"):
                self.write(f"{what} {mesh}", [{"loss": 1, "tokens_per_second": 1000 * (n if what == "weak" else 1), "peak_bytes": 1 << 30}] * 2)
        report.write(self.out)
        rate = lambda tokens, us, n: report._number(tokens * tokens / 2 * 32 * 128 * 4 / n / us / 1e6)
        self.assertIn(f"| forward | {rate(16384, 1000, 1)} | {rate(32768, 4000, 2)} |", self.text())
        self.assertIn(f"| forward | {rate(65536, 16000, 1)} | {rate(65536, 8000, 2)} |", self.text())
        self.assertEqual(rate(65536, 16000, 1), rate(65536, 8000, 2))
        self.assertIn("| pp1-dp1-cp2-ep2 | 2 | 2000 | 1 | 1000 | 0.5 | 1 | - | - |", self.text())
        for plot in ("ring-weak", "ring-strong", "trainer"):
            self.assertIn("<polyline", (self.out / f"{plot}.svg").read_text())

    def test_trainer_is_compared_with_one_rank(self):
        losses = lambda values: [{"loss": v, "tokens_per_second": 1, "peak_bytes": 1} for v in values]
        self.write(f"losses {jobs.ONE_RANK}", losses([10, 8]))
        self.write("losses pp1-dp1-cp2-ep2", losses([10, 8.01]))
        results = report.Results(self.out)
        self.assertAlmostEqual(results.loss_distance("losses", "pp1-dp1-cp2-ep2"), 0.00125)
        self.assertIsNone(results.loss_distance("losses", "pp1-dp2-cp2-ep4"))
        self.assertTrue(report.write(self.out))
        self.write("losses pp1-dp1-cp2-ep2", losses([10, 8.1]))
        self.assertFalse(report.write(self.out))
        self.assertIn("1.2e-02 TOO FAR", self.text())

    def test_a_loss_that_is_no_number_is_shown_and_fails(self):
        """Of either side, and in the runs whose speed counts; at any step."""
        losses = lambda values: [{"loss": v, "tokens_per_second": 1, "peak_bytes": 1} for v in values]
        good, mesh = losses([10, 8, 7]), "pp1-dp1-cp2-ep2"
        for bad in (losses([10, None, 7]), losses([None, 8, 7]), losses([10, 8, float("inf")])):
            for name, said in ((f"losses {mesh}", "inf TOO FAR"), (f"losses {jobs.ONE_RANK}", "inf TOO FAR"), (f"strong {mesh}", "DIVERGED")):
                for one in (f"losses {jobs.ONE_RANK}", f"losses {mesh}", f"strong {jobs.ONE_RANK}", f"strong {mesh}"):
                    self.write(one, bad if one == name else good)
                self.assertFalse(report.write(self.out))
                self.assertIn(said, self.text())
                self.assertIn(f"DIVERGED: {name}: the loss of step", self.text())
        self.write(f"strong {mesh}", good)
        self.assertTrue(report.write(self.out))

    def test_times_that_are_no_number_hold_no_bar(self):
        self.write("comm 8", [row("all_gather", "peer copies", None, 64 * MIB, None), row("all_gather", "NCCL", 80, 64 * MIB)])
        self.ended(comm_8=0)
        self.assertFalse(report.write(self.out))
        self.assertEqual([self.bars()[bar][1] for bar in ("all-gather and reduce", "all_gather of 64 MiB")], [False, False])
        self.assertIn("comm 8: Communicators: GB/s that each rank sends, 64 MiB blocks: all_gather, pleat", self.text())

    def test_lines_that_are_no_json_are_left_out_and_named(self):
        self.write("comm 8", [row("all_gather", "NCCL", 125, 64 * MIB)])
        with open(self.out / "comm 8.jsonl", "a") as rows:
            rows.write('{"operation": "all_g\n"half"\n{"loss": -nan}\n')
            rows.write(json.dumps(row("all_gather", "peer copies", 100, 64 * MIB)) + '\n{"opera')
        self.assertFalse(report.write(self.out))
        self.assertEqual(self.bars()["all_gather of 64 MiB"], ("1.25", True))
        for line in (2, 3, 4, 6):
            self.assertIn(f"left out, no JSON: comm 8.jsonl, line {line}\n", self.text())

    def test_jobs_that_were_interrupted_or_not_run_are_named(self):
        self.ended(comm_2=report.INTERRUPTED)
        self.assertFalse(report.write(self.out, ["comm 2", "moe 2"]))
        for said in ("1 jobs, 0 of them failed, 1 interrupted.", "- interrupted: comm 2\n", "- not run: moe 2\n"):
            self.assertIn(said, self.text())
        self.assertNotIn("not run: comm 2", self.text())

    def test_a_failed_job_fails_the_report_which_says_how_it_ended(self):
        self.ended(moe_2=124)
        (self.out / "logs" / "moe 2.txt").write_text("rank 1 waits for rows of rank 0\n\n")
        self.assertFalse(report.write(self.out))
        self.assertIn("FAILED (out of time): moe 2; the end of logs/moe 2.txt: `rank 1 waits for rows of rank 0`", self.text())

    def test_a_job_that_leaves_no_number_fails_the_report(self):
        self.ended(moe_2=0)
        self.write("moe 2", [row("dispatch", "HBM 588 MB", 300, title="T4096 H7168 E256 k8, uniform, peer copies, ..")])
        self.assertFalse(report.write(self.out))
        self.assertIn("rank of 7168, 256 experts, 8 of them each (weak scaling): combine", self.text())
        self.assertNotIn("(weak scaling): dispatch", self.text())

    def test_rates_of_peers(self):
        (self.out / "logs" / "peer ring 2.txt").write_text("context_parallel 32/32 d128 64k: forward 401, backward 300 TFLOP/s\n")
        (self.out / "logs" / "peer moe 2.txt").write_text("T4096 H7168 E256 k8: dispatch 2000 us, combine 1900 us\n")
        (self.out / "logs" / "peer fsdp 2.txt").write_text(
            "8 x 8192^2, 8192 tokens            fp32 sums                      50.000    1.000    1.200      100\n"
            "8 x 8192^2, 8192 tokens            bf16 sums, prefetch            45.000    1.000    1.080      100\n")
        results = report.Results(self.out)
        self.assertEqual((results.ring_peer_tflops("backward", lambda n: 65536, 2), results.moe_peer_us("combine", 2), results.fsdp_peer_ratio(2)),
                         (300, 1900, 1.08))


class Jobs(unittest.TestCase):
    def test_no_job_takes_more_gpus_than_there_are(self):
        self.assertEqual({job.ranks for job in jobs.jobs("b", "o", 2, jobs.KINDS, False)}, {1, 2})

    def test_every_table_has_a_job_that_fills_it(self):
        """On each number of GPUs: a line of a table whose job no run has would stay empty."""
        for quick in (False, True):
            names = {job.name for job in jobs.jobs("b", "o", 8, jobs.KINDS, quick)}
            for section in report.sections(report.Results("nowhere")):
                for name, (job, _) in section.series.items():
                    wanted = {job(n) for n in jobs.COUNTS if not (n == 1 and section.plot == "comm")}
                    self.assertEqual(wanted - names, set(), name)

    def test_ring_attention_runs_the_lengths_of_its_tables(self):
        for quick in (False, True):
            for job in jobs.jobs("b", "o", 8, ("ring",), quick):
                words = job.command[job.command.index("--tokens" if "peer" in job.name else "--rows") + 1].split(",")
                unit = 1 if "peer" in job.name else 1024
                for tokens in (jobs.STRONG_TOKENS, jobs.WEAK_TOKENS * job.ranks):
                    self.assertIn(str(tokens // unit) + ("" if unit == 1 else "k"), words, job.name)

    def output(self, *words):
        """The exit code, and what was printed."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                return scaling.main(list(words)), text.getvalue()
            except SystemExit as end:
                return end.code, text.getvalue()

    def test_a_dry_run_without_gpus_lists_what_eight_would_run(self):
        with unittest.mock.patch.object(scaling, "visible_gpus", return_value=[]):
            code, text = self.output("--dry-run")
        self.assertEqual((code, "\nmoe 8: " in text), (0, True))
        self.assertNotIn("moe 2: ", self.output("--dry-run", "--gpus", "1")[1])

    def test_options_that_cannot_be_are_named(self):
        for words, said in ((("--gpus", "0"), "--gpus 0: 1 or more"), (("--gpus", "-1"), "--gpus -1: 1 or more"),
                            (("--build", "/nowhere"), "--build /nowhere is no folder")):
            code, text = self.output(*words)
            self.assertEqual((code, said in text), (2, True), text)

    def test_the_text_holds_the_largest_batch(self):
        with tempfile.TemporaryDirectory() as folder:
            jobs.write_text(folder)
            bytes_of_text = (pathlib.Path(folder) / "text").stat().st_size
        for job in jobs.jobs("b", "o", 8, ("trainer",), False):
            value = lambda name: int(job.command[job.command.index(name) + 1])
            self.assertLess(value("--batch") * value("--seq"), bytes_of_text, job.name)

    def test_every_mesh_folds_into_its_ranks(self):
        for ranks, meshes in jobs.MESHES.items():
            for mesh in meshes:
                pp, dp, cp = (int(word[2:]) for word in mesh.split("-")[:3])
                self.assertEqual(pp * dp * cp, ranks, mesh)

    def run_all(self, todo, side_by_side=False):
        """Codes by name, and what was printed."""
        with tempfile.TemporaryDirectory() as folder:
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                scaling.Runner(pathlib.Path(folder), ["0", "1"]).run_all(todo, side_by_side)
            return report.ends_of_jobs(folder), text.getvalue()

    def test_a_job_that_takes_too_long_is_ended_and_the_next_is_run(self):
        sleeps = jobs.Job("sleeps", "tests", 1, ("sh", "-c", "sleep 30 & wait"), time_limit_s=0.1)
        ends, text = self.run_all([sleeps, jobs.Job("fails", "tests", 2, ("false",)), jobs.Job("ends", "tests", 1, ("true",))])
        self.assertEqual(ends, {"sleeps": 124, "fails": 1, "ends": 0})
        self.assertIn("[1/3] sleeps: FAILED (out of time)", text)

    def test_side_by_side_jobs_have_gpus_of_their_own(self):
        """Each of the first two waits for the other, which no job after another could."""
        with tempfile.TemporaryDirectory() as folder:
            meets = lambda mine, other: f"touch {folder}/{mine}; until [ -e {folder}/{other} ]; do sleep 0.01; done"
            here = "printenv CUDA_VISIBLE_DEVICES >> " + f"{folder}/gpus"
            todo = [jobs.Job("both", "tests", 2, ("sh", "-c", here)),
                    *(jobs.Job(a, "tests", 1, ("sh", "-c", f"{meets(a, b)}; {here}"), time_limit_s=20) for a, b in ("xy", "yx"))]
            ends, _ = self.run_all(todo, side_by_side=True)
            gpus = pathlib.Path(folder, "gpus").read_text().split()
        self.assertEqual(ends, {"x": 0, "y": 0, "both": 0})
        self.assertEqual((sorted(gpus[:2]), sorted(gpus[2].split(","))), (["0", "1"], ["0", "1"]))

    def test_a_job_that_cannot_be_started_fails_and_the_next_is_run(self):
        for side_by_side in (False, True):
            ends, text = self.run_all([jobs.Job("none", "tests", 2, ("/nowhere/bench",)), jobs.Job("ends", "tests", 2, ("true",))], side_by_side)
            self.assertEqual(ends, {"none": report.NOT_STARTED, "ends": 0})
            self.assertIn("[1/2] none: FAILED (cannot be started)", text)

    def test_a_build_without_programs_fails_every_job_but_peers(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(scaling, "visible_gpus", return_value=["0"]):
            code, text = self.output("--build", folder, "--out", f"{folder}/out", "--only", "tests,moe")
            said = pathlib.Path(folder, "out", "report.md").read_text()
            ends = report.ends_of_jobs(f"{folder}/out")
        self.assertEqual((code, ends["moe 1"]), (1, report.NOT_STARTED), text)
        self.assertNotEqual(ends["tests"], 0, "a folder without tests is no tests that are ok")
        self.assertIn("FAILED (cannot be started): moe 1; the end of logs/moe 1.txt: `", said)
        self.assertIn(f"No such file or directory: '{folder}/bench/moe_bench'", said)

    def test_what_a_job_leaves_running_is_ended(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_all([jobs.Job("leaves", "tests", 1, ("sh", "-c", f"sleep 30 & echo $! > {folder}/pid"))])
            pid = pathlib.Path(folder, "pid").read_text().strip()
            runs = lambda: subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()[:1] not in ("", "Z")
            late = time.monotonic() + 10
            while runs() and time.monotonic() < late:
                time.sleep(0.01)
            self.assertFalse(runs())

    def test_a_run_that_is_ended_ends_its_jobs_and_says_what_is_left(self):
        """By each signal; while it waits for a GPU (more jobs than GPUs) and while it waits for its last job."""
        for number in scaling.SIGNALS:
            for names in (("sleeps",), ("sleeps", "waits")):
                with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(scaling, "visible_gpus", return_value=["0"]), \
                        unittest.mock.patch.object(jobs, "jobs", return_value=[jobs.Job(name, "tests", 1, ("sleep", "30")) for name in names]):
                    before = signal.getsignal(number)
                    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
                    start = time.monotonic()
                    code, text = self.output("--build", folder, "--out", f"{folder}/out")
                    said = pathlib.Path(folder, "out", "report.md").read_text()
                    ends = report.ends_of_jobs(f"{folder}/out")
                self.assertEqual((code, ends), (report.INTERRUPTED, {"sleeps": report.INTERRUPTED}), text)
                for line in ("sleeps: interrupted", f"not run to the end: {', '.join(names)}\n", "--resume goes on"):
                    self.assertIn(line, text)
                self.assertIn("- interrupted: sleeps", said)
                self.assertEqual("- not run: waits" in said, "waits" in names)
                self.assertLess(time.monotonic() - start, 10)
                self.assertEqual(signal.getsignal(number), before)

    def test_a_signal_that_was_ignored_stays_so(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
        self.addCleanup(signal.signal, signal.SIGHUP, before)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP)).start()
        self.assertEqual(self.run_all([jobs.Job("sleeps", "tests", 1, ("sleep", "0.3"))])[0], {"sleeps": 0})

    def test_a_folder_that_cannot_be_made_is_named(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(scaling, "visible_gpus", return_value=["0"]):
            pathlib.Path(folder, "file").touch()
            for out in (f"{folder}/file", f"{folder}/file/out", "/proc/out"):
                code, text = self.output("--build", folder, "--out", out)
                self.assertEqual((code, f"--out {out} cannot be written" in text), (2, True), text)

    def test_a_run_whose_last_line_was_cut_is_resumed(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(scaling, "visible_gpus", return_value=["0"]), \
                unittest.mock.patch.object(jobs, "jobs", return_value=[jobs.Job(name, "tests", 1, ("true",)) for name in "ab"]):
            out = pathlib.Path(folder, "out")
            out.mkdir()
            (out / "jobs.jsonl").write_text('{"name": "a", "code": 0}\n{"name": "b", "co')
            self.assertFalse(report.write(out))
            code, text = self.output("--build", folder, "--out", str(out), "--resume")
            self.assertEqual((code, report.ends_of_jobs(out)), (0, {"a": 0, "b": 0}), text)
            self.assertNotIn("no JSON", (out / "report.md").read_text())

    def test_a_run_is_resumed_with_what_did_not_end_well(self):
        ran = []
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(scaling, "visible_gpus", return_value=["0", "1"]):
            out = pathlib.Path(folder, "out")
            words = ("--build", folder, "--out", str(out), "--only", "comm,moe")
            self.assertIn("holds no run", self.output(*words, "--resume")[1])
            names = lambda: [job.name for job in jobs.jobs(folder, out, 2, ("comm", "moe"), False)]
            out.mkdir()
            (out / "jobs.jsonl").write_text("".join(json.dumps({"name": name, "code": code}) + "\n" for name, code in
                                                    (("comm 2", 0), ("moe 1", 1), ("peer moe 1", 77))))
            self.assertIn("--resume, or --report", self.output(*words)[1])
            with unittest.mock.patch.object(scaling.Runner, "run_all", lambda self, todo, side_by_side: ran.extend(job.name for job in todo)):
                self.output(*words, "--resume")
            self.assertEqual(ran, [name for name in names() if name not in ("comm 2", "peer moe 1")])
            self.assertIn("moe 1", ran)


if __name__ == "__main__":
    unittest.main()
