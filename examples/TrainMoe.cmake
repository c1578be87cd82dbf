# The trainer: its build, the demo's run, and the runs that CI checks against one rank.
pleat_add_program(train_moe ${programs})
if(PLEAT_TRAIN_MOE_DEMO)
  target_compile_definitions(train_moe PRIVATE PLEAT_TRAIN_MOE_DEMO)
endif()
target_compile_definitions(train_moe PRIVATE PLEAT_DEFAULT_TEXT="${PROJECT_SOURCE_DIR}/LICENSE")

# The build's last step rather than a test: the console belongs to the program, so its progress is seen as it runs.
add_custom_target(
  run_demo
  COMMAND train_moe --mesh pp1-dp8-cp4-ep8 --text ${PROJECT_SOURCE_DIR}/LICENSE --steps 32 --seq 128 --batch 8
          --layers 4 --hidden 64 --experts 16 --top-k 2 --dtype f64 --check
  VERBATIM USES_TERMINAL)
