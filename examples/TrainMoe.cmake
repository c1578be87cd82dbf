# The trainer: its build, the demo's run, and the runs that are checked against one rank.
include(TrainMoeParts.cmake)
# What programs that train on host ranks have in common.
add_library(train_moe_host OBJECT train_moe/host/train.cpp ${CMAKE_CURRENT_BINARY_DIR}/train_moe_commit.cpp)
target_link_libraries(train_moe_host PUBLIC train_moe_parts PRIVATE pleat_warnings)
target_compile_definitions(train_moe_host PUBLIC $<$<BOOL:${PLEAT_TRAIN_MOE_DEMO}>:PLEAT_TRAIN_MOE_DEMO>)
pleat_add_program(train_moe train_moe/main.cpp)
target_link_libraries(train_moe PRIVATE train_moe_host train_moe_parts)

# Defines `extern const char train_moe_commit[]` with the commit that is built; written again only when it changed.
add_custom_target(
  train_moe_commit
  COMMAND ${CMAKE_COMMAND} -Dsource=${PROJECT_SOURCE_DIR} -Dname=train_moe_commit
          -Dfile=${CMAKE_CURRENT_BINARY_DIR}/train_moe_commit.cpp -P ${PROJECT_SOURCE_DIR}/cmake/WriteCommit.cmake
  BYPRODUCTS ${CMAKE_CURRENT_BINARY_DIR}/train_moe_commit.cpp
  COMMENT "the commit of this checkout"
  VERBATIM)
add_dependencies(train_moe_host train_moe_commit)

# The build's last step rather than a test: the console belongs to the program, so its progress is seen as it runs.
add_custom_target(
  run_demo
  COMMAND train_moe --mesh pp1-dp8-cp4-ep8 --text ${PROJECT_SOURCE_DIR}/LICENSE --steps 32 --seq 128 --batch 8
          --layers 4 --hidden 64 --experts 16 --top-k 2 --dtype f64 --check
  COMMENT "train_moe on the 32 ranks of pp1-dp8-cp4-ep8, every step checked against one rank"
  VERBATIM USES_TERMINAL)

set(small --steps 3 --seq 120 --layers 2 --hidden 32 --experts 16 --top-k 2 --dtype f64)
foreach(mesh IN ITEMS pp1-dp8-cp4-ep8 pp1-dp2-cp4-ep2 pp1-dp4-cp2-ep8 pp1-dp2-cp3-ep2 pp1-dp4-cp1-ep4 pp1-dp4-cp4-ep4-r2
                      pp1-dp1-cp1-ep1)
  string(REGEX REPLACE "^.*-dp([0-9]+)-.*$" "\\1" dp ${mesh})
  foreach(accumulation IN ITEMS 1 3)
    math(EXPR batch "${dp} * ${accumulation}")
    pleat_add_run(train_moe_${mesh}_x${accumulation} TEXT "check: loss"
                  COMMAND train_moe --mesh ${mesh} ${small} --batch ${batch} --micro-batch 1 --check)
  endforeach()
endforeach()

# Pipelines, and what a model may have besides.
set(pipeline --steps 2 --seq 64 --layers 4 --hidden 32 --experts 4 --batch 8 --micro-batch 1 --check)
set(latents --lora 12 --nope-dim 8 --rope-dim 4 --value-dim 6 --heads 4 --kv-heads 4 --shared 2 --dense-layers 1)
pleat_add_run(train_moe_1f1b TEXT "check: loss" COMMAND train_moe --mesh pp4-dp1-cp2-ep2 --schedule 1f1b --ragged ${pipeline})
pleat_add_run(train_moe_zbv TEXT "check: loss" COMMAND train_moe --mesh pp2-dp2-cp4-ep2 --schedule zbv --packed
              ${pipeline} ${latents})
# In turn, where tokens do not fill all turns; and parameters whose gradients round to 0.
pleat_add_run(train_moe_in_turn TEXT "check: loss" COMMAND train_moe --mesh pp1-dp2-cp1-ep1 --batch 4 --micro-batch 1 --seq 20
              --experts 8 --top-k 3 --hidden 16 --layers 2 --steps 2 --force-balance --check)
pleat_add_run(train_moe_gradients_of_0 TEXT "check: loss" COMMAND train_moe --mesh pp1-dp1-cp2-ep2 --batch 1 --seq 8 --hidden 7
              --layers 5 --experts 4 --top-k 3 --inner 1 --balance none --schedule 1f1b --check --clip 0 --packed --steps 2)
pleat_add_run(train_moe_pairs TEXT "check: loss" COMMAND train_moe --mesh pp2-dp2-cp1-ep2 --schedule 1f1b-pairs
              --times train_moe_pairs.txt ${pipeline})
set_tests_properties(train_moe_pairs PROPERTIES FIXTURES_SETUP train_moe_times)
pleat_add_run(pipeline_map_measured TEXT "1f1b-pairs: 2 ranks, 4 micro-batches.*F3&B0" COMMAND pipeline_map 1f1b-pairs 2 4
              --times train_moe_pairs.txt)
set_tests_properties(pipeline_map_measured PROPERTIES FIXTURES_REQUIRED train_moe_times)
pleat_add_run(train_moe_dualpipev TEXT "check: loss" COMMAND train_moe --mesh pp2-dp2-cp2-ep4 --schedule dualpipev --packed
              --ragged --optimizer muon ${pipeline} ${latents})

