// Umbrella: sharded safetensors checkpoints, saved and loaded on any mesh.
#pragma once

#include <pleat/checkpoint/catalog.hpp>
#include <pleat/checkpoint/error.hpp>
#include <pleat/checkpoint/file.hpp>
#include <pleat/checkpoint/folder.hpp>
#include <pleat/checkpoint/hugging_face.hpp>
#include <pleat/checkpoint/index.hpp>
#include <pleat/checkpoint/json.hpp>
#include <pleat/checkpoint/load.hpp>
#include <pleat/checkpoint/memory.hpp>
#include <pleat/checkpoint/model.hpp>
#include <pleat/checkpoint/safetensors.hpp>
#include <pleat/checkpoint/save.hpp>
