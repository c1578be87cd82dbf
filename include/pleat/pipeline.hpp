// Umbrella: pipeline schedules, their simulator, their drawings and their executor.
#pragma once

#include <pleat/core/host/executor.hpp>
#include <pleat/pipeline/draw.hpp>
#include <pleat/pipeline/generate.hpp>
#include <pleat/pipeline/run.hpp>