pleat_add_run(train_moe_f32 TEXT "check: loss" COMMAND train_moe --mesh pp1-dp4-cp2-ep8 ${small} --dtype f32 --check)
pleat_add_run(train_moe_names_the_failed_rank EXIT 1 TEXT "rank 5" COMMAND train_moe --mesh pp1-dp4-cp2-ep8 ${small}
              --fail-rank 5 --fail-step 2)
set_tests_properties(train_moe_names_the_failed_rank PROPERTIES TIMEOUT 20)
pleat_add_run(train_moe_refuses_a_mesh EXIT 2 TEXT "pleat.M02.*1 2 4 8" COMMAND train_moe --mesh pp1-dp4-cp2-ep3 ${small})
pleat_add_run(train_moe_refuses_a_folder EXIT 2 TEXT "is a directory" COMMAND train_moe ${small} --text .)
pleat_add_run(train_moe_refuses_times EXIT 2 TEXT "--times /nonexistent/x cannot be written" COMMAND train_moe ${small}
              --times /nonexistent/x)
pleat_add_run(train_moe_refuses_documents_of_one_token EXIT 2 TEXT "--seq 3 with --packed.*valid: 4 or more"
              COMMAND train_moe --packed --seq 3)
# Saved once, and no step left.
add_test(NAME train_moe_empties_a_folder COMMAND ${CMAKE_COMMAND} -E rm -rf train_moe_saved)
pleat_add_run(train_moe_saves COMMAND train_moe ${small} --save train_moe_saved)
pleat_add_run(train_moe_refuses_to_save_twice EXIT 2 TEXT "a checkpoint train_moe_saved/step-000000003, which this run would"
              COMMAND train_moe ${small} --save train_moe_saved)
pleat_add_run(train_moe_refuses_no_step EXIT 2 TEXT "has step 3, so no step is left of --steps 3; valid: 4 or more"
              COMMAND train_moe ${small} --load train_moe_saved)
set_tests_properties(train_moe_empties_a_folder PROPERTIES LABELS example TIMEOUT 300 FIXTURES_SETUP train_moe_no_checkpoint)
set_tests_properties(train_moe_saves PROPERTIES FIXTURES_REQUIRED train_moe_no_checkpoint FIXTURES_SETUP train_moe_checkpoint)
set_tests_properties(train_moe_refuses_to_save_twice train_moe_refuses_no_step PROPERTIES FIXTURES_REQUIRED train_moe_checkpoint)
pleat_add_run(train_moe_names_the_missing_memory EXIT 1 TEXT "pleat.T11.*bytes of host memory"
              COMMAND train_moe --hidden 65536 --layers 1024 --experts 4096 --seq 1024)
if(EXISTS /dev/full)
  pleat_add_run(train_moe_full_disk EXIT 1 TEXT "json /dev/full could not be written" COMMAND train_moe ${small}
                --json /dev/full)
  add_test(NAME train_moe_full_output COMMAND sh -c "\"$<TARGET_FILE:train_moe>\" --help > /dev/full; test $? = 1")
  set_tests_properties(train_moe_full_output PROPERTIES LABELS example TIMEOUT 300)
endif()

# The validation: minutes of 32 host ranks, as one command; its tables are in docs/validation.md.
if(NOT PLEAT_TRAIN_MOE_DEMO)
  pleat_add_program(validate validate/main.cpp validate/arm.cpp)
  target_link_libraries(validate PRIVATE train_moe_host train_moe_parts)
  pleat_add_run(validate_small TEXT "step-1 forward.*0.0e.00" COMMAND validate correctness --mesh pp4-dp8-cp1-ep1 --steps 2
                --batch 8 --out validate_small)
  pleat_add_run(validate_refuses_a_mesh EXIT 2 TEXT "valid: pp4-dp8-cp1-ep1" COMMAND validate correctness --mesh pp1)
  pleat_add_run(validate_refuses_repeats EXIT 2 TEXT "--repeats 0 is out of range; valid: 1 to" COMMAND validate performance
                --repeats 0)
  pleat_add_run(validate_refuses_steps EXIT 2 TEXT "--steps is no option of checkpoint" COMMAND validate checkpoint --steps 4)
  pleat_add_run(validate_refuses_a_folder EXIT 2 TEXT "^validate: --out .*/LICENSE cannot be made" COMMAND validate correctness
                --out ${PROJECT_SOURCE_DIR}/LICENSE)
  pleat_add_run(validate_names_its_commands EXIT 2 TEXT "valid: correctness performance checkpoint judge" COMMAND validate)
  add_custom_target(
    run_validation
    COMMAND ${CMAKE_COMMAND} -E rm -rf validation
    COMMAND validate correctness
    COMMAND validate performance
    COMMAND validate checkpoint
    COMMENT "the four meshes of 32 ranks: before folding, folded, two replicas, one rank"
    VERBATIM USES_TERMINAL)
endif()
if(TARGET pleat::mpi AND NOT PLEAT_TRAIN_MOE_DEMO)
  add_subdirectory(train_moe/mpi mpi_trainer)
endif()
