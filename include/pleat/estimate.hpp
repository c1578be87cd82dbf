// Umbrella: what a job takes on a mesh, and which meshes can run it.
#pragma once

#include <pleat/estimate/advice.hpp>
#include <pleat/estimate/draw.hpp>
#include <pleat/estimate/planner.hpp>
