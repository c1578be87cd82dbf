#!/usr/bin/env python3
"""The report says what rows of the benchmarks hold: speeds, ratios, distances, bars, and what failed."""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import jobs
import report
import scaling


def row(operation, way, us, bytes=0, gb_per_s=0.0, floor_us=0.0, title=""):
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

    def test_of_nothing_every_bar_is_not_run(self):
        self.assertEqual({holds for _, holds in self.bars().values()}, {None})

    def test_bars_of_eight(self):
        mib = 1 << 20
        self.write("comm 8", [row("all_gather", "peer copies", 100, 64 * mib), row("all_gather", "peer stores, 4 CTAs", 110, 64 * mib),
                              row("all_gather", "NCCL", 125, 64 * mib), row("reduce_scatter", "peer, streams meet", 100, 64 * mib),
                              row("reduce_scatter", "NCCL", 119, 64 * mib)])
        self.write("ring 8", [row("32/32 d128 64k", "forward by copies", 1000, floor_us=920)])
        self.write("moe 8", [row("dispatch", "uniform", 10, gb_per_s=301, title="T4096 H7168"), row("dispatch", "uniform", 9, gb_per_s=200, title="T16384"),
                             row("combine", "uniform", 10, gb_per_s=299, title="T4096 H7168")])
        self.write("fsdp 8", [row("step", "fp32 wire", 6000, floor_us=900), row("step", "fp32 wire", 104900, floor_us=100000)])
        holds = {text: h for text, (_, h) in self.bars().items()}
        self.assertEqual(holds, {"all-gather and reduce": True, "all_gather of 64 MiB": True, "reduce_scatter of 64 MiB": False,
                                 "ring over local": False, "dispatch": True, "combine": False, "FSDP step of 8192 tokens": True})

    def test_slower_than_nccl_at_one_size_is_named(self):
        self.write("comm 8", [row("all_gather", "peer copies", 100, 4096), row("all_gather", "NCCL", 80, 4096)])
        self.assertEqual(self.bars()["all-gather and reduce"], ("all_gather 4 KiB 1.25", False))

    def test_trainer_is_compared_with_one_rank(self):
        losses = lambda values: [{"loss": v, "tokens_per_second": 1, "peak_bytes": 1} for v in values]
        self.write(f"losses {jobs.ONE_RANK}", losses([10, 8]))
        self.write("losses pp1-dp1-cp2-ep2", losses([10, 8.1]))
        results = report.Results(self.out)
        self.assertAlmostEqual(results.loss_distance("losses", "pp1-dp1-cp2-ep2"), 0.0125)
        self.assertIsNone(results.loss_distance("losses", "pp1-dp2-cp2-ep4"))
        report.write(self.out)
        self.assertIn("TOO FAR", (self.out / "report.md").read_text())

    def test_a_failed_job_fails_the_report(self):
        self.write("jobs", [{"name": "moe 2", "ranks": 2, "code": 124, "seconds": 600}])
        self.assertFalse(report.write(self.out))
        self.assertIn("FAILED (124): moe 2", (self.out / "report.md").read_text())

    def test_rates_of_peers(self):
        (self.out / "logs" / "peer ring 2.txt").write_text("context_parallel 32/32 d128 64k: forward 401, backward 300 TFLOP/s\n")
        (self.out / "logs" / "peer moe 2.txt").write_text("T4096 H7168 E256 k8: dispatch 2000 us, combine 1900 us\n")
        (self.out / "logs" / "peer fsdp 2.txt").write_text(
            "8 x 8192^2, 8192 tokens            fp32 sums                      50.000    1.000    1.200      100\n"
            "8 x 8192^2, 8192 tokens            bf16 sums, prefetch            45.000    1.000    1.080      100\n")
        results = report.Results(self.out)
        self.assertEqual((results.ring_peer(2, 65536, "backward"), results.moe_peer_us(2, "combine"), results.fsdp_peer_ratio(2)),
                         (300, 1900, 1.08))


class Jobs(unittest.TestCase):
    def test_no_job_takes_more_gpus_than_there_are(self):
        self.assertEqual({job.ranks for job in jobs.jobs("b", "o", 2, jobs.KINDS, False)}, {1, 2})

    def output(self, *words):
        """The exit code, and what was printed."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                return scaling.main(list(words)), text.getvalue()
            except SystemExit as end:
                return end.code, text.getvalue()

    def test_a_dry_run_without_gpus_lists_what_eight_would_run(self):
        with unittest.mock.patch.object(scaling, "visible_gpus", return_value=0):
            code, text = self.output("--dry-run")
        self.assertEqual((code, "\nmoe 8: " in text), (0, True))
        self.assertNotIn("moe 2: ", self.output("--dry-run", "--gpus", "1")[1])

    def test_options_that_cannot_be_are_named(self):
        for words, said in ((("--gpus", "0"), "--gpus 0: 1 or more"), (("--gpus", "-1"), "--gpus -1: 1 or more"),
                            (("--build", "/nowhere"), "--build /nowhere is no folder")):
            code, text = self.output(*words)
            self.assertEqual((code, said in text), (2, True), text)

    def test_every_mesh_folds_into_its_ranks(self):
        for ranks, meshes in jobs.MESHES.items():
            for mesh in meshes:
                pp, dp, cp = (int(word[2:]) for word in mesh.split("-")[:3])
                self.assertEqual(pp * dp * cp, ranks, mesh)

    def test_a_job_that_takes_too_long_is_ended(self):
        with tempfile.TemporaryDirectory() as folder:
            job = jobs.Job("sleeps", "tests", 1, ("sleep", "30"), time_limit_s=0.1)
            self.assertEqual(scaling.run(job, pathlib.Path(folder)), 124)


if __name__ == "__main__":
    unittest.main()
