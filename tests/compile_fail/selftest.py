#!/usr/bin/env python3
"""The compile-fail runner notices each way in which a case can be wrong. Run: selftest.py <compiler>"""
import os
import sys
import tempfile
import unittest

import run

BODY = """
template <int N> struct must_be_even { static_assert(N % 2 == 0, "pleat[X01]: N must be even"); };
#ifdef PLEAT_FIXED
must_be_even<4> value;
#else
must_be_even<5> value;
#endif
"""


class RunnerNotices(unittest.TestCase):
    def breaches(self, text):
        with tempfile.TemporaryDirectory() as folder:
            case = os.path.join(folder, "case.cpp")
            with open(case, "w") as source:
                source.write(text)
            return run.breaches(case, [COMPILER, "-std=c++20", "-fsyntax-only", case])

    def test_a_good_case_passes(self):
        self.assertEqual(self.breaches("// expect: pleat[X01]: N must be even\n// values: must_be_even<5>" + BODY), [])

    def test_wrong_text(self):
        self.assertIn("first line with `error:`", self.breaches("// expect: pleat[X02]\n" + BODY)[0])

    def test_another_error_comes_first(self):
        self.assertIn("first line with `error:`", self.breaches("// expect: pleat[X01]\n\nint a = b;" + BODY)[0])

    def test_wrong_values(self):
        self.assertIn("must_be_even<7>", self.breaches("// expect: pleat[X01]\n// values: must_be_even<7>" + BODY)[0])

    def test_a_case_that_compiles(self):
        self.assertIn("it compiles", self.breaches("// expect: pleat[X01]\n" + BODY.replace("<5>", "<6>"))[0])

    def test_a_twin_that_fails(self):
        self.assertIn("the twin", self.breaches("// expect: pleat[X01]\n" + BODY.replace("<4>", "<3>"))[0])

    def test_no_expectation(self):
        self.assertIn("`// expect: <text>`", self.breaches(BODY)[0])


if __name__ == "__main__":
    COMPILER = sys.argv.pop(1)
    unittest.main()
