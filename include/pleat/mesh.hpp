// The folded mesh: types, groups and checks. Text, drawing and the communicator plan are headers of their own.
#pragma once

#include <pleat/mesh/axis.hpp>
#include <pleat/mesh/checks.hpp>
#include <pleat/mesh/concept.hpp>
#include <pleat/mesh/domain.hpp>
#include <pleat/mesh/factorization.hpp>
#include <pleat/mesh/folded_mesh.hpp>
#include <pleat/mesh/group.hpp>
#include <pleat/mesh/model_checks.hpp>
#include <pleat/mesh/runtime_mesh.hpp>
