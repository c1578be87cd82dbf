// Umbrella: ring attention and the host's local kernel.
#pragma once

#include <pleat/attention/host/leaf.hpp>
#include <pleat/attention/relayout.hpp>
#include <pleat/attention/ring.hpp>
#include <pleat/attention/zigzag.hpp>
#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/leaf.hpp>
