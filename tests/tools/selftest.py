#!/usr/bin/env python3
"""The checkers notice each breach: a clean small tree passes, and one change to it makes exactly one problem."""
import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
import unittest

import check_errors
import check_includes
import check_links
import check_snippets
import kernel_resources

ROOT = pathlib.Path(__file__).parents[2]
ONCE = "#pragma once\n"
CLEAN = {
    "include/pleat/version.hpp": ONCE,
    "include/pleat/mesh.hpp": ONCE + "#include <pleat/mesh/axes.hpp>\n",
    "include/pleat/fsdp.hpp": ONCE + "#include <pleat/fsdp/gather.hpp>\n#include <pleat/fsdp/host/leaf.hpp>\n",
    "include/pleat/core/error.hpp": ONCE + '#include <exception>\nvoid f() { fail("pleat[M01]: no"); }\n',
    "include/pleat/mesh/axes.hpp": ONCE + "#include <concepts>\n#include <pleat/core/error.hpp>\n",
    "include/pleat/comm/comm.hpp": ONCE + "#include <pleat/core/error.hpp>\n",
    "include/pleat/comm/host/thread.hpp": ONCE + "#include <pleat/comm/comm.hpp>\n",
    "include/pleat/cuda/stream.hpp": ONCE + "#include <cuda_runtime_api.h>\n#include <pleat/core/error.hpp>\n",
    "include/pleat/fsdp/layout.hpp": ONCE + "#include <pleat/core/error.hpp>\n",
    "include/pleat/fsdp/gather.hpp": ONCE + "#include <pleat/mesh.hpp>\n#include <pleat/comm/comm.hpp>\n#include <pleat/fsdp/layout.hpp>\n",
    "include/pleat/fsdp/host/leaf.hpp": ONCE + "#include <pleat/fsdp/layout.hpp>\n",
    "include/pleat/fsdp/cuda/leaf.cuh": ONCE + "#include <cub/cub.cuh>\n#include <pleat/cuda/stream.hpp>\n",
    "include/pleat/optim/adamw.hpp": ONCE + "#include <pleat/fsdp/layout.hpp>\n",
    "examples/01_mesh.cpp": "#include <pleat/mesh.hpp>\n",
    "tests/unit/core/error_test.cpp": '// CHECK_THROWS("pleat[M01]: no")\n',
    "docs/errors.md": "| id | rule |\n|---|---|\n| M01 | no |\n",
}


def include(target):
    return f"#include <{target}>\n"


class CheckersNotice(unittest.TestCase):
    def problems(self, checker, changes):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**CLEAN, **changes}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return checker.check(root)

    def expect(self, checker, changes, *texts):
        found = self.problems(checker, changes)
        self.assertEqual(len(found), 1, found)
        for text in texts:
            self.assertIn(text, found[0])

    def adding(self, name, text, *expected):
        name = "include/pleat/" + name
        self.expect(check_includes, {name: CLEAN.get(name, ONCE) + text}, *expected)

    def test_clean_tree_passes(self):
        self.assertEqual(self.problems(check_includes, {}), [])
        self.assertEqual(self.problems(check_errors, {}), [])

    def test_forbidden_arrows(self):
        self.adding("core/error.hpp", include("pleat/mesh/axes.hpp"), "core/error.hpp", "may not include")
        self.adding("mesh/axes.hpp", include("pleat/comm/comm.hpp"), "may not include")
        self.adding("comm/comm.hpp", include("pleat/fsdp/layout.hpp"), "may not include")
        self.adding("optim/adamw.hpp", include("pleat/fsdp/gather.hpp"), "may not include")
        self.adding("fsdp/host/leaf.hpp", include("pleat/comm/comm.hpp"), "may not include")
        self.adding("fsdp/cuda/leaf.cuh", include("pleat/comm/comm.hpp"), "may not include")
        self.adding("fsdp/gather.hpp", include("pleat/fsdp.hpp"), "may not include")
        self.adding("core/error.hpp", include("pleat/mesh.hpp"), "may not include")
        self.adding("mesh.hpp", include("pleat/cuda/stream.hpp"), "may not include")

    def test_schedule_includes_leaf(self):
        self.adding("fsdp/gather.hpp", include("pleat/fsdp/host/leaf.hpp"), "a schedule never includes a leaf")
        self.adding("fsdp/gather.hpp", include("pleat/comm/host/thread.hpp"), "a schedule never includes a leaf")
        self.adding("fsdp/gather.hpp", include("pleat/fsdp/cuda/leaf.cuh"), "a schedule never includes a leaf")
        self.adding("fsdp/gather.hpp", include("pleat/cuda/stream.hpp"), "may not include")

    def test_toolkit_in_host_header(self):
        self.adding("comm/comm.hpp", include("cuda_runtime.h"), "without a CUDA toolkit")
        self.adding("fsdp/layout.hpp", include("nccl.h"), "without a CUDA toolkit")
        self.adding("fsdp/host/leaf.hpp", include("cub/cub.cuh"), "without a CUDA toolkit")
        self.adding("fsdp.hpp", include("pleat/fsdp/cuda/leaf.cuh"), "without a CUDA toolkit")

    def test_core_includes_only_the_standard_library(self):
        self.adding("core/error.hpp", include("unistd.h"), "only the standard library")

    def test_form(self):
        self.expect(check_includes, {"include/pleat/mesh/axes.hpp": "int once;\n"}, "#pragma once")
        self.adding("mesh/axes.hpp", "//\n" * 500, "lines, more than")
        self.adding("mesh/axes.hpp", '#include "pleat/core/error.hpp"\n', "write <pleat/...>")
        self.adding("mesh/axes.hpp", include("pleat/core/gone.hpp"), "does not exist")
        self.adding("misc/a.hpp", "", "the house has no folder misc/")
        self.adding("mesh/axes.h", "", ".hpp or .cuh")
        self.expect(check_includes, {"src/a.cpp": ""}, "top-level folders")

    def test_mesh_closure(self):
        for costly in check_includes.MESH_NEVER_INCLUDES:
            self.adding("core/error.hpp", include(costly), "<pleat/mesh.hpp> reaches it", f"<{costly}>")

    def test_examples(self):
        self.expect(check_includes, {"include/pleat/detail/a.hpp": ONCE, "examples/01_mesh.cpp": include("pleat/detail/a.hpp")},
                    "no public header")
        self.expect(check_includes, {"examples/train_moe/main.cpp": "//\n" * 301}, "more than 300 lines")

    def test_error_ids(self):
        self.expect(check_errors, {"docs/errors.md": ""}, "M01", "no row")
        self.expect(check_errors, {"tests/unit/core/error_test.cpp": "// M01"}, "M01", "no test names it")
        self.expect(check_errors, {"docs/errors.md": CLEAN["docs/errors.md"] + "| `F02` | x |\n"}, "F02", "nothing raises it")
        self.expect(check_errors, {"docs/errors.md": CLEAN["docs/errors.md"] + "| M01 | x |\n"}, "2 rows")


    def test_links(self):
        page = "# The *one* `page`\n## What it costs, in us\n## Same\n## Same\n```sh\n# no heading\n[a](b)\n```\n"
        good = "[e](docs/one.md#what-it-costs-in-us) [g](docs/one.md#same-1) [h](docs/one.md#the-one-page) [d](docs) [w](https://a.b/c#d) `[x](y)`\n"
        tree = {"docs/one.md": page + "[self](#same)\n", "README.md": good}
        self.assertEqual(self.problems(check_links, tree), [])
        for link, text in (
            ("docs/two.md", "no such file"),
            ("docs/one.md#no-heading", "no such heading"),
            ("docs/one.md#same-2", "no such heading"),
            ("#same", "no such heading"),
            ("docs/two.svg", "no such file"),
        ):
            self.expect(check_links, {**tree, "README.md": good + f"[l]({link})\n"}, f"README.md: {link} leads nowhere", text)


class SnippetsNotice(unittest.TestCase):
    def untrue(self, *lines):
        text = "".join(f"{line}\n" for line in lines)
        with contextlib.redirect_stdout(io.StringIO()):
            return list(check_snippets.untrue([("page.md", text)], {"printf": "printf"}, pathlib.Path()))

    def test_output(self):
        command = "$ printf 'one  two\\nthree\\nfour\\n'"
        self.assertEqual(self.untrue(command, "one two", "..", "four"), [])
        self.assertEqual(len(self.untrue(command, "four", "..", "one two")), 1)
        self.assertEqual(len(self.untrue(command, "one two", "five")), 1)
        self.assertEqual(self.untrue("$ some_other_program", "five"), [])

    def test_code(self):
        with tempfile.TemporaryDirectory() as folder:
            found = list(check_snippets.uncompiled({"page.1": "#include <pleat/no.hpp>\n"}, pathlib.Path(folder), "true"))
        for text in ("there is no pleat/no.hpp", "included 0 times", "which no page has"):
            self.assertTrue(any(text in problem for problem in found), text)


class CallsNotice(unittest.TestCase):
    """A call that checks nothing fails, and one line says why."""

    def says(self, script, arguments, *texts):
        done = subprocess.run([sys.executable, ROOT / script, *arguments], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0, script)
        self.assertNotIn("Traceback", done.stderr)
        for text in texts:
            self.assertIn(text, done.stderr.splitlines()[-1])

    def test_snippets(self):
        self.says("tests/tools/check_snippets.py", [], "0 arguments", "<work folder> <compiler>")
        self.says("tests/tools/check_snippets.py", ["work", "no_compiler"], "`no_compiler` is no program")
        self.says("tests/tools/check_snippets.py", ["work", sys.executable, "mesh_map"], "mesh_map", "is no program")

    def test_compile_time(self):
        measure = "bench/compile_time/measure.py"
        self.says(measure, ["--check", "headers/comm", "no_header"], "no_header", "headers/comm.cpp")
        self.says(measure, ["--check", "--repeat", "0"], "--repeat 0: 1 or more")
        self.says(measure, ["--check", "--compiler", "no_compiler", "--nvcc", "no_nvcc"], "nothing was measured", "no_compiler")


class ResourcesNotice(unittest.TestCase):
    def test_spills(self):
        text = """ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
ptxas info    : Function properties for _Z1av
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Function properties for _Z1bv
    88 bytes stack frame, 148 bytes spill stores, 256 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 88 bytes cumulative stack size
"""
        self.assertEqual(kernel_resources.kernels(text), [("_Z1av", 40, 0, 0, 16), ("_Z1bv", 255, 148, 256, 0)])


if __name__ == "__main__":
    unittest.main()
